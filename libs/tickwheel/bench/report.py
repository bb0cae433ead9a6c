"""Which budgets are met? Runs the benchmarks, prints measured against budget, and writes build/bench/."""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path("build/bench")


@dataclass(frozen=True, slots=True)
class Budget:
    """One line: what is measured, in which result it stands, and what it must be."""

    what: str
    path: tuple[str, ...]
    limit: float
    at_least: bool
    unit: str

    def value(self, results: Mapping[str, Any]) -> float | None:
        found: Any = results
        for key in self.path:
            if not isinstance(found, Mapping) or key not in found:
                return None
            found = found[key]
        return float(found)

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


BUDGETS = (
    Budget("recurring executions, sustained", ("sustained", "executions_per_s"), 60_000, True, "/s"),
    Budget("direct runs, drained", ("direct", "drained_per_s"), 60_000, True, "/s"),
    Budget("burst of 100,000 due at once, drained", ("burst", "drained_per_s"), 50_000, True, "/s"),
    Budget("20,000 due at once, last start", ("burst20", "last_start_s"), 0.4, False, "s"),
    Budget("due -> leased, 1,000/s, 1 M stored, p50", ("lag", "lag_p50_ms"), 5, False, "ms"),
    Budget("due -> leased, 1,000/s, 1 M stored, p99", ("lag", "lag_p99_ms"), 25, False, "ms"),
    Budget("BatchCreateRuns", ("direct", "created_per_s"), 30_000, True, "/s"),
    Budget("CreateSchedule, p99", ("create", "p99_ms"), 20, False, "ms"),
    Budget("cold load of cells", ("load", "timers_per_s"), 500_000, True, "/s"),
    Budget("wheel, bulk inserts", ("wheel", "insert_pages_rows_per_s"), 2_000_000, True, "/s"),
    Budget("wheel, bytes a timer", ("wheel", "bytes_per_timer_with_cancels"), 32, False, "B"),
    Budget("next fires, realistic mix", ("triggers", "mix_per_s"), 200_000, True, "/s"),
    Budget("next fires, all distinct", ("triggers", "distinct_per_s"), 50_000, True, "/s"),
)


def benchmarks(quick: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> what measures it. `quick` gives smaller loads, for trying things; its figures are not
    quoted."""
    from tickwheel.bench import direct, lag, load, sustained, triggers, wheel

    return {
        "wheel": wheel.run,
        "triggers": triggers.run,
        "load": lambda: load.cold_load(200_000 if quick else 1_000_000),
        "create": load.create_schedules,
        "lag": lambda: lag.run(100_000 if quick else 1_000_000, 10 if quick else 30),
        "burst20": lambda: direct.run(20_000),
        "burst": lambda: direct.run(20_000 if quick else 100_000),
        "direct": lambda: direct.run(50_000 if quick else 400_000),
        "sustained": lambda: sustained.run(start=10_000, step=5_000, step_s=5 if quick else 10),
    }


def table(results: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, measured, budget, verdict) of each line that was measured."""
    rows = []
    for budget in BUDGETS:
        value = budget.value(results)
        if value is None:
            continue
        sign = ">=" if budget.at_least else "<="
        verdict = "met" if budget.is_met(value) else f"{value / budget.limit:.0%} of it"
        rows.append(
            (budget.what, f"{value:,.6g} {budget.unit}", f"{sign} {budget.limit:,.6g} {budget.unit}", verdict)
        )
    return rows


def write_report(results: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    """results.json, report.md, and plots where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    lines = ["# tickwheel, measured", "", f"{results['machine']}", ""]
    lines += ["| what | measured | budget | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in table(results)]
    lines += [f"\n![{path.stem}]({path.name})" for path in _plots(results, folder)]
    lines += ["", "```json", json.dumps(results, indent=1), "```", ""]
    report = folder / "report.md"
    report.write_text("\n".join(lines))
    return report


def _plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    steps = results.get("sustained", {}).get("steps", [])
    if steps:
        figure, (rate, lag) = pyplot.subplots(1, 2, figsize=(10, 4))
        offered = [step["offered_per_s"] for step in steps]
        rate.plot(offered, [step["executions_per_s"] for step in steps], "o-")
        rate.plot(offered, offered, ":", color="grey")
        rate.set(title="recurring executions/s", xlabel="offered", ylabel="committed")
        for name in ("lag_p50_ms", "lag_p95_ms", "lag_p99_ms"):
            lag.plot(offered, [step[name] for step in steps], "o-", label=name)
        lag.set(title="due to leased, ms", xlabel="offered", yscale="log")
        lag.legend()
        made.append(_save(pyplot, figure, folder / "sustained.png"))
    cpu = {name: found["cpu_us_each"] for name, found in results.items() if _has_cpu(found)}
    if cpu:
        figure, axes = pyplot.subplots(figsize=(10, 4))
        bottom = [0.0] * len(cpu)
        for part in ("postgres", "timer", "worker", "coordinator", "etcd"):
            values = [found.get(part, 0.0) for found in cpu.values()]
            axes.bar(list(cpu), values, bottom=bottom, label=part)
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        axes.set(title="CPU us an execution")
        axes.legend()
        made.append(_save(pyplot, figure, folder / "cpu.png"))
    return made


def _has_cpu(found: Any) -> bool:
    return isinstance(found, Mapping) and "cpu_us_each" in found


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def run(only: list[str], quick: bool, as_json: bool) -> dict[str, Any]:
    """Runs the named benchmarks, or all."""
    chosen = benchmarks(quick)
    unknown = set(only) - chosen.keys()
    if unknown:
        raise SystemExit(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, "
        f"Python {platform.python_version()}",
        "quick": quick,
    }
    for name, measure in chosen.items():
        if only and name not in only:
            continue
        began = time.monotonic()
        results[name] = measure()
        if not as_json:
            print(f"{name}: {json.dumps(results[name])}  ({time.monotonic() - began:.0f} s)", flush=True)
    return results


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tickwheel bench", description=__doc__)
    parser.add_argument("only", nargs="*", help="names of benchmarks; default: all")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--quick", action="store_true", help="smaller loads: figures not to be quoted")
    options = parser.parse_args(arguments)
    results = run(options.only, options.quick, options.json)
    report = write_report(results)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    width = max((len(row[0]) for row in table(results)), default=0)
    for what, measured, budget, verdict in table(results):
        print(f"{what:<{width}}  {measured:>16}  {budget:>16}  {verdict}")
    print(f"report: {report}")
