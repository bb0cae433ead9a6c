"""One mutation, one transaction: its rows, its audit record and its answer under a request_id go in
together (I1, I9).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tickwheel.errors import RequestIdReused
from tickwheel.postgres import statements
from tickwheel.postgres.connections import Connection, Database, cluster_now_us

_SQL = statements.load("common.sql")


@dataclass(frozen=True, slots=True)
class Call:
    """Who asks for what. `request_hash` is of the request without its request_id."""

    tenant_id: int
    principal: str
    method: str
    request_id: str
    request_hash: bytes
    peer: str
    validate_only: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """What a mutation did: its answer, as it goes to the caller, and what the audit says of it."""

    response: bytes
    resource: str
    reason: str = ""
    etag_before: str = ""
    etag_after: str = ""
    changed: str = ""


Work = Callable[[Connection, int], Awaitable[Done]]
"""The mutation itself, given the cluster clock. It may run more than once."""


async def mutate(database: Database, call: Call, work: Work) -> tuple[bytes, bool]:
    """Runs `work` once for each request_id, and gives its answer, and whether it was made now.

    With `validate_only` everything is done and rolled back: the answer is what would be.

    Raises:
        RequestIdReused: the id came before, with another request.
    """

    async def transact(connection: Connection) -> tuple[bytes, bool]:
        remembers = bool(call.request_id) and not call.validate_only
        if remembers:
            now_us, before = await _begin(connection, call)
            if before is not None:
                return before, False
        else:
            now_us = await cluster_now_us(connection)
        done = await work(connection, now_us)
        parameters = _audit(call, done, now_us) | {"remembers": remembers, "response": done.response}
        await connection.execute(_SQL["finish"], parameters)
        return done.response, True

    return await database.transaction(transact, try_only=call.validate_only)


async def _begin(connection: Connection, call: Call) -> tuple[int, bytes | None]:
    """The cluster clock, and the answer that was given before, if one was."""
    parameters = {
        "tenant": call.tenant_id,
        "request_id": call.request_id,
        "method": call.method,
        "hash": call.request_hash,
    }
    row = await (await connection.execute(_SQL["begin_request"], parameters)).fetchone()
    if row is not None:
        return int(row[0]), None
    row = await (await connection.execute(_SQL["read_request"], parameters)).fetchone()
    if row is None:
        # Retention took it between the two statements: then it is as good as never seen.
        return await cluster_now_us(connection), None
    method, request_hash, response = row
    if method != call.method or bytes(request_hash) != call.request_hash:
        raise RequestIdReused(call.request_id, method)
    return 0, bytes(response)


def _audit(call: Call, done: Done, now_us: int) -> dict[str, object]:
    return {
        "now": now_us,
        "tenant": call.tenant_id,
        "principal": call.principal,
        "method": call.method,
        "resource": done.resource,
        "request_id": call.request_id,
        "reason": done.reason,
        "etag_before": done.etag_before,
        "etag_after": done.etag_after,
        "changed": done.changed,
        "peer": call.peer,
    }
