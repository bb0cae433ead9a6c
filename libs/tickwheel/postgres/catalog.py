"""Tenants, routes, triggers and templates by id and by name, kept in memory: their rows never change.

Rows are interned outside the mutation that needs them: one that is left over does no harm, while a cached
id whose transaction was rolled back would.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from tickwheel.domain import trigger
from tickwheel.domain.job import JobTemplate, content_id, decode_template
from tickwheel.domain.trigger import CompiledTrigger
from tickwheel.errors import NotFound
from tickwheel.postgres import statements
from tickwheel.postgres.connections import Connection, Database

_SQL = statements.load("common.sql")
ENTRIES_MAX = 50_000
"""Of each kind; then the oldest are forgotten."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Bounded(dict[K, V]):
    """A dict that forgets its oldest entries."""

    def put(self, key: K, value: V) -> V:
        if len(self) >= ENTRIES_MAX:
            del self[next(iter(self))]
        self[key] = value
        return value


@dataclass(frozen=True, slots=True)
class Tenant:
    """`spread` as it was when the tenant was first asked for: schedules are placed by the row itself."""

    tenant_id: int
    name: str
    spread: int


class Catalog:
    """One for each process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tenants: _Bounded[str, Tenant] = _Bounded()
        self._routes: _Bounded[tuple[str, str], int] = _Bounded()
        self._templates: _Bounded[int, JobTemplate] = _Bounded()
        self._triggers: _Bounded[int, CompiledTrigger] = _Bounded()

    def forget(self) -> None:
        """Another history of Postgres: there the same ids may stand for something else, or for nothing."""
        for cache in (self._tenants, self._routes, self._templates, self._triggers):
            cache.clear()

    async def tenant(self, name: str) -> Tenant:
        """Raises NotFound."""
        known = self._tenants.get(name)
        if known is not None:
            return known

        async def ask(connection: Connection) -> Tenant | None:
            row = await (await connection.execute(_SQL["tenant"], {"name": name})).fetchone()
            return None if row is None else Tenant(row[0], name, row[1])

        found = await self._database.read(ask)
        if found is None:
            raise NotFound(f"tenants/{name}")
        return self._tenants.put(name, found)

    async def route_id(self, queue: str, kind: str) -> int:
        known = self._routes.get((queue, kind))
        if known is not None:
            return known
        parameters = {"queue": queue, "kind": kind}

        async def intern(connection: Connection) -> int:
            # Most routes are there: reading first spares the identity column's numbers.
            for _ in range(2):
                row = await (await connection.execute(_SQL["route"], parameters)).fetchone()
                if row is not None:
                    return int(row[0])
                await connection.execute(_SQL["insert_route"], parameters)
            row = await (await connection.execute(_SQL["route"], parameters)).fetchone()
            assert row is not None
            return int(row[0])

        return self._routes.put((queue, kind), await self._database.read(intern))

    async def route_id_in(self, connection: Connection, queue: str, kind: str) -> int:
        """As `route_id`, inside a transaction. What it inserted is not remembered: it may be rolled back."""
        known = self._routes.get((queue, kind))
        if known is not None:
            return known
        parameters = {"queue": queue, "kind": kind}
        row = await (await connection.execute(_SQL["route"], parameters)).fetchone()
        if row is not None:
            return self._routes.put((queue, kind), int(row[0]))
        await connection.execute(_SQL["insert_route"], parameters)
        row = await (await connection.execute(_SQL["route"], parameters)).fetchone()
        assert row is not None
        return int(row[0])

    async def intern_template(self, template: JobTemplate, body: bytes) -> int:
        """The id of a template that is stored now. `body` is `encode_template`'s."""
        template_id = content_id(body)
        if template_id not in self._templates:
            parameters = {"id": template_id, "body": body}

            async def intern(connection: Connection) -> None:
                await connection.execute(_SQL["insert_template"], parameters)

            await self._database.read(intern)
            self._templates.put(template_id, template)
        return template_id

    async def templates(self, connection: Connection, template_ids: Iterable[int]) -> dict[int, JobTemplate]:
        """Templates by id, those that are missing left out."""
        wanted = set(template_ids)
        missing = [each for each in wanted if each not in self._templates]
        if missing:
            rows = await (await connection.execute(_SQL["templates_by_id"], {"ids": missing})).fetchall()
            for template_id, body in rows:
                self._templates.put(template_id, decode_template(bytes(body)))
        return {each: self._templates[each] for each in wanted if each in self._templates}

    def compiled(self, trigger_id: int, body: bytes) -> CompiledTrigger:
        """The trigger that is stored as `body`; TriggerInvalid and its kin where it cannot be computed any
        more.
        """
        known = self._triggers.get(trigger_id)
        if known is not None:
            return known
        return self._triggers.put(trigger_id, trigger.compile(trigger.from_canonical(body)))
