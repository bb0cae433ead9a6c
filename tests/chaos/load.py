"""The clients of an experiment: they create, pause, update and cancel at a rate, and remember every answer.

A call that fails is repeated with its request_id until it is answered, as the guarantees tell clients to; so
whatever was answered is acknowledged, and exactly once. Everything runs in threads of its own with the
blocking client of gRPC.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from google.protobuf import duration_pb2, field_mask_pb2, timestamp_pb2
from tests.chaos.history import FOREVER_US, Acknowledged, ActiveWindow, Pause

from tickwheel.v1 import (
    cluster_service_pb2_grpc,
    job_pb2,
    run_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
    schedule_pb2,
    schedule_service_pb2,
    schedule_service_pb2_grpc,
    worker_service_pb2_grpc,
)

T = TypeVar("T")

PARENT = "tenants/default"
LEASE_MS = 4_000
"""Of every run, where nothing else is said: shorter than the default, so that tests wait less."""
CALL_TIMEOUT_S = 5.0
RETRY_S = 0.1
ANSWER_S_MAX = 60.0
"""So long a call is repeated, at most: everything has to be back by then."""
RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
EDGE_US = 300_000
"""An occurrence so near to a mutation of its schedule may fall on either side of it."""


def wall_us() -> int:
    return time.time_ns() // 1_000


def duration(us: int) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=us // 1_000_000, nanos=us % 1_000_000 * 1_000)


def timestamp(us: int) -> timestamp_pb2.Timestamp:
    return timestamp_pb2.Timestamp(seconds=us // 1_000_000, nanos=us % 1_000_000 * 1_000)


def template(
    kind: str = "work", *, attempts: int = 0, backoff_us: int = 0, lease_ms: int = LEASE_MS, **payload: Any
) -> job_pb2.JobTemplate:
    """`attempts`, `backoff_us`: 0 leaves the defaults. The rest is the payload."""
    made = job_pb2.JobTemplate(kind=kind)
    made.lease_duration.FromMilliseconds(lease_ms)
    if payload:
        made.payload.json.update(payload)
    if attempts:
        made.retry.attempt_count_max = attempts
    if backoff_us:
        made.retry.initial_backoff_duration.CopyFrom(duration(backoff_us))
    return made


@dataclass(slots=True)
class _Standing:
    """A schedule as its client knows it: since when it certainly stands with this interval."""

    name: str
    uid: str
    anchor_us: int
    interval_us: int
    since_us: int
    paused_at: Pause | None = None
    deleted: bool = False


class Clients:
    """Calls that are repeated until they are answered, by any of the coordinators.

    decided_us: reads the last decided occurrence of a schedule from Postgres, for pauses.
    """

    def __init__(self, addresses: Sequence[str], decided_us: Callable[[str], int]) -> None:
        self.acknowledged = Acknowledged()
        self.answer_lags_us: list[int] = []
        """How long each call took until it was answered, repetitions included."""
        self._decided_us = decided_us
        self._standing: dict[str, _Standing] = {}
        self._lock = threading.Lock()
        options = (("grpc.max_reconnect_backoff_ms", 500), ("grpc.initial_reconnect_backoff_ms", 100))
        self._channels = [grpc.insecure_channel(address, options=options) for address in addresses]
        self._schedules = [schedule_service_pb2_grpc.ScheduleServiceStub(each) for each in self._channels]
        self._runs = [run_service_pb2_grpc.RunServiceStub(each) for each in self._channels]
        self._clusters = [cluster_service_pb2_grpc.ClusterServiceStub(each) for each in self._channels]
        self._workers = [worker_service_pb2_grpc.WorkerServiceStub(each) for each in self._channels]

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _call(self, stubs: Sequence[Any], method: str, request: Any) -> Any:
        """Raises grpc.RpcError for what no repetition mends, or none has mended in ANSWER_S_MAX."""
        began = time.monotonic()
        turn = random.randrange(len(stubs))
        while True:
            try:
                answer = getattr(stubs[turn % len(stubs)], method)(request, timeout=CALL_TIMEOUT_S)
            except grpc.RpcError as error:
                if error.code() not in RETRIED:
                    raise
                if time.monotonic() - began > ANSWER_S_MAX:
                    raise
                turn += 1
                time.sleep(RETRY_S)
                continue
            self.answer_lags_us.append(int((time.monotonic() - began) * 1e6))
            return answer

    def cluster(self, method: str, request: Any) -> Any:
        return self._call(self._clusters, method, request)

    def worker(self, method: str, request: Any) -> Any:
        """One try, of a unary twin of the worker's stream."""
        return getattr(self._workers[0], method)(request, timeout=20.0)

    # Runs.

    def create_runs(self, runs: Sequence[tuple[job_pb2.JobTemplate, int]]) -> list[str]:
        """Creates (template, due_us or 0 for now). Their ids, acknowledged."""
        request = run_service_pb2.BatchCreateRunsRequest(
            parent=PARENT, request_id=str(uuid.uuid4()), names_only=True
        )
        for job, due_us in runs:
            run = request.requests.add().run
            run.template.CopyFrom(job)
            if due_us:
                run.due_time.CopyFrom(timestamp(due_us))
        answer = self._call(self._runs, "BatchCreateRuns", request)
        made = [run.name.rpartition("/")[2] for run in answer.runs]
        assert len(made) == len(runs), f"{len(runs)} runs were asked for, {len(made)} answered"
        with self._lock:
            self.acknowledged.runs.update(made)
        return made

    def create_run(self, job: job_pb2.JobTemplate, due_us: int = 0) -> str:
        return self.create_runs([(job, due_us)])[0]

    def get_run(self, run: str) -> run_pb2.Run:
        answer = self._call(self._runs, "GetRun", run_service_pb2.GetRunRequest(name=f"{PARENT}/runs/{run}"))
        assert isinstance(answer, run_pb2.Run)
        return answer

    def list_attempts(self, run: str) -> list[run_pb2.Attempt]:
        request = run_service_pb2.ListAttemptsRequest(parent=f"{PARENT}/runs/{run}")
        return list(self._call(self._runs, "ListAttempts", request).attempts)

    def cancel_run(self, run: str, grace_us: int = 1_000_000) -> run_pb2.Run.State:
        request = run_service_pb2.CancelRunRequest(
            name=f"{PARENT}/runs/{run}",
            reason="chaos",
            grace_duration=duration(grace_us),
            request_id=str(uuid.uuid4()),
        )
        state = self._call(self._runs, "CancelRun", request).state
        if state == run_pb2.Run.STATE_CANCELLED:
            with self._lock:
                self.acknowledged.cancelled.add(run)
        return state  # type: ignore[no-any-return]

    # Schedules.

    def create_schedule(
        self,
        name: str,
        interval_us: int,
        job: job_pb2.JobTemplate,
        *,
        overlap: schedule_pb2.OverlapPolicy.Policy.ValueType = schedule_pb2.OverlapPolicy.POLICY_ALLOW_ALL,
        spec: Mapping[str, Any] | None = None,
    ) -> str:
        """An interval with an anchor on whole intervals. Its uid, acknowledged."""
        trigger = schedule_pb2.Trigger(
            interval=schedule_pb2.IntervalTrigger(duration=duration(interval_us), anchor_time=timestamp(0))
        )
        wanted = schedule_pb2.Schedule(
            spec=schedule_pb2.ScheduleSpec(
                triggers=[trigger],
                template=job,
                overlap=schedule_pb2.OverlapPolicy(policy=overlap),
                **(spec or {}),
            )
        )
        request = schedule_service_pb2.CreateScheduleRequest(
            parent=PARENT, schedule_id=name, schedule=wanted, request_id=str(uuid.uuid4())
        )
        uid = _uid(self._call(self._schedules, "CreateSchedule", request))
        with self._lock:
            self.acknowledged.schedules.add(uid)
            self._standing[name] = _Standing(name, uid, 0, interval_us, wall_us())
        return uid

    def get_schedule(self, name: str) -> schedule_pb2.Schedule:
        request = schedule_service_pb2.GetScheduleRequest(name=_full(name))
        answer = self._call(self._schedules, "GetSchedule", request)
        assert isinstance(answer, schedule_pb2.Schedule)
        return answer

    def pause(self, name: str) -> None:
        """Acknowledged: from what is decided by now, nothing more fires."""
        standing = self._standing[name]
        self._close_window(standing)
        request = schedule_service_pb2.PauseScheduleRequest(
            name=_full(name), reason="chaos", request_id=str(uuid.uuid4())
        )
        self._call(self._schedules, "PauseSchedule", request)
        standing.paused_at = Pause(standing.uid, self._decided_us(standing.uid))

    def resume(self, name: str) -> None:
        standing = self._standing[name]
        assert standing.paused_at is not None, f"{name} is not paused"
        pause = Pause(standing.uid, standing.paused_at.decided_us, wall_us())
        request = schedule_service_pb2.ResumeScheduleRequest(name=_full(name), request_id=str(uuid.uuid4()))
        self._call(self._schedules, "ResumeSchedule", request)
        with self._lock:
            self.acknowledged.pauses.append(pause)
        standing.paused_at = None
        standing.since_us = wall_us()

    def update_interval(self, name: str, interval_us: int) -> None:
        standing = self._standing[name]
        self._close_window(standing)
        wanted = schedule_pb2.Schedule(name=_full(name))
        wanted.spec.triggers.add(
            interval=schedule_pb2.IntervalTrigger(duration=duration(interval_us), anchor_time=timestamp(0))
        )
        request = schedule_service_pb2.UpdateScheduleRequest(
            schedule=wanted,
            update_mask=field_mask_pb2.FieldMask(paths=["spec.triggers"]),
            request_id=str(uuid.uuid4()),
        )
        self._call(self._schedules, "UpdateSchedule", request)
        standing.interval_us = interval_us
        standing.since_us = wall_us()

    def delete(self, name: str) -> None:
        standing = self._standing.pop(name)
        self._close_window(standing)
        request = schedule_service_pb2.DeleteScheduleRequest(name=_full(name), request_id=str(uuid.uuid4()))
        self._call(self._schedules, "DeleteSchedule", request)

    def forget_windows(self, name: str) -> None:
        """Nobody can say what of this schedule is due: it was broken on purpose. It is deleted."""
        uid = self._standing[name].uid
        self.delete(name)
        with self._lock:
            kept = [window for window in self.acknowledged.windows if window.uid != uid]
            self.acknowledged.windows[:] = kept

    def _close_window(self, standing: _Standing) -> None:
        """A mutation begins: what is due until a little before it has to have been decided."""
        window = ActiveWindow(
            standing.uid,
            standing.anchor_us,
            standing.interval_us,
            standing.since_us + EDGE_US,
            wall_us() - EDGE_US,
        )
        with self._lock:
            self.acknowledged.windows.append(window)

    def finish(self) -> Acknowledged:
        """Ends what stands open in what is known, once: pauses last, windows end now."""
        for standing in self._standing.values():
            if standing.paused_at is not None:
                pause = standing.paused_at
                self.acknowledged.pauses.append(Pause(pause.uid, pause.decided_us, FOREVER_US))
            else:
                self._close_window(standing)
        self._standing.clear()
        return self.acknowledged


def _full(name: str) -> str:
    return f"{PARENT}/schedules/{name}"


def _uid(schedule: schedule_pb2.Schedule) -> str:
    return schedule.uid.replace("-", "")


@dataclass(slots=True)
class Load:
    """Background threads: direct runs at a rate, and whoever mutates schedules meanwhile.

    As a context manager it begins at once and has stopped at its end; what went wrong in a thread is raised
    then. run_rate: runs a second, in batches ten times a second; a third of them due only later.
    """

    clients: Clients
    run_rate: int = 0
    work_ms: int = 5
    delay_us_max: int = 2_000_000
    mutated: Sequence[str] = ()
    """Schedules (by name) that are paused, resumed, updated, at random."""
    cancel: bool = False
    seed: int = 1
    created: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _failures: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> Load:
        if self.run_rate:
            self._spawn(self._create)
        if self.mutated:
            self._spawn(self._mutate)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(ANSWER_S_MAX + CALL_TIMEOUT_S)
        if self._failures:
            raise self._failures[0]

    def _spawn(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._failures.append(error)

        thread = threading.Thread(target=guarded, name=f"chaos-{work.__name__}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _create(self) -> None:
        chance = random.Random(self.seed)
        job = template(ms=self.work_ms)
        began = time.monotonic()
        while not self._stop.is_set():
            # What a slow answer delayed is made up for, so the rate holds.
            owed = int((time.monotonic() - began) * self.run_rate) - self.created
            if owed <= 0:
                self._stop.wait(0.02)
                continue
            batch = [
                (job, wall_us() + chance.randrange(self.delay_us_max) if chance.random() < 0.33 else 0)
                for _ in range(min(owed, 2_000))
            ]
            made = self.clients.create_runs(batch)
            self.created += len(made)
            if self.cancel:
                self.clients.cancel_run(chance.choice(made))
            self._stop.wait(0.1)

    def _mutate(self) -> None:
        chance = random.Random(self.seed + 1)
        paused: set[str] = set()
        while not self._stop.wait(0.1):
            name = chance.choice(self.mutated)
            if name in paused:
                self.clients.resume(name)
                paused.discard(name)
            elif chance.random() < 0.5:
                self.clients.pause(name)
                paused.add(name)
            else:
                self.clients.update_interval(name, chance.choice((200_000, 300_000, 500_000)))
        for name in paused:
            self.clients.resume(name)
