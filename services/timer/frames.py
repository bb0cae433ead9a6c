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
from tickwheel.domain.timer_rows import Int64s
from tickwheel.services.timer.session import Frame, GrantChunk
from tickwheel.v1 import job_pb2, run_pb2, worker_service_pb2

if TYPE_CHECKING:
    from tickwheel.services.timer.node import TimerNode

CHUNK_BYTES_MAX = 256 << 10
CHUNK_GRANTS_MAX = 1_000
GRANT_BYTES_ABOUT = 320


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

    def grants(
        self, slots: Int64s, clock_us: int, details: Mapping[int, tuple[Any, ...]]
    ) -> Iterator[GrantChunk]:
        """The grants of these leases, in chunks that fit a message. `details`: rows of `load_run_details`."""
        leases = self._node.leases
        numbers = leases.token_hi[slots]
        frames: list[worker_service_pb2.Grant] = []
        byte_count = 0
        start = 0
        for place, grant in enumerate(self._each(slots, details)):
            size = GRANT_BYTES_ABOUT + len(grant.payload.data)
            if frames and (byte_count + size > CHUNK_BYTES_MAX or len(frames) >= CHUNK_GRANTS_MAX):
                yield GrantChunk(frames, slots[start:place], numbers[start:place], byte_count, clock_us)
                frames, byte_count, start = [], 0, place
            frames.append(grant)
            byte_count += size
        if frames:
            yield GrantChunk(frames, slots[start:], numbers[start:], byte_count, clock_us)

    def _each(
        self, slots: Int64s, details: Mapping[int, tuple[Any, ...]]
    ) -> Iterator[worker_service_pb2.Grant]:
        """Hot: one message a run."""
        node = self._node
        leases = node.leases
        catalog = node.catalog
        both = np.empty((len(slots), 2), dtype=">u8")
        both[:, 0] = leases.run_hi[slots]
        both[:, 1] = leases.run_lo[slots]
        run_text = both.tobytes().hex()
        times: dict[int, Timestamp] = {}
        attempt_deadline = leases.attempt_deadline_us[slots]
        rows = zip(
            slots.tolist(),
            leases.attempt[slots].tolist(),
            leases.fence[slots].tolist(),
            leases.shard[slots].tolist(),
            leases.tenant[slots].tolist(),
            leases.template[slots].tolist(),
            leases.schedule_lo[slots].tolist(),
            leases.version[slots].tolist(),
            leases.schedule_us[slots].tolist(),
            leases.due_us[slots].tolist(),
            leases.run_lo[slots].tolist(),
            attempt_deadline.tolist(),
            strict=True,
        )
        tokens = leases.tokens
        heads = catalog.heads
        payloads: dict[int, job_pb2.Payload] = {}
        at = 0
        for (
            slot,
            attempt,
            fence,
            shard,
            tenant,
            template_id,
            schedule_lo,
            version,
            schedule_us,
            due_us,
            run_lo,
            until_us,
        ) in rows:
            template = catalog.templates[template_id]
            assert isinstance(template, job.JobTemplate)
            tenant_name = catalog.tenants.get(tenant, "")
            run_id = run_text[at : at + 32]
            at += 32
            schedule_time = times.get(schedule_us)
            if schedule_time is None:
                schedule_time = times[schedule_us] = timestamp(schedule_us)
            due_time = times.get(due_us)
            if due_time is None:
                due_time = times[due_us] = timestamp(due_us)
            deadline_time = times.get(until_us)
            if deadline_time is None:
                deadline_time = times[until_us] = timestamp(until_us)
            head = heads.get((schedule_lo, version)) if schedule_lo else None
            grant = worker_service_pb2.Grant(
                run=f"tenants/{tenant_name}/runs/{run_id}",
                attempt=attempt,
                fence=fence,
                lease_token=tokens[slot],
                shard=shard,
                kind=template.kind,
                schedule_time=schedule_time,
                due_time=due_time,
                deadline_time=deadline_time,
                idempotency_key=run_id,
                queue=template.queue,
                attempt_count_max=template.retry.attempt_count_max,
            )
            if head is not None:
                grant.schedule = f"tenants/{tenant_name}/schedules/{head.name}"
                if head.payload:
                    payload = payloads.get(schedule_lo)
                    if payload is None:
                        payload = payloads[schedule_lo] = job_pb2.Payload(
                            data=head.payload, content_type=head.content_type
                        )
                    grant.payload.CopyFrom(payload)
            if template.lease_ms != self._default_lease_ms:
                grant.lease_duration.CopyFrom(duration(template.lease_ms))
            detail = details.get(run_lo) if details else None
            if detail is not None:
                _add_details(grant, detail)
            grant.traceparent = grant.traceparent or node.traceparent(run_id, fence)
            yield grant

    def response(self, frame: Frame) -> worker_service_pb2.WorkResponse:
        node = self._node
        message = worker_service_pb2.WorkResponse(
            sequence=frame.sequence,
            clock_us=mono_us(),
            grant_clock_us=frame.grant_clock_us,
            grants=frame.grants,
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
        return message


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
