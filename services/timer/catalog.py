"""What do the ids in a timer row stand for? Caches of triggers, templates, schedules' heads, tenants, routes.

Definitions never change under their id, and a schedule's head never changes under its version, so nothing
here can be stale; each cache is bounded, and what was put out is read again. Routes and tenants only grow.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tickwheel.domain import job, trigger
from tickwheel.domain.trigger import CompiledTrigger
from tickwheel.errors import TickwheelError
from tickwheel.postgres.timer_store import TimerStore

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

TRIGGERS_MAX: Final = 200_000
TEMPLATES_MAX: Final = 100_000
HEADS_MAX: Final = 300_000
ROUTES_PAGE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Head:
    """A schedule's name and payload, at one version."""

    name: str
    payload: bytes
    content_type: str
    traceparent: str = ""
    """Of the schedule's creation."""


def make_room(cache: dict[int, object] | dict[tuple[int, int], object], count_max: int) -> None:
    """Puts the oldest tenth out when a cache is full: dicts keep the order of insertion."""
    if len(cache) > count_max:
        for key in list(cache)[: count_max // 10]:
            del cache[key]  # type: ignore[arg-type]


class Catalog:
    """Reads what is missing in one call a batch; lookups are plain dicts."""

    def __init__(self, store: TimerStore) -> None:
        self._store = store
        self.triggers: dict[int, CompiledTrigger | TickwheelError] = {}
        """An error stands where a stored trigger does not compile: its schedules are quarantined (I11)."""
        self.templates: dict[int, job.JobTemplate | TickwheelError] = {}
        self.heads: dict[tuple[int, int], Head] = {}
        """By (the low half of the schedule's uid, version)."""
        self.tenants: dict[int, str] = {}
        self.tenant_ids: dict[str, int] = {}
        self.weights: dict[int, int] = {}
        self.routes: dict[int, tuple[str, str]] = {}
        self._route_last = 0
        self.lease_ms_max = 0
        """Of all templates that were ever read."""

    def forget(self) -> None:
        """Another history of Postgres: there the same ids may stand for something else."""
        for cache in (self.triggers, self.templates, self.heads, self.tenants, self.weights, self.routes):
            cache.clear()
        self.tenant_ids.clear()
        self._route_last = 0

    async def ensure_definitions(self, trigger_ids: Iterable[int], template_ids: Iterable[int]) -> None:
        """Reads the triggers and templates that are not here."""
        triggers = [i for i in set(trigger_ids) if i and i not in self.triggers]
        templates = [i for i in set(template_ids) if i not in self.templates]
        if not triggers and not templates:
            return
        make_room(self.triggers, TRIGGERS_MAX)  # type: ignore[arg-type]
        make_room(self.templates, TEMPLATES_MAX)  # type: ignore[arg-type]
        found_triggers, found_templates = await self._store.load_definitions(triggers, templates)
        for key in triggers:
            self.triggers[key] = _compile(found_triggers.get(key))
        for key in templates:
            template = _template(found_templates.get(key))
            self.templates[key] = template
            if isinstance(template, job.JobTemplate):
                self.lease_ms_max = max(self.lease_ms_max, template.lease_ms)

    async def ensure_heads(self, hi: U64, lo: U64, version: I64) -> None:
        """Reads the heads of these schedules' versions that are not here."""
        heads = self.heads
        missing = [
            n for n, key in enumerate(zip(lo.tolist(), version.tolist(), strict=True)) if key not in heads
        ]
        if not missing:
            return
        make_room(heads, HEADS_MAX)  # type: ignore[arg-type]
        for uid, number, name, payload, content_type, traceparent in await self._store.load_schedule_heads(
            hi[missing], lo[missing], version[missing]
        ):
            heads[uid.int & 0xFFFFFFFFFFFFFFFF, number] = Head(name, payload, content_type, traceparent)

    async def ensure_tenants(self, tenants: Iterable[int]) -> None:
        missing = [i for i in set(tenants) if i not in self.tenants]
        if missing:
            for tenant, name, weight in await self._store.load_tenants(missing):
                self.tenants[tenant] = name
                self.tenant_ids[name] = tenant
                self.weights[tenant] = weight

    async def find_tenants(self, names: Iterable[str]) -> None:
        """Looks tenants up by name."""
        for tenant, name, weight in await self._store.find_tenants(list(names)):
            self.tenants[tenant] = name
            self.tenant_ids[name] = tenant
            self.weights[tenant] = weight

    async def refresh_routes(self) -> bool:
        """Reads the routes that came since; returns whether there were any."""
        rows = await self._store.load_routes(self._route_last)
        for route, queue, kind in rows:
            self.routes[route] = (queue, kind)
            self._route_last = max(self._route_last, route)
        return bool(rows)

    def routes_for(self, queues: Collection[str], kinds: Collection[str]) -> frozenset[int]:
        """The routes that a worker with these queues and kinds (empty: all) takes."""
        return frozenset(
            route
            for route, (queue, kind) in self.routes.items()
            if queue in queues and (not kinds or kind in kinds)
        )


def _compile(body: bytes | None) -> CompiledTrigger | TickwheelError:
    if body is None:
        return TickwheelError("its trigger is not stored")
    try:
        return trigger.compile(trigger.from_canonical(body))
    except TickwheelError as error:
        return error
    except Exception as error:  # A row that somebody wrote by hand may hold anything (I11).
        return TickwheelError(f"its trigger cannot be read: {error}")


def _template(body: bytes | None) -> job.JobTemplate | TickwheelError:
    if body is None:
        return TickwheelError("its template is not stored")
    try:
        return job.decode_template(body)
    except Exception as error:  # As above.
        return TickwheelError(f"its template cannot be read: {error}")
