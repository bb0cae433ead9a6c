"""What goes over a worker's stream: the protocol's messages, from columns and from the pure session's frames.

The only module of the timer, beside its gRPC services, that knows protobuf.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tickwheel.clock import mono_us
from tickwheel.domain import job
from tickwheel.domain.ids import tenant_name
from tickwheel.domain.timer_rows import Int64s
from tickwheel.services.timer.session import Frame, GrantChunk
from tickwheel.v1 import job_pb2, run_pb2, worker_service_pb2

if TYPE_CHECKING:
    from tickwheel.services.timer.node import TimerNode

CHUNK_BYTES_MAX = 256 << 10
CHUNK_GRANTS_MAX = 1_000
GRANT_BYTES_ABOUT = 256
SHARED_MAX = 50_000


def timestamp(us: int) -> Timestamp:
    return Timestamp(seconds=us // 1_000_000, nanos=us % 1_000_000 * 1_000)


def stored_progress(said: worker_service_pb2.AttemptProgress, now_us: int) -> bytes:
    """What a worker says of an attempt, as it stands in Postgres and is shown with its run."""
    return run_pb2.Progress(
        percent=said.percent,
        message=said.message,
        checkpoint=said.checkpoint,
        update_time=timestamp(now_us),
    ).SerializeToString()


def duration(ms: int) -> Duration:
    return Duration(seconds=ms // 1_000, nanos=ms % 1_000 * 1_000_000)


def failure_to_proto(failure: job.Failure) -> job_pb2.Failure:
    message = job_pb2.Failure(
        type=failure.type,
        message=failure.message,
        non_retryable=failure.non_retryable,
        stack=failure.stack,
        fingerprint=failure.fingerprint,
    )
    if failure.retry_delay_ms is not None:
        message.retry_delay.CopyFrom(duration(failure.retry_delay_ms))
    return message


class Frames:
    """Builds messages; keeps what many of them share."""

    def __init__(self, node: "TimerNode", default_lease_ms: int) -> None:
        self._node = node
        self._default_lease_ms = default_lease_ms
        self._shared: dict[tuple[int, int], tuple[str, bytes]] = {}

    def grants(
        self, slots: Int64s, clock_us: int, details: Mapping[int, tuple[Any, ...]]
    ) -> Iterator[GrantChunk]:
        """The grants of these leases, in chunks that fit a message. `details`: rows of `load_run_details`.

        Hot: one message a run. What many grants share (the template, the times of a batch) is encoded once
        and merged in as bytes: two encoded messages, one after the other, are their merge.
        """
        leases = self._node.leases
        numbers = leases.token_hi[slots]
        both = np.empty((len(slots), 2), dtype=">u8")
        both[:, 0] = leases.run_hi[slots]
        both[:, 1] = leases.run_lo[slots]
        run_text = both.tobytes().hex()
        rows = zip(
            slots.tolist(),
            leases.attempt[slots].tolist(),
            leases.fence[slots].tolist(),
            leases.shard[slots].tolist(),
            leases.run_lo[slots].tolist(),
            zip(leases.schedule_lo[slots].tolist(), leases.version[slots].tolist(), strict=True),
            self._shared_parts(slots),
            strict=True,
        )
        tokens = leases.tokens
        heads = self._node.catalog.heads
        message = worker_service_pb2.WorkResponse()
        add = message.grants.add
        byte_count = start = 0
        for place, (slot, attempt, fence, shard, run_lo, head_key, (tenant, shared, times)) in enumerate(
            rows
        ):
            run_id = run_text[place * 32 : place * 32 + 32]
            head = heads.get(head_key)
            grant = add(
                run=f"{tenant}/runs/{run_id}",
                attempt=attempt,
                fence=fence,
                lease_token=tokens[slot],
                shard=shard,
                idempotency_key=run_id,
                schedule="" if head is None else f"{tenant}/schedules/{head.name}",
            )
            grant.MergeFromString(shared)
            grant.MergeFromString(times)
            if head is not None and head.payload:
                grant.payload.data = head.payload
                grant.payload.content_type = head.content_type
                byte_count += len(head.payload)
            byte_count += GRANT_BYTES_ABOUT
            detail = details.get(run_lo) if details else None
            if detail is not None:
                _add_details(grant, detail)
                byte_count += len(grant.payload.data) + len(grant.checkpoint)
            if byte_count > CHUNK_BYTES_MAX or place - start + 1 >= CHUNK_GRANTS_MAX:
                part = slice(start, place + 1)
                yield GrantChunk(self._encode(message, slots[part]), slots[part], numbers[part], clock_us)
                message = worker_service_pb2.WorkResponse()
                add = message.grants.add
                byte_count, start = 0, place + 1
        if start < len(slots):
            yield GrantChunk(self._encode(message, slots[start:]), slots[start:], numbers[start:], clock_us)

    def _encode(self, message: worker_service_pb2.WorkResponse, slots: Int64s) -> bytes:
        """Where traces go somewhere, those grants that are recorded get their `traceparent` first."""
        if self._node.traces is not None:
            self._node.traces.granted(message.grants, slots)
        return message.SerializeToString()

    def forget(self) -> None:
        """Another history of Postgres: there the same ids may stand for something else."""
        self._shared.clear()

    def _shared_parts(self, slots: Int64s) -> Iterator[tuple[str, bytes, bytes]]:
        """Of each lease: its tenant's name, the part of its template, its times; both parts encoded."""
        leases = self._node.leases
        times: dict[tuple[int, int, int], bytes] = {}
        shared = self._shared
        if len(shared) > SHARED_MAX:
            shared.clear()
        keys = zip(leases.tenant[slots].tolist(), leases.template[slots].tolist(), strict=True)
        instants = zip(
            leases.schedule_us[slots].tolist(),
            leases.due_us[slots].tolist(),
            leases.attempt_deadline_us[slots].tolist(),
            strict=True,
        )
        for key, each in zip(keys, instants, strict=True):
            part = shared.get(key)
            if part is None:
                part = shared[key] = self._shared_part(*key)
            when = times.get(each)
            if when is None:
                when = times[each] = worker_service_pb2.Grant(
                    schedule_time=timestamp(each[0]),
                    due_time=timestamp(each[1]),
                    deadline_time=timestamp(each[2]),
                ).SerializeToString()
            yield (*part, when)

    def _shared_part(self, tenant: int, template_id: int) -> tuple[str, bytes]:
        catalog = self._node.catalog
        template = catalog.templates[template_id]
        assert isinstance(template, job.JobTemplate)
        grant = worker_service_pb2.Grant(
            kind=template.kind, queue=template.queue, attempt_count_max=template.retry.attempt_count_max
        )
        if template.lease_ms != self._default_lease_ms:
            grant.lease_duration.CopyFrom(duration(template.lease_ms))
        return tenant_name(catalog.tenants.get(tenant, "")), grant.SerializeToString()

    def response(self, frame: Frame) -> bytes:
        """A `WorkResponse`, encoded: the grants as they were encoded before, and the rest after them."""
        node = self._node
        message = worker_service_pb2.WorkResponse(
            sequence=frame.sequence,
            clock_us=mono_us(),
            grant_clock_us=frame.grant_clock_us,
            recorded=frame.recorded,
            resync=frame.resync,
            backlog_count=max(0, frame.backlog_count),
        )
        for slots in frame.slots:
            node.leases.sequence[slots] = frame.sequence
        if frame.welcome:
            message.welcome.CopyFrom(node.welcome())
        for refusal in frame.refusals:
            message.refusals.add(
                run=refusal.run,
                attempt=refusal.attempt,
                lease_token=refusal.token,
                reason=(
                    worker_service_pb2.Refusal.REASON_MOVED
                    if refusal.moved
                    else worker_service_pb2.Refusal.REASON_SUPERSEDED
                ),
                message=refusal.message,
            )
        for cancel in frame.cancels:
            message.cancels.add(
                run=cancel.run,
                attempt=cancel.attempt,
                lease_token=cancel.token,
                reason=cancel.reason,
                grace_duration=duration(cancel.grace_ms),
            )
        if frame.renewal is not None:
            message.renewed.sent_us = frame.renewal.sent_us
            message.renewed.sequence = frame.renewal.sequence
            message.renewed.shards.extend(frame.renewal.shards)
        if frame.drain is not None:
            message.drain.reason = frame.drain
        frame.grants.append(message.SerializeToString())
        return b"".join(frame.grants)


def encoded(message: Any) -> bytes:
    """The stream's serializer: what comes from `Frames.response` is encoded already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def _add_details(grant: worker_service_pb2.Grant, detail: tuple[Any, ...]) -> None:
    _, payload, content_type, failure, progress, traceparent = detail
    if payload is not None:
        grant.payload.data = payload
        grant.payload.content_type = content_type or ""
    if failure is not None:
        grant.last_failure.CopyFrom(failure_to_proto(job.decode_failure(failure)))
    if progress is not None:
        grant.checkpoint = run_pb2.Progress.FromString(progress).checkpoint
    if traceparent:
        grant.traceparent = traceparent
