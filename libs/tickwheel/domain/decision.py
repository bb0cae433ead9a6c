"""Why an occurrence did not become a run on time."""

from enum import IntEnum


class DecisionReason(IntEnum):
    """Numbers are those in Postgres."""

    OVERLAP = 1
    """A run of the schedule was live, and its overlap policy is SKIP."""
    MISFIRE_SKIPPED = 2
    """It was found later than the misfire threshold, and the policy is SKIP."""
    MISFIRE_COLLAPSED = 3
    """It was missed, and a later missed one stands for it (FIRE_ONCE)."""
    CATCHUP_WINDOW = 4
    """It was missed by more than the catch-up window."""
    CATCHUP_COUNT = 5
    """It was missed, and more than the catch-up count came after it."""
    SUPERSEDED = 6
    """It was overdue when its schedule's triggers were changed, or the schedule was deleted."""
    PAUSED = 7
    """Its schedule was paused."""
    COMPLETED = 8
    """Its schedule had run as often as it may."""
