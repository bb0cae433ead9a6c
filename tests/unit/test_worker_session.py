"""The worker's side of one stream: every rule of docs/worker-protocol.md that one stream can break."""

from __future__ import annotations

import itertools
import secrets
from pathlib import Path
from typing import Any

import pytest

from tickwheel.domain.lease import HeldDigest
from tickwheel.v1 import worker_service_pb2 as pb
from tickwheel.worker import session as module
from tickwheel.worker.attempt import SUCCEEDED, Attempt, Failed, Phase, Progress, Released, Succeeded
from tickwheel.worker.session import (
    MARGIN_DEFAULT_US,
    PROGRESS_INTERVAL_US,
    TRANSITIONS,
    Effects,
    Event,
    Identity,
    ProtocolError,
    Request,
    Session,
    State,
)

LEASE_US = 10_000_000
HEARTBEAT_US = 3_000_000
MARGIN_US = MARGIN_DEFAULT_US
START_US = 50_000_000
# The timer's clock has another zero.
TIMER_ZERO_US = 7_000_000_000


class Stream:
    """A session and what the timer would send, with a clock that the test moves."""

    def __init__(self, *, announced: list[Attempt] | None = None, share: int = 10, lease_us: int = LEASE_US):
        self.now_us = START_US
        self.lease_us = lease_us
        self.sequence = 0
        self.session = Session(Identity("w1"), announced or [], share=share, now_us=self.now_us)

    def send(self, **parts: Any) -> Effects:
        """One response, with the next number."""
        response = self.response(**parts)
        effects = self.session.receive(response, self.now_us)
        self.sequence += 1
        return effects

    def response(self, **parts: Any) -> pb.WorkResponse:
        parts.setdefault("clock_us", self.now_us + TIMER_ZERO_US)
        return pb.WorkResponse(sequence=self.sequence + 1, **parts)

    def welcome(self) -> pb.Welcome:
        welcome = pb.Welcome(protocol_version=1, timer_id="t1")
        welcome.lease_duration.FromMicroseconds(self.lease_us)
        welcome.heartbeat_interval_duration.FromMicroseconds(HEARTBEAT_US)
        return welcome

    def open(self) -> Stream:
        request = self.take()
        assert request.hello is not None
        self.send(welcome=self.welcome())
        assert self.take().heartbeat is not None
        return self

    def take(self) -> Request:
        request = self.session.take_request(self.now_us)
        assert request is not None, "nothing is to be sent"
        return request

    def drain_requests(self) -> list[Request]:
        requests = []
        while (request := self.session.take_request(self.now_us)) is not None:
            requests.append(request)
        return requests

    def grant(self, count: int = 1, *, shard: int = 1, lease_us: int = 0) -> list[Attempt]:
        grants = [grant_message(shard, lease_us) for _ in range(count)]
        return self.send(grants=grants, grant_clock_us=self.now_us + TIMER_ZERO_US).start

    def renew(self, sent_us: int, *, sequence: int | None = None, shards: tuple[int, ...] = (1,)) -> None:
        renewed = pb.Renewed(
            sent_us=sent_us, sequence=self.sequence if sequence is None else sequence, shards=shards
        )
        self.send(renewed=renewed)

    def refuse(self, attempt: Attempt, reason: int) -> Effects:
        return self.send(
            refusals=[pb.Refusal(run=attempt.run, lease_token=attempt.token, reason=reason)]  # type: ignore[arg-type]
        )

    def finish(self, attempt: Attempt, outcome: Any = SUCCEEDED) -> None:
        attempt.finish(outcome)
        self.session.send_outcome(attempt)


def grant_message(shard: int = 1, lease_us: int = 0) -> pb.Grant:
    grant = pb.Grant(
        run=f"tenants/t/runs/{secrets.token_hex(16)}",
        attempt=1,
        fence=7,
        lease_token=secrets.token_hex(16),
        shard=shard,
        kind="noop",
    )
    if lease_us:
        grant.lease_duration.FromMicroseconds(lease_us)
    return grant


def digest_of(session: Session) -> tuple[int, int]:
    held = HeldDigest.of(session.held)
    return held.count, held.token_sum


# --- The table ---------------------------------------------------------------------------------------------

PARTS: dict[Event, dict[str, Any]] = {
    Event.WELCOME: {"welcome": pb.Welcome(protocol_version=1)},
    Event.GRANTS: {"grants": [grant_message()]},
    Event.RENEWED: {"renewed": pb.Renewed(sent_us=START_US)},
    Event.RECORDED: {"recorded": ["00"]},
    Event.REFUSALS: {"refusals": [pb.Refusal(lease_token="00")]},
    Event.CANCELS: {"cancels": [pb.Cancel(lease_token="00")]},
    Event.DRAIN: {"drain": pb.Drain()},
    Event.RESYNC: {"resync": True},
    Event.NOTE: {"backlog_count": 3},
}


def stream_in(state: State) -> Stream:
    """A stream that is in this state and holds one attempt, where it can hold one."""
    stream = Stream()
    if state is State.OPENING:
        stream.take()
        return stream
    stream.open()
    stream.grant()
    if state is State.LEAVING:
        stream.session.goodbye("test")
    elif state is State.DRAINING:
        stream.send(drain=pb.Drain())
    elif state is State.CLOSED:
        stream.session.lost()
    assert stream.session.state is state
    return stream


def snapshot(session: Session) -> dict[str, Any]:
    return {
        name: (list(value) if hasattr(value, "__iter__") and not isinstance(value, str) else value)
        for name, value in vars(session).items()
    }


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_event_in_every_state_moves_as_the_table_says_or_raises_and_changes_nothing(
    state: State, event: Event
) -> None:
    stream = stream_in(state)
    session = stream.session
    before = snapshot(session)

    def do() -> None:
        if event is Event.GOODBYE:
            session.goodbye("again")
        elif event is Event.LOST:
            session.lost()
        else:
            stream.send(**PARTS[event])

    following = TRANSITIONS.get((state, event))
    if following is None:
        with pytest.raises(ProtocolError):
            do()
        assert snapshot(session) == before
    else:
        do()
        assert session.state is following


def test_a_message_with_one_illegal_part_changes_nothing_though_its_other_parts_are_legal() -> None:
    stream = stream_in(State.DRAINING)
    (token,) = stream.session.held
    before = snapshot(stream.session)
    with pytest.raises(ProtocolError, match="DRAINING got grants"):
        stream.send(recorded=[token], grants=[grant_message()])
    assert snapshot(stream.session) == before


def shown(state: State | None) -> str:
    return "—" if state is None else state.value


def test_the_page_shows_the_table_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "worker-protocol.md").read_text()
    head = "| in \\ event | " + " | ".join(event.value for event in Event) + " |"
    rows = [
        f"| {state.value} | " + " | ".join(shown(TRANSITIONS.get((state, event))) for event in Event) + " |"
        for state in State
    ]
    table = "\n".join([head, "|---" * (len(Event) + 1) + "|", *rows])
    assert table in page, f"put this into docs/worker-protocol.md:\n{table}"


# --- Opening -----------------------------------------------------------------------------------------------


def test_hello_goes_first_alone_and_once() -> None:
    stream = Stream(share=4)
    request = stream.take()
    assert request.hello is not None
    assert request.grant_count_max == 4
    assert request.heartbeat is None
    assert stream.session.take_request(stream.now_us) is None


def test_a_heartbeat_goes_out_at_once_after_welcome_so_that_grants_can_be_placed_on_our_clock() -> None:
    stream = Stream()
    stream.take()
    stream.send(welcome=stream.welcome())
    heartbeat = stream.take().heartbeat
    assert heartbeat is not None
    assert heartbeat.last_sequence == 1
    assert (heartbeat.held_count, heartbeat.held_digest) == (0, 0)


def test_a_response_that_is_out_of_order_is_refused() -> None:
    stream = Stream().open()
    response = stream.response(backlog_count=1)
    response.sequence += 1
    with pytest.raises(ProtocolError, match="comes next"):
        stream.session.receive(response, stream.now_us)


def test_welcome_is_awaited_for_a_bounded_time() -> None:
    stream = Stream()
    stream.take()
    stream.now_us += module.OPENING_US_MAX
    assert not stream.session.is_dead(stream.now_us)
    stream.now_us += 1
    assert stream.session.is_dead(stream.now_us)


# --- Credit ------------------------------------------------------------------------------------------------


def test_a_grant_beyond_the_credit_that_was_ever_given_is_illegal() -> None:
    stream = Stream(share=3).open()
    stream.grant(3)
    with pytest.raises(ProtocolError, match="4 grants in all"):
        stream.grant()
    assert len(stream.session.held) == 3


def test_credit_that_was_lowered_does_not_make_grants_under_way_illegal() -> None:
    stream = Stream(share=10).open()
    stream.session.set_share(2)
    assert stream.take().grant_count_max == 2
    assert len(stream.grant(10)) == 10


def test_a_finished_attempt_occupies_its_place_until_it_is_recorded() -> None:
    stream = Stream(share=1).open()
    (attempt,) = stream.grant()
    stream.finish(attempt)
    assert stream.take().grant_count_max is None
    assert stream.session.grant_limit == 1
    stream.send(recorded=[attempt.token])
    assert stream.take().grant_count_max == 2


def test_a_refused_attempt_gives_its_place_back() -> None:
    stream = Stream(share=1).open()
    (attempt,) = stream.grant()
    stream.refuse(attempt, module.REFUSAL_SUPERSEDED)
    assert stream.take().grant_count_max == 2


def test_a_little_room_waits_for_company_and_an_eighth_of_the_share_does_not() -> None:
    stream = Stream(share=80).open()
    attempts = stream.grant(20)
    for attempt in attempts:
        stream.finish(attempt)
    stream.drain_requests()
    stream.send(recorded=[attempt.token for attempt in attempts[:9]])
    assert stream.session.take_request(stream.now_us) is None
    stream.send(recorded=[attempts[9].token])
    assert stream.take().grant_count_max == 90


# --- What is held ------------------------------------------------------------------------------------------


def test_the_digest_covers_what_is_held_as_of_the_last_response() -> None:
    stream = Stream(share=100).open()
    attempts = stream.grant(5)
    stream.finish(attempts[0])
    assert stream.session.digest == digest_of(stream.session)
    stream.now_us += HEARTBEAT_US
    heartbeat = stream.take().heartbeat
    assert heartbeat is not None
    assert heartbeat.held_count == 5, "a finished attempt is held until it is recorded"
    stream.send(recorded=[attempts[0].token])
    stream.refuse(attempts[1], module.REFUSAL_MOVED)
    stream.refuse(attempts[2], module.REFUSAL_SUPERSEDED)
    assert stream.session.digest == digest_of(stream.session)
    assert stream.session.digest[0] == 2


def test_the_same_grant_twice_is_taken_once() -> None:
    stream = Stream(share=10).open()
    grant = grant_message()
    assert len(stream.send(grants=[grant]).start) == 1
    assert stream.send(grants=[grant]).start == []
    assert stream.session.digest == digest_of(stream.session)


def test_resync_is_answered_by_name_soon_but_not_in_a_storm() -> None:
    stream = Stream(share=10).open()
    attempts = stream.grant(3)
    stream.now_us += module.NAMING_INTERVAL_US
    stream.send(resync=True)
    heartbeat = stream.take().heartbeat
    assert heartbeat is not None
    assert heartbeat.held is not None
    assert {attempt.token for attempt in heartbeat.held} == {attempt.token for attempt in attempts}
    stream.send(resync=True)
    assert stream.session.take_request(stream.now_us) is None
    stream.now_us += module.NAMING_INTERVAL_US
    assert stream.take().heartbeat is not None


def test_an_attempt_that_we_gave_up_is_taken_from_the_list_by_name() -> None:
    stream = Stream(share=10).open()
    attempts = stream.grant(2)
    stream.session.drop(attempts[0])
    stream.now_us += module.NAMING_INTERVAL_US
    heartbeat = stream.take().heartbeat
    assert heartbeat is not None
    assert heartbeat.held == [attempts[1]]
    assert (heartbeat.held_count, heartbeat.held_digest) == digest_of(stream.session)


# --- Deadlines ---------------------------------------------------------------------------------------------


def test_a_renewal_counts_from_when_the_heartbeat_was_sent() -> None:
    stream = Stream().open()
    (attempt,) = stream.grant()
    stream.now_us += HEARTBEAT_US
    sent_us = stream.now_us
    stream.take()
    stream.now_us += 2_000_000
    stream.renew(sent_us)
    assert attempt.deadline_us == sent_us + LEASE_US - MARGIN_US


def test_a_renewal_never_brings_a_deadline_nearer() -> None:
    stream = Stream().open()
    (attempt,) = stream.grant()
    before_us = attempt.deadline_us
    stream.renew(START_US - 5_000_000)
    assert attempt.deadline_us == before_us


def test_a_renewal_leaves_out_other_shards_and_grants_that_came_after_its_sequence() -> None:
    stream = Stream(share=10).open()
    (elsewhere,) = stream.grant(shard=2)
    (covered,) = stream.grant(shard=1)
    covered_sequence = stream.sequence
    (later,) = stream.grant(shard=1)
    before = [attempt.deadline_us for attempt in (elsewhere, later)]
    stream.now_us += HEARTBEAT_US
    stream.take()
    stream.renew(stream.now_us, sequence=covered_sequence)
    assert [attempt.deadline_us for attempt in (elsewhere, later)] == before
    assert covered.deadline_us == stream.now_us + LEASE_US - MARGIN_US


def test_without_an_echo_two_thirds_of_the_lease_count_from_receipt() -> None:
    stream = Stream().open()
    (attempt,) = stream.send(grants=[grant_message()]).start  # No reading of the timer's clock.
    assert attempt.deadline_us == stream.now_us + LEASE_US * 2 // 3 - MARGIN_US


def test_with_an_echo_the_lease_counts_from_when_the_grant_can_have_been_made() -> None:
    stream = Stream().open()
    stream.now_us += 1_000_000
    made_us = stream.now_us
    stream.now_us += 4_000_000  # In a buffer.
    (attempt,) = stream.send(grants=[grant_message()], grant_clock_us=made_us + TIMER_ZERO_US).start
    # Hello and Welcome were sent and made at the same instant, so the echo is exact.
    assert attempt.deadline_us == made_us + LEASE_US - MARGIN_US


def test_a_grant_that_waited_out_its_lease_is_not_begun_and_is_handed_back() -> None:
    stream = Stream().open()
    made_us = stream.now_us
    stream.now_us += LEASE_US
    effects = stream.send(grants=[grant_message()], grant_clock_us=made_us + TIMER_ZERO_US)
    assert effects.start == []
    ((_, outcome),) = stream.take().outcomes
    assert isinstance(outcome, Released)


def test_a_grant_with_a_lease_of_its_own_is_heartbeated_often_enough() -> None:
    stream = Stream().open()
    (attempt,) = stream.grant(lease_us=2_000_000)
    assert attempt.deadline_us == stream.now_us + 2_000_000 - 2_000_000 // 8
    assert stream.session.heartbeat_interval_us() == 2_000_000 // 3
    stream.drain_requests()
    stream.now_us += HEARTBEAT_US
    assert stream.take().heartbeat is not None
    stream.now_us += 2_000_000 // 3
    assert stream.take().heartbeat is not None


def test_the_interval_grows_again_when_the_short_lease_is_gone() -> None:
    stream = Stream().open()
    (attempt,) = stream.grant(lease_us=2_000_000)
    stream.finish(attempt)
    stream.send(recorded=[attempt.token])
    stream.renew(stream.now_us)
    assert stream.session.heartbeat_interval_us() == HEARTBEAT_US


# --- Outcomes ----------------------------------------------------------------------------------------------


def test_an_outcome_is_sent_and_forgotten_only_when_it_is_recorded() -> None:
    stream = Stream().open()
    (attempt,) = stream.grant()
    stream.finish(attempt)
    assert stream.take().outcomes == [(attempt, SUCCEEDED)]
    assert attempt.token in stream.session.held
    assert stream.send(recorded=[attempt.token]).forget == [attempt]
    assert stream.session.held == {}


def test_an_attempt_has_one_outcome() -> None:
    stream = Stream().open()
    (attempt,) = stream.grant()
    stream.finish(attempt)
    with pytest.raises(ValueError, match="one outcome"):
        attempt.finish(Failed("E", "m"))
    assert attempt.outcome is SUCCEEDED


def test_an_outcome_that_was_not_acknowledged_is_repeated() -> None:
    stream = Stream().open()
    (attempt,) = stream.grant()
    stream.finish(attempt)
    stream.drain_requests()
    stream.session.resend_outcomes(stream.now_us - 1)
    assert stream.session.take_request(stream.now_us) is None, "it was sent after that"
    stream.session.resend_outcomes(stream.now_us)
    assert stream.take().outcomes == [(attempt, SUCCEEDED)]


def test_a_superseded_outcome_is_dropped_and_reported_and_a_superseded_run_is_stopped() -> None:
    stream = Stream().open()
    finished, running = stream.grant(2)
    stream.finish(finished)
    stream.take()
    effects = stream.refuse(finished, module.REFUSAL_SUPERSEDED)
    assert [attempt for attempt, _ in effects.refused] == [finished]
    effects = stream.refuse(running, module.REFUSAL_SUPERSEDED)
    assert [attempt for attempt, _ in effects.abandon] == [running]
    assert stream.session.held == {}


def test_a_moved_attempt_is_kept_without_an_owner() -> None:
    stream = Stream().open()
    (attempt,) = stream.grant()
    effects = stream.refuse(attempt, module.REFUSAL_MOVED)
    assert effects.moved == [attempt]
    assert attempt.owner is None
    assert attempt.phase is Phase.RUNNING


def test_a_message_stays_under_its_limit_and_one_that_alone_is_larger_is_still_sent() -> None:
    stream = Stream(share=100).open()
    attempts = stream.grant(12)
    for attempt in attempts[:-1]:
        stream.finish(attempt, Succeeded(bytes(200_000), "application/octet-stream"))
    stream.finish(attempts[-1], Succeeded(bytes(1 << 20), "application/octet-stream"))
    outcomes = [[outcome for _, outcome in request.outcomes] for request in stream.drain_requests()]
    sizes = [sum(len(o.data) for o in batch if isinstance(o, Succeeded)) for batch in outcomes]
    assert sum(sizes) == 11 * 200_000 + (1 << 20)
    assert [size for size in sizes if size > stream.session.message_bytes_max] == []
    assert sizes[-1] == 1 << 20


# --- Heartbeats, progress, silence -------------------------------------------------------------------------


def test_heartbeats_keep_their_interval_whether_or_not_anything_is_held() -> None:
    stream = Stream().open()
    stream.now_us += HEARTBEAT_US - 1
    assert not stream.session.has_request(stream.now_us)
    stream.now_us += 1
    assert stream.session.has_request(stream.now_us)
    assert stream.take().heartbeat is not None


def test_progress_brings_a_heartbeat_forward_and_only_its_latest_word_goes() -> None:
    stream = Stream().open()
    (attempt,) = stream.grant()
    for percent in (10.0, 20.0):
        attempt.progress = Progress(percent, "", b"c")
        stream.session.note_progress(attempt)
    stream.drain_requests()
    stream.now_us += PROGRESS_INTERVAL_US
    heartbeat = stream.take().heartbeat
    assert heartbeat is not None
    assert [progress.percent for _, progress in heartbeat.progress] == [20.0]
    stream.now_us += PROGRESS_INTERVAL_US
    assert stream.session.take_request(stream.now_us) is None, "said once"


def test_two_heartbeats_in_one_microsecond_have_different_stamps() -> None:
    stream = Stream().open()
    stream.now_us += HEARTBEAT_US
    first = stream.take().heartbeat
    stream.session.drop(stream.grant()[0])
    second = stream.take().heartbeat
    assert first is not None
    assert second is not None
    assert second.sent_us > first.sent_us


def test_a_silent_timer_is_doubted_after_half_an_interval_and_dead_after_a_lease() -> None:
    stream = Stream().open()
    stream.send(backlog_count=1)
    stream.now_us += HEARTBEAT_US
    stream.take()
    asked_us = stream.now_us
    stream.now_us = asked_us + HEARTBEAT_US // 2
    assert not stream.session.is_doubtful(stream.now_us)
    stream.now_us += 1
    assert stream.session.is_doubtful(stream.now_us)
    stream.now_us = asked_us + LEASE_US
    assert not stream.session.is_dead(stream.now_us)
    stream.now_us += 1
    assert stream.session.is_dead(stream.now_us)
    stream.send(backlog_count=1)
    assert not stream.session.is_doubtful(stream.now_us)


def test_a_timer_that_is_not_listed_any_more_is_asked_at_once_and_doubted_soon() -> None:
    stream = Stream().open()
    stream.send(backlog_count=1)
    stream.now_us += 1_000_000
    assert not stream.session.has_request(stream.now_us)
    stream.session.set_gone(True)
    assert stream.take().heartbeat is not None
    stream.now_us += module.GONE_SILENCE_US
    assert not stream.session.is_doubtful(stream.now_us)
    stream.now_us += 1
    assert stream.session.is_doubtful(stream.now_us)
    # It answers: the list was wrong, and nothing is announced.
    stream.send(backlog_count=1)
    assert not stream.session.is_doubtful(stream.now_us)


def test_further_heartbeats_do_not_hide_how_long_a_timer_has_been_silent() -> None:
    stream = Stream().open()
    stream.send(backlog_count=1)
    for _ in range(4):
        stream.now_us += HEARTBEAT_US
        stream.take()
    assert stream.session.silent_us(stream.now_us) == 3 * HEARTBEAT_US


# --- Cancel, drain, goodbye --------------------------------------------------------------------------------


def test_a_cancel_names_what_runs_and_passes_over_what_has_ended_or_is_unknown() -> None:
    stream = Stream().open()
    running, finished = stream.grant(2)
    stream.finish(finished)
    cancels = [pb.Cancel(lease_token=token, reason="why") for token in (running.token, finished.token, "00")]
    for cancel in cancels:
        cancel.grace_duration.FromMicroseconds(5_000_000)
    assert stream.send(cancels=cancels).cancel == [(running, "why", 5_000_000)]


def test_grants_after_our_goodbye_are_handed_back_un_run() -> None:
    stream = Stream().open()
    stream.session.goodbye("stop")
    request = stream.take()
    assert request.goodbye == "stop"
    assert request.grant_count_max == 0
    assert stream.grant(2) == []
    outcomes = stream.take().outcomes
    assert len(outcomes) == 2
    assert all(isinstance(outcome, Released) for _, outcome in outcomes)


def test_a_goodbye_before_welcome_is_said_after_it() -> None:
    stream = Stream()
    stream.session.goodbye("stop")
    request = stream.take()
    assert request.hello is not None
    assert request.grant_count_max == 0
    stream.send(welcome=stream.welcome())
    assert stream.session.state is State.LEAVING
    assert stream.take().goodbye == "stop"


def test_a_draining_stream_closes_when_nothing_is_held_and_not_before() -> None:
    stream = Stream().open()
    (attempt,) = stream.grant()
    assert stream.send(drain=pb.Drain(reason="restart")).close == ""
    stream.finish(attempt)
    assert stream.take().outcomes
    assert stream.send(recorded=[attempt.token]).close != ""


# --- Announcing --------------------------------------------------------------------------------------------


def orphan() -> Attempt:
    first = Stream().open()
    (attempt,) = first.grant()
    first.session.lost()
    assert attempt.owner is None
    return attempt


def test_hello_announces_what_an_earlier_stream_held() -> None:
    attempt = orphan()
    stream = Stream(announced=[attempt])
    assert stream.take().hello_held == [attempt]
    stream.send(welcome=stream.welcome())
    heartbeat = stream.take().heartbeat
    assert heartbeat is not None
    assert (heartbeat.held_count, heartbeat.held_digest) == digest_of(stream.session)
    assert attempt.owner is None, "welcome alone takes nothing over"
    stream.renew(stream.now_us)
    assert attempt.owner is stream.session


def test_an_announced_attempt_is_taken_over_by_the_renewal_of_a_heartbeat_that_named_it() -> None:
    attempt = orphan()
    stream = Stream().open()
    early_us = stream.now_us
    stream.now_us += module.NAMING_INTERVAL_US
    stream.session.announce([attempt])
    stream.renew(early_us, sequence=99)
    assert attempt.owner is None, "that heartbeat did not name it"
    heartbeat = stream.take().heartbeat
    assert heartbeat is not None
    assert heartbeat.held == [attempt]
    stream.renew(heartbeat.sent_us)
    assert attempt.owner is stream.session
    assert attempt.deadline_us == heartbeat.sent_us + LEASE_US - MARGIN_US


def test_a_refusal_in_the_same_message_as_a_renewal_wins() -> None:
    attempt = orphan()
    stream = Stream(announced=[attempt])
    stream.open()
    before_us = attempt.deadline_us
    stream.send(
        renewed=pb.Renewed(sent_us=stream.now_us, sequence=1, shards=[1]),
        refusals=[pb.Refusal(lease_token=attempt.token, reason=pb.Refusal.REASON_MOVED)],
    )
    assert attempt.owner is None
    assert attempt.deadline_us == before_us


def test_the_refusal_of_a_listing_ends_no_outcome() -> None:
    """It may be recorded already, by an owner whose answer was lost."""
    for answer in ("recorded", "superseded"):
        attempt = orphan()
        stream = Stream().open()
        stream.now_us += module.NAMING_INTERVAL_US
        stream.session.announce([attempt])
        assert stream.take().outcomes == []
        attempt.finish(SUCCEEDED)
        effects = stream.refuse(attempt, module.REFUSAL_SUPERSEDED)
        assert (effects.refused, effects.abandon) == ([], [])
        assert stream.session.digest == (0, 0)
        assert stream.session.held_count == 1
        assert stream.take().outcomes == [(attempt, SUCCEEDED)]
        if answer == "recorded":
            assert stream.send(recorded=[attempt.token]).forget == [attempt]
        else:
            effects = stream.refuse(attempt, module.REFUSAL_SUPERSEDED)
            assert [refused for refused, _ in effects.refused] == [attempt]
        assert stream.session.held_count == 0


def test_an_outcome_that_is_owed_an_answer_is_repeated_and_outlives_its_stream() -> None:
    attempt = orphan()
    stream = Stream().open()
    stream.session.announce([attempt])
    attempt.finish(SUCCEEDED)
    stream.refuse(attempt, module.REFUSAL_SUPERSEDED)
    stream.drain_requests()
    stream.session.announce([attempt])
    stream.session.resend_outcomes(stream.now_us)
    assert stream.take().outcomes == [(attempt, SUCCEEDED)]
    assert stream.session.held == {}
    assert stream.session.lost() == [attempt]


def test_an_outcome_goes_with_its_announcement_and_again_once_the_attempt_is_taken_over() -> None:
    attempt = orphan()
    attempt.finish(SUCCEEDED)
    stream = Stream(announced=[attempt])
    assert stream.take().outcomes == []
    stream.send(welcome=stream.welcome())
    assert stream.take().outcomes == [(attempt, SUCCEEDED)]
    stream.renew(stream.now_us)
    assert stream.take().outcomes == [(attempt, SUCCEEDED)]


def test_what_a_broken_stream_held_is_given_out_and_nothing_is_left() -> None:
    stream = Stream(share=10).open()
    attempts = stream.grant(3)
    stream.finish(attempts[0])
    assert set(stream.session.lost()) == set(attempts)
    assert all(attempt.owner is None for attempt in attempts)
    assert attempts[0].outcome is SUCCEEDED
    assert stream.session.held == {}
    assert stream.session.take_request(stream.now_us) is None
