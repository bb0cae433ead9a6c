"""How does a request of the session look on the wire? Plain values become protobuf here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration

from tickwheel.v1 import job_pb2
from tickwheel.v1 import worker_service_pb2 as pb
from tickwheel.worker.attempt import SUCCEEDED, Attempt, Failed, Outcome, Released, Succeeded
from tickwheel.worker.session import PROTOCOL_VERSION, Heartbeat, Identity, Request


def encode(request: Request) -> pb.WorkRequest:
    """The message for a request. Field order is the order in which the timer takes the parts."""
    message = pb.WorkRequest()
    if request.hello is not None:
        _hello(message.hello, request.hello, request.hello_held, request.grant_count_max or 0)
        return message
    if request.outcomes:
        _outcomes(message, request.outcomes)
    if request.heartbeat is not None:
        _heartbeat(message.heartbeat, request.heartbeat)
    if request.grant_count_max is not None:
        message.grant_count_max = request.grant_count_max
    if request.goodbye is not None:
        message.goodbye.reason = request.goodbye
    return message


def copy_grant(grant: pb.Grant) -> pb.Grant:
    """A message by itself. One that was read as part of another keeps all of that in memory, up to 1 MiB."""
    return pb.Grant.FromString(grant.SerializeToString())


def _hello(hello: pb.Hello, identity: Identity, held: Iterable[Attempt], grant_count_max: int) -> None:
    hello.protocol_version = PROTOCOL_VERSION
    hello.worker_id = identity.worker_id
    hello.pool = identity.pool
    hello.host = identity.host
    hello.queues.extend(identity.queues)
    hello.tenants.extend(identity.tenants)
    hello.kinds.extend(identity.kinds)
    hello.capacity = identity.capacity
    hello.grant_count_max = grant_count_max
    hello.held.extend(_held(held))


def _held(attempts: Iterable[Attempt]) -> Iterable[pb.HeldAttempt]:
    return (
        pb.HeldAttempt(run=a.run, attempt=a.attempt, fence=a.fence, lease_token=a.token) for a in attempts
    )


def _outcomes(message: pb.WorkRequest, outcomes: Iterable[tuple[Attempt, Outcome]]) -> None:
    """Hot: once a run."""
    add = message.outcomes.add
    for attempt, outcome in outcomes:
        entry = add(run=attempt.run, attempt=attempt.attempt, fence=attempt.fence, lease_token=attempt.token)
        if outcome is SUCCEEDED:
            entry.success.SetInParent()
        elif isinstance(outcome, Succeeded):
            entry.success.result.data = outcome.data
            entry.success.result.content_type = outcome.content_type
        elif isinstance(outcome, Failed):
            entry.failure.CopyFrom(_failure(outcome))
        elif isinstance(outcome, Released):
            entry.release.reason = _text(outcome.reason)
            if outcome.not_before_us is not None:
                entry.release.not_before_duration.CopyFrom(_duration(outcome.not_before_us))
        else:
            entry.cancelled.SetInParent()


def _failure(outcome: Failed) -> job_pb2.Failure:
    failure = job_pb2.Failure(
        type=_text(outcome.type),
        message=_text(outcome.message),
        non_retryable=outcome.non_retryable,
        stack=_text(outcome.stack),
    )
    if outcome.retry_delay_us is not None:
        failure.retry_delay.CopyFrom(_duration(outcome.retry_delay_us))
    return failure


def _text(text: str) -> str:
    """A handler's words, as they can be sent: a lone surrogate has no UTF-8, and would end the stream."""
    return text.encode("utf-8", "replace").decode()


def _duration(micros: int) -> Duration:
    return Duration(seconds=micros // 1_000_000, nanos=micros % 1_000_000 * 1000)


def _heartbeat(message: pb.Heartbeat, heartbeat: Heartbeat) -> None:
    message.sent_us = heartbeat.sent_us
    message.last_sequence = heartbeat.last_sequence
    message.held_count = heartbeat.held_count
    message.held_digest = heartbeat.held_digest
    for attempt, progress in heartbeat.progress:
        message.progress.add(
            run=attempt.run,
            attempt=attempt.attempt,
            fence=attempt.fence,
            lease_token=attempt.token,
            percent=progress.percent,
            message=_text(progress.message),
            checkpoint=progress.checkpoint,
        )
    if heartbeat.held is not None:
        message.held.extend(_held(heartbeat.held))
        message.held_complete = True
