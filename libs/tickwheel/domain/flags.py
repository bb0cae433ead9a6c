"""The bits of `timer.flags` and `lease.flags`: what a grant must know without reading the spec."""

# Bits 0 to 2: the schedule's overlap policy (OverlapPolicy's numbers), 0 for a direct run.
OVERLAP_MASK = 0b111
# Bits 3 and 4: the schedule's misfire policy (MisfirePolicy's numbers).
MISFIRE_SHIFT = 3
MISFIRE_MASK = 0b11 << MISFIRE_SHIFT
# The payload is not empty: it has to be read before the grant goes out.
HAS_PAYLOAD = 1 << 5
# A row of the run stands in `run` already; a schedule's first attempt has none.
RUN_ROW = 1 << 6
# The run has a payload of its own in `run`, not its schedule version's.
OWN_PAYLOAD = 1 << 7
# A failure of its last attempt, or a checkpoint, waits in `run` for the next attempt.
HAS_HISTORY = 1 << 8
# The run was released from overlap: RunSchedule with `ignore_overlap`.
IGNORE_OVERLAP = 1 << 9
# The trigger has jitter: due_us is not schedule_us.
JITTER = 1 << 10
# The lease: its run is kept out of the dead letters.
NO_DEAD_LETTER = 1 << 11
# Bits 12 to 14: the run's cause (Cause's numbers), for runs.
CAUSE_SHIFT = 12
CAUSE_MASK = 0b111 << CAUSE_SHIFT
# An unknown outcome holds the run instead of retrying it.
HOLD_UNKNOWN = 1 << 15
# The run was created under a trace that is recorded: its traceparent is read before the grant goes out.
TRACED = 1 << 16
