"""What do coordinators tell a timer? Rows that were just committed, and runs that are to stop: hints, no
more."""

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tickwheel.errors import FieldInvalid
from tickwheel.internal.v1 import timer_service_pb2 as pb
from tickwheel.internal.v1 import timer_service_pb2_grpc

if TYPE_CHECKING:
    from tickwheel.services.timer.node import TimerNode

NUDGE_ROWS_MAX: Final = 50_000


class TimerService(timer_service_pb2_grpc.TimerServiceServicer):
    """`tickwheel.internal.v1.TimerService`."""

    def __init__(self, node: "TimerNode") -> None:
        self._node = node

    async def Nudge(self, request: pb.NudgeRequest, context: Any) -> pb.NudgeResponse:
        count = len(request.shards)
        if len(request.refs) != 16 * count or count > NUDGE_ROWS_MAX:
            raise FieldInvalid("refs", f"16 bytes for each of at most {NUDGE_ROWS_MAX} shards")
        halves = np.frombuffer(request.refs, dtype=">u8").astype(np.uint64).reshape(-1, 2)
        shards = np.array(request.shards, dtype=np.int16)
        ours = np.isin(shards, self._node.known_shards())
        if ours.any():
            self._node.refresh_soon(shards[ours], halves[ours, 0], halves[ours, 1])
        return pb.NudgeResponse()

    async def NudgeCancel(self, request: pb.NudgeCancelRequest, context: Any) -> pb.NudgeCancelResponse:
        await self._node.find_cancels()
        return pb.NudgeCancelResponse()
