"""Rows of the due index, as columns: what a load gives, what the owner's memory holds."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Int16s = npt.NDArray[np.int16]
Int8s = npt.NDArray[np.int8]
Uint64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

KIND_SCHEDULE = 1
KIND_RUN = 2

NEVER_US = (1 << 63) - 1
"""The due time of a row that waits for nothing."""


@dataclass(frozen=True, slots=True)
class TimerRows:
    """Rows of the `timer` table, columns of one length; the table's own comments say what each holds.

    An id of 128 bits is two columns. `schedule_hi` and `schedule_lo` are zero where there is none.
    """

    shard: Int16s
    kind: Int8s
    ref_hi: Uint64s
    ref_lo: Uint64s
    due_us: Int64s
    version: Int64s
    decided_us: Int64s
    schedule_time_us: Int64s
    trigger_id: Int64s
    template_id: Int64s
    schedule_hi: Uint64s
    schedule_lo: Uint64s
    tenant: Int32s
    route: Int32s
    flags: Int32s
    misfire_ms: Int32s
    countdown: Int32s
    priority: Int8s
    attempt: Int16s

    def __len__(self) -> int:
        return len(self.ref_lo)

    def pick(self, rows: Int64s | Bools) -> "TimerRows":
        """Some of the rows, by number or mask."""
        return TimerRows(*(getattr(self, name)[rows] for name in COLUMNS))


COLUMNS = tuple(field.name for field in fields(TimerRows))
