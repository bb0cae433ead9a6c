"""Draws the states of a run into docs/concepts.md, from the one table that knows them.

python docs/draw_states.py            write it anew
python docs/draw_states.py --check    exit with 1 where the page is not what would be written
"""

from __future__ import annotations

import sys
from pathlib import Path

from tickwheel.domain.run import TERMINAL, TRANSITIONS, RunEvent, RunState

PAGE = Path(__file__).with_name("concepts.md")
BEGIN = "<!-- drawn by docs/draw_states.py from libs/tickwheel/domain/run.py: begin -->"
END = "<!-- drawn: end -->"

EVENT_WORDS = {
    RunEvent.GRANT: "granted",
    RunEvent.SUCCEED: "success",
    RunEvent.FAIL_RETRYABLE: "failure, attempts left",
    RunEvent.FAIL_LAST: "failure, the last one",
    RunEvent.FAIL_LAST_NO_DEAD_LETTER: "the last one, dead letters off",
    RunEvent.RELEASE: "handed back",
    RunEvent.LAPSE_HOLD: "unknown outcome, HOLD",
    RunEvent.CANCEL: "cancel",
    RunEvent.CANCEL_CONFIRMED: "stopped",
    RunEvent.START_TOO_LATE: "not started in time",
}


def diagram() -> list[str]:
    """A Mermaid state diagram. Events that change nothing are left to the table."""
    edges: dict[tuple[RunState, RunState], list[str]] = {}
    for (state, event), following in TRANSITIONS.items():
        if state is not following:
            edges.setdefault((state, following), []).append(EVENT_WORDS[event])
    lines = [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> SCHEDULED",
        "    [*] --> RUNNING: granted at its due time",
    ]
    lines += [
        f"    {state.name} --> {following.name}: {' / '.join(words)}"
        for (state, following), words in edges.items()
    ]
    lines += [f"    {state.name} --> [*]" for state in RunState if state in TERMINAL]
    return [*lines, "```"]


def table() -> list[str]:
    """Each state that is not terminal, with what each event makes of it."""
    open_states = [state for state in RunState if state not in TERMINAL]
    lines = [
        f"| event | {' | '.join(state.name for state in open_states)} |",
        "|---" * (len(open_states) + 1) + "|",
    ]
    for event in RunEvent:
        following = [TRANSITIONS.get((state, event)) for state in open_states]
        cells = " | ".join("—" if state is None else state.name for state in following)
        lines.append(f"| {EVENT_WORDS[event]} | {cells} |")
    return lines


def drawn(page: str) -> str:
    """The page with its drawn part anew."""
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise SystemExit(f"{PAGE.name}: there is no place to draw into; keep the lines {BEGIN!r} and {END!r}")
    return "\n".join([before + BEGIN, "", *diagram(), "", *table(), "", END]) + after


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    wanted = drawn(page)
    if page == wanted:
        return
    if "--check" in sys.argv[1:]:
        raise SystemExit(
            f"{PAGE.name} does not show the table of states as it is: run python docs/{Path(__file__).name}"
        )
    PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
