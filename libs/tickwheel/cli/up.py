"""`tickwheel up`: a whole cluster on this machine, with something to watch. Ctrl-C stops all of it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tickwheel.cli import EXIT_FAILED, output
from tickwheel.cli.run import row
from tickwheel.client import BlockingClient, make_spec
from tickwheel.embedded.cluster import Cluster
from tickwheel.embedded.errors import EmbeddedError
from tickwheel.embedded.member import Member
from tickwheel.errors import TickwheelError
from tickwheel.v1 import run_pb2, schedule_pb2

app = typer.Typer(add_completion=False)

API_PORT_DEFAULT = 7070
ROWS_SHOWN_MAX = 14
LAGS_KEPT_MAX = 1_000
RESTART_AFTER_S = 5.0
"""Long enough to see the others take over."""
REFRESH_S = 0.25
HEALTHY_WITHIN_S = 60.0


@app.command("up")
def up(
    folder: Annotated[
        Path, typer.Option("--folder", help="Where data and logs are kept; the next start finds them.")
    ] = Path(".tickwheel"),
    port: Annotated[int, typer.Option("--port", min=1, max=65_535, help="Of the API.")] = API_PORT_DEFAULT,
    coordinators: Annotated[int, typer.Option("--coordinators", min=1, max=5)] = 1,
    timers: Annotated[int, typer.Option("--timers", min=1, max=8)] = 2,
    workers: Annotated[int, typer.Option("--workers", min=0, max=8)] = 1,
    samples: Annotated[bool, typer.Option("--samples/--no-samples", help="Schedules to watch.")] = True,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="Stop by itself after so long; for trying it in a script."),
    ] = None,
) -> None:
    """Start a whole cluster on this machine: Postgres, etcd, coordinators, timers, workers."""
    stop = threading.Event()

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGINT, ask_to_stop)
    signal.signal(signal.SIGTERM, ask_to_stop)
    cluster = Cluster(folder, coordinators=coordinators, timers=timers, workers=workers, api_port=port)
    try:
        with output.console.status("starting Postgres, etcd and our processes …"):
            cluster.start()
        _watch(cluster, samples, stop, seconds)
    except EmbeddedError as error:
        output.print_error(error)
        sys.exit(EXIT_FAILED)
    finally:
        with output.console.status("stopping: workers, timers, coordinators, etcd, Postgres …"):
            cluster.stop()
    output.console.print(f"all stopped; the data is kept in {cluster.folder}", style="dim")


@dataclass(slots=True)
class _Seen:
    """What the watching thread tells the one that draws."""

    rows: deque[run_pb2.Run] = field(default_factory=lambda: deque(maxlen=ROWS_SHOWN_MAX))
    lags_ms: deque[float] = field(default_factory=lambda: deque(maxlen=LAGS_KEPT_MAX))
    done_count: int = 0
    problem: str = ""


def _watch(cluster: Cluster, samples: bool, stop: threading.Event, seconds: float | None) -> None:
    client = BlockingClient(cluster.api_addresses, retry_s_max=5.0)
    _wait_healthy(client, stop)
    if samples and not stop.is_set():
        make_samples(client)
    for line in greeting(cluster):
        output.console.print(line, soft_wrap=True)
    seen = _Seen()
    threading.Thread(target=_follow, args=(client, seen, stop), name="watch", daemon=True).start()
    deadline = None if seconds is None else time.monotonic() + seconds
    keeper = _Keeper(cluster)
    if output.console.is_terminal:
        with Live(
            _screen(seen, keeper), console=output.console, refresh_per_second=4, transient=True
        ) as live:
            while not _is_over(stop, deadline):
                keeper.look()
                live.update(_screen(seen, keeper))
    else:
        _print_lines(seen, keeper, stop, deadline)


def _is_over(stop: threading.Event, deadline: float | None) -> bool:
    return stop.wait(REFRESH_S) or (deadline is not None and time.monotonic() >= deadline)


def _print_lines(seen: _Seen, keeper: _Keeper, stop: threading.Event, deadline: float | None) -> None:
    """For pipes and logs: a line for each run that has ended, and for each process that died."""
    told: deque[tuple[str, int]] = deque(maxlen=4 * ROWS_SHOWN_MAX)
    while True:
        over = _is_over(stop, deadline)
        keeper.look()
        for event in keeper.take_events():
            print(event, flush=True)
        for run in list(seen.rows):
            mark = (run.name, run.state)
            if mark not in told and run.HasField("end_time"):
                told.append(mark)
                _, state, what, lag, _, worker = row(run)
                print(f"{output.short(run.name)}  {state}  {what}  lag {lag}  {worker}", flush=True)
        if over:
            return


def _wait_healthy(client: BlockingClient, stop: threading.Event) -> None:
    """Until every shard has an owner; what is not well by then is shown on the screen."""
    deadline = time.monotonic() + HEALTHY_WITHIN_S
    while not stop.is_set() and time.monotonic() < deadline:
        try:
            if client.cluster.health().healthy:
                return
        except TickwheelError:
            pass
        stop.wait(0.1)


def make_samples(client: BlockingClient) -> None:
    """Recurring, delayed and direct jobs; what a person has changed or paused meanwhile stays as it is."""
    every_second = make_spec("echo", every=timedelta(seconds=1), payload={"hello": "from the wheel"})
    every_second.display_name = "Once a second"
    steps = make_spec("sleep", cron="*/5 * * * * *", time_zone="Europe/Berlin", payload={"seconds": 0.3})
    steps.triggers[0].cron.dialect = schedule_pb2.CRON_DIALECT_UNIX_SECONDS
    steps.display_name = "Every five seconds, by cron"
    flaky = make_spec("fail", every=timedelta(seconds=15), payload={"times": 1}, overlap="SKIP")
    flaky.display_name = "Fails at first, and is tried again"
    nightly = make_spec("echo", cron="30 2 * * *", time_zone="Europe/Berlin", jitter=timedelta(minutes=10))
    nightly.display_name = "In the small hours, through every change of the clocks"
    for name, spec in (
        ("every-second", every_second),
        ("every-five-seconds", steps),
        ("flaky", flaky),
        ("nightly", nightly),
    ):
        client.schedules.ensure(name, spec, labels={"sample": "yes"})
    client.runs.create("echo", payload={"hello": "directly"}, labels={"sample": "yes"})
    client.runs.create(
        "echo", payload={"hello": "ten seconds later"}, due=timedelta(seconds=10), labels={"sample": "yes"}
    )


def greeting(cluster: Cluster) -> Iterable[Text]:
    """Addresses, and three commands to try next."""
    api = cluster.api_addresses[0]
    program = Path(sys.argv[0]).name or "tickwheel"
    tick = "tickwheel" if program == "tickwheel" else f"{sys.executable} -m tickwheel.cli"
    where = "" if api == f"127.0.0.1:{API_PORT_DEFAULT}" else f" --address {api}"
    argument = "" if not where else f'"{api}"'
    yield Text.assemble(("tickwheel is up. ", "bold green"), "Ctrl-C stops all of it.")
    yield Text(f"  API        {', '.join(cluster.api_addresses)}")
    yield Text(f"  timers     {', '.join(timer.address for timer in cluster.of('timer'))}")
    yield Text(f"  Postgres   {cluster.postgres_url}", style="dim")
    yield Text(f"  etcd       {cluster.etcd.endpoint}", style="dim")
    yield Text(f"  logs       {cluster.folder}/*/log", style="dim")
    yield Text("try next:", style="bold")
    yield Text(f"  grpcurl -plaintext {api} tickwheel.v1.ClusterService/GetClusterHealth")
    yield Text(f"  {tick} run create --kind echo --payload '{{\"n\": 1}}' --wait{where}")
    code = f"from tickwheel.client import BlockingClient as C; print(C({argument}).runs.create('echo').name)"
    yield Text(f'  {sys.executable} -c "{code.replace(chr(34), chr(39)) if argument else code}"')
    yield Text(
        f"and kill what you like, such as: kill -9 {cluster.of('timer')[0].pid}  (timer-1)", style="dim"
    )


def _follow(client: BlockingClient, seen: _Seen, stop: threading.Event) -> None:
    """Watches runs until the end, whatever is killed meanwhile."""
    while not stop.is_set():
        try:
            for run in client.runs.watch():
                seen.problem = ""
                _note(seen, run)
                if stop.is_set():
                    return
        except TickwheelError as error:
            seen.problem = str(error)
        stop.wait(0.5)


def _note(seen: _Seen, run: run_pb2.Run) -> None:
    for index, known in enumerate(seen.rows):
        if known.name == run.name:
            seen.rows[index] = run
            break
    else:
        seen.rows.append(run)
    if run.HasField("end_time"):
        seen.done_count += 1
        if run.HasField("due_lag_duration"):
            seen.lags_ms.append(run.due_lag_duration.ToMicroseconds() / 1_000)


class _Keeper:
    """Starts what has died again, a few seconds later, and says so."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._dead_since: dict[str, float] = {}
        self._events: deque[str] = deque(maxlen=50)
        self.shown: deque[str] = deque(maxlen=4)

    def look(self) -> None:
        parts: dict[str, Any] = {"postgres": self._cluster.postgres, "etcd": self._cluster.etcd}
        parts |= self._cluster.members
        for name, part in parts.items():
            if part.alive:
                self._dead_since.pop(name, None)
                continue
            died = self._dead_since.get(name)
            if died is None:
                self._dead_since[name] = time.monotonic()
                again = f"it is started again in {RESTART_AFTER_S:.0f} s"
                self._say(f"{name} died (exit code {part.exit_code}); {again}")
            elif time.monotonic() - died >= RESTART_AFTER_S:
                self._start(name, part)

    def _start(self, name: str, part: Any) -> None:
        try:
            if isinstance(part, Member):
                part.start(wait=False)
            else:
                part.start()
            self._say(f"{name} was started again")
        except EmbeddedError as error:
            self._dead_since[name] = time.monotonic()
            self._say(f"{name} cannot be started: {error}")

    def _say(self, event: str) -> None:
        line = f"{datetime.now(UTC):%H:%M:%S}  {event}"
        self._events.append(line)
        self.shown.append(line)

    def take_events(self) -> list[str]:
        """Those since the last time."""
        taken = list(self._events)
        self._events.clear()
        return taken


def _screen(seen: _Seen, keeper: _Keeper) -> Group:
    table = Table(box=None, pad_edge=False, header_style="bold dim", expand=True)
    for name, width in (("RUN", 12), ("STATE", 14), ("WHAT", None), ("LAG", 10), ("WORKER", None)):
        table.add_column(name, width=width, no_wrap=True, overflow="ellipsis")
    for run in reversed(list(seen.rows)):
        name, state, what, lag, _, worker = row(run)
        table.add_row(name[-12:], state, what, lag, worker)
    lags = sorted(seen.lags_ms)
    title = f"{seen.done_count} runs ended"
    if lags:
        title += f" · lag p50 {lags[len(lags) // 2]:.1f} ms, p99 {lags[int(len(lags) * 0.99)]:.1f} ms"
    parts: list[Any] = [Panel(table, title=title, title_align="left", border_style="dim")]
    if seen.problem:
        parts.append(Text(seen.problem, style="yellow"))
    parts += [Text(event, style="yellow") for event in keeper.shown]
    return Group(*parts)
