"""google.longrunning.Operations: how far background work is, and how to stop it."""

from __future__ import annotations

import time

from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2

from tickwheel.domain.operation import Operation
from tickwheel.errors import FieldInvalid, NotFound, StateTransitionForbidden
from tickwheel.postgres import operations, requests
from tickwheel.postgres.connections import Connection
from tickwheel.postgres.requests import Done
from tickwheel.rpc import convert
from tickwheel.services.coordinator.calls import Context, PageTokens, page_size, principal_of
from tickwheel.services.coordinator.node import Node

WAIT_S_DEFAULT = 30.0
WAIT_S_MAX = 300.0
WAIT_ROUND_S = 0.25


class OperationService(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]
    """Operations are called `operations/{id}`. A tenant's are listed under `tenants/{t}`, the cluster's own
    under no name.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    async def GetOperation(
        self, request: operations_pb2.GetOperationRequest, context: Context
    ) -> operations_pb2.Operation:
        return await self._read(request.name)

    async def ListOperations(
        self, request: operations_pb2.ListOperationsRequest, context: Context
    ) -> operations_pb2.ListOperationsResponse:
        if request.filter:
            raise FieldInvalid("filter", "operations take none; leave it empty")
        parent = request.name.removesuffix("operations").rstrip("/")
        tenant_id = 0
        if parent:
            tenant_id = (await self._node.catalog.tenant(convert.tenant_of(parent, "name"))).tenant_id
        size = page_size(request.page_size, self._node.settings.page_count_max)
        tokens = PageTokens("ListOperations", parent)
        before = tokens.read(request.page_token)

        async def ask(connection: Connection) -> tuple[list[Operation], list[operations_pb2.Operation]]:
            found = await operations.list_page(connection, tenant_id, before, size)
            return found, [await _message(connection, each) for each in found]

        found, messages = await self._node.database.read(ask)
        cursor = (found[-1].create_us, found[-1].operation_id) if len(found) == size else None
        return operations_pb2.ListOperationsResponse(
            operations=messages, next_page_token=tokens.write(cursor)
        )

    async def WaitOperation(
        self, request: operations_pb2.WaitOperationRequest, context: Context
    ) -> operations_pb2.Operation:
        wait_s = WAIT_S_DEFAULT
        if request.HasField("timeout"):
            wait_s = min(convert.duration_us(request.timeout, "timeout") / 1e6, WAIT_S_MAX)
        until_mono_s = time.monotonic() + wait_s
        while True:
            found = await self._read(request.name)
            if found.done or time.monotonic() >= until_mono_s:
                return found
            await self._node.pause(WAIT_ROUND_S)

    async def CancelOperation(
        self, request: operations_pb2.CancelOperationRequest, context: Context
    ) -> empty_pb2.Empty:
        """What it did stays done; it does no more. Of one that has ended nothing changes."""
        operation_id = _id(request.name)

        async def work(connection: Connection, now_us: int) -> Done:
            if await operations.find(connection, operation_id) is None:
                raise NotFound(request.name)
            await operations.cancel(connection, operation_id, now_us)
            return Done(b"", request.name, changed="cancelled")

        call = await self._call(request.name, "CancelOperation", context)
        await requests.mutate(self._node.database, call, work)
        return empty_pb2.Empty()

    async def DeleteOperation(
        self, request: operations_pb2.DeleteOperationRequest, context: Context
    ) -> empty_pb2.Empty:
        """Forgets one that has ended; what a backfill claimed stays claimed."""
        operation_id = _id(request.name)

        async def work(connection: Connection, now_us: int) -> Done:
            found = await operations.find(connection, operation_id)
            if found is None:
                raise NotFound(request.name)
            if not await operations.delete(connection, operation_id):
                raise StateTransitionForbidden(found.state.name, "DeleteOperation", request.name)
            return Done(b"", request.name, changed="deleted")

        call = await self._call(request.name, "DeleteOperation", context)
        await requests.mutate(self._node.database, call, work)
        return empty_pb2.Empty()

    async def _call(self, name: str, method: str, context: Context) -> requests.Call:
        found = await self._find(name)
        return requests.Call(found.tenant_id, principal_of(context), method, "", b"", context.peer())

    async def _find(self, name: str) -> Operation:
        operation_id = _id(name)
        found = await self._node.database.read(lambda connection: operations.find(connection, operation_id))
        if found is None:
            raise NotFound(name)
        return found

    async def _read(self, name: str) -> operations_pb2.Operation:
        operation_id = _id(name)

        async def ask(connection: Connection) -> operations_pb2.Operation:
            found = await operations.find(connection, operation_id)
            if found is None:
                raise NotFound(name)
            return await _message(connection, found)

        return await self._node.database.read(ask)


async def _message(connection: Connection, found: Operation) -> operations_pb2.Operation:
    totals = await operations.totals(connection, found.operation_id)
    moves = await operations.moves(connection, found.operation_id)
    return convert.operation_message(found, totals, moves)


def _id(name: str) -> bytes:
    collection, _, last = name.partition("/")
    try:
        if collection != "operations" or len(last) != 32:
            raise ValueError(name)
        return bytes.fromhex(last)
    except ValueError as error:
        raise FieldInvalid("name", f"{name[:80]!r} is not of the form operations/{{id}}") from error
