"""Triggers as values: dialects, DST policies, the stored form, hash spread, jitter and bulk answers."""

from __future__ import annotations

import calendar
import random
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from tickwheel.domain import cron
from tickwheel.domain import trigger as triggers
from tickwheel.domain.trigger import (
    NEVER_US,
    CompiledTrigger,
    Cron,
    Dialect,
    DstGapPolicy,
    DstOverlapPolicy,
    Interval,
    Rrule,
    Trigger,
    TriggerSet,
    canonical_bytes,
    from_canonical,
    jitter_offsets_us,
    resolve_hash,
    trigger_id,
)
from tickwheel.errors import InvalidArgument, TriggerInvalid, TriggerNeverFires

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND_US = 1_000_000
HOUR_US = 3_600 * SECOND_US


def at(text: str) -> int:
    return (datetime.fromisoformat(text).replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)


def compiled(
    expression: str, time_zone: str = "UTC", dialect: Dialect = Dialect.UNIX, **policies: Any
) -> CompiledTrigger:
    trigger = Trigger(cron=Cron(expression, dialect), time_zone=time_zone, **policies)
    return triggers.compile(TriggerSet((trigger,)))


def instants(trigger: CompiledTrigger, after: str, count: int) -> list[str]:
    found = trigger.between(at(after), NEVER_US, count)
    return [(EPOCH + timedelta(microseconds=instant_us)).strftime("%m-%d %H:%M:%S") for instant_us in found]


class TestDialects:
    @pytest.mark.parametrize(
        ("expression", "expected"),
        [
            ("0 0 12 * * ?", "01-01 12:00:00"),
            ("0 15 10 ? * MON-FRI", "01-01 10:15:00"),  # 2027-01-01 is a Friday
            ("0 15 10 ? * 6", "01-01 10:15:00"),
            ("0 15 10 ? * 2", "01-04 10:15:00"),
            ("0 0 0 ? * L", "01-02 00:00:00"),
            ("0 0 0 ? * 6L", "01-29 00:00:00"),
            ("0 0 0 ? * 6#2", "01-08 00:00:00"),
            ("0 0 0 ? * FRI#3", "01-15 00:00:00"),
            ("0 0 0 L * ?", "01-31 00:00:00"),
            ("0 0 0 L-3 * ?", "01-28 00:00:00"),
            ("0 0 0 LW * ?", "01-29 00:00:00"),
            ("0 0 0 15W * ? 2027", "01-15 00:00:00"),
            ("0 0 0 1 1 ? 2028-2030/2", "01-01 00:00:00"),
            ("*/20 59 23 31 1 ?", "01-31 23:59:00"),
            ("@daily", "01-02 00:00:00"),
        ],
    )
    def test_quartz_counts_its_weekdays_from_one(self, expression: str, expected: str) -> None:
        assert instants(compiled(expression, dialect=Dialect.QUARTZ), "2027-01-01T00:00:00", 1) == [expected]

    @pytest.mark.parametrize(
        ("expression", "field", "column"),
        [
            ("0 0 12 * * *", "day_of_week", 12),
            ("0 0 12 ? * ?", "day_of_week", 12),
            ("0 0 0 ? * 0", "day_of_week", 11),
            ("0 0 0 ? * 8", "day_of_week", 11),
            ("0 0 0 1 1 ? 1969", "year", 13),
            ("0 0 0 1 1 ? 2100", "year", 13),
            ("0 0 0 1 1", "expression", 10),
            ("? 0 0 1 1 ?", "second", 1),
        ],
    )
    def test_quartz_refuses_what_it_does_not_know(self, expression: str, field: str, column: int) -> None:
        with pytest.raises(TriggerInvalid) as refused:
            cron.parse(expression, Dialect.QUARTZ)
        assert (refused.value.field, refused.value.column) == (f"cron.{field}", column)

    def test_the_number_of_fields_never_decides_the_dialect(self) -> None:
        for dialect, expression in (
            (Dialect.UNIX, "0 * * * * *"),
            (Dialect.UNIX_SECONDS, "* * * * *"),
            (Dialect.QUARTZ, "* * * * *"),
        ):
            with pytest.raises(TriggerInvalid, match="fields"):
                cron.parse(expression, dialect)

    @pytest.mark.parametrize(
        ("expression", "field", "column"),
        [
            ("0 0 1,2,99 * *", "day_of_month", 9),
            ("0 5-77 * * *", "hour", 5),
            ("  0 0 * FOO *", "month", 9),
            ("0 0 * * MON,TUE,FUN", "day_of_week", 17),
            ("0 0 * * 1#0", "day_of_week", 11),
            ("0 0 L-31 * *", "day_of_month", 7),
            ("0 0 * * L", "day_of_week", 9),
            ("0 0/0 * * *", "hour", 5),
            ("0 0 *-5 * *", "day_of_month", 5),
            ("0 0 ?/2 * *", "day_of_month", 5),
        ],
    )
    def test_an_error_points_at_the_column(self, expression: str, field: str, column: int) -> None:
        with pytest.raises(TriggerInvalid) as refused:
            cron.parse(expression, Dialect.UNIX)
        assert (refused.value.field, refused.value.column) == (f"cron.{field}", column)

    def test_a_year_that_has_passed_is_not_searched_for_ever(self) -> None:
        past = compiled("0 0 0 1 1 ? 2020", dialect=Dialect.QUARTZ)
        assert past.next_after(at("2027-01-01T00:00:00")) is None
        with pytest.raises(TriggerNeverFires):
            compiled("0 0 0 29 2 ? 2027", dialect=Dialect.QUARTZ)

    def test_a_parsed_text_parses_to_itself(self) -> None:
        for text in ("0 9 * * mon-fri", "*/5 1,2 L-2 JAN,feb ?", "@weekly", "H(3-9) H/4 * * *"):
            parsed = cron.parse(text, Dialect.UNIX, "a-schedule")
            again = cron.parse(parsed.text, Dialect.UNIX)
            assert again == parsed


class TestClockChanges:
    """Berlin skips 02:00 to 03:00 on 2027-03-28 (01:00Z) and repeats it on 2027-10-31 (00:00Z and 01:00Z)."""

    @pytest.mark.parametrize(
        ("expression", "policy", "expected"),
        [
            ("30 2 * * *", DstGapPolicy.RUN_AT_GAP_END, ["03-28 01:00:00", "03-29 00:30:00"]),
            ("30 2 * * *", DstGapPolicy.SKIP, ["03-29 00:30:00"]),
            ("30 2 * * *", DstGapPolicy.RUN_SHIFTED, ["03-28 01:30:00", "03-29 00:30:00"]),
            ("10,50 2 * * *", DstGapPolicy.RUN_AT_GAP_END, ["03-28 01:00:00", "03-29 00:10:00"]),
            ("10,50 2 * * *", DstGapPolicy.RUN_SHIFTED, ["03-28 01:10:00", "03-28 01:50:00"]),
            ("0 2,3 * * *", DstGapPolicy.RUN_AT_GAP_END, ["03-28 01:00:00", "03-29 00:00:00"]),
            ("0 2,3 * * *", DstGapPolicy.RUN_SHIFTED, ["03-28 01:00:00", "03-29 00:00:00"]),
            ("30 2,3 * * *", DstGapPolicy.RUN_SHIFTED, ["03-28 01:30:00", "03-29 00:30:00"]),
            ("*/30 2 * * *", DstGapPolicy.RUN_AT_GAP_END, ["03-29 00:00:00", "03-29 00:30:00"]),
            ("*/30 2 * * *", DstGapPolicy.RUN_SHIFTED, ["03-29 00:00:00", "03-29 00:30:00"]),
            ("0 * * * *", DstGapPolicy.SKIP, ["03-28 00:00:00", "03-28 01:00:00"]),
        ],
    )
    def test_a_gap_is_met_as_the_policy_says(
        self, expression: str, policy: DstGapPolicy, expected: list[str]
    ) -> None:
        trigger = compiled(expression, "Europe/Berlin", dst_gap_policy=policy)
        assert instants(trigger, "2027-03-27T23:00:00", len(expected)) == expected

    @pytest.mark.parametrize(
        ("expression", "policy", "expected"),
        [
            ("30 2 * * *", DstOverlapPolicy.FIRST, ["10-31 00:30:00", "11-01 01:30:00"]),
            ("30 2 * * *", DstOverlapPolicy.SECOND, ["10-31 01:30:00", "11-01 01:30:00"]),
            ("30 2 * * *", DstOverlapPolicy.BOTH, ["10-31 00:30:00", "10-31 01:30:00", "11-01 01:30:00"]),
            ("0 1,3 * * *", DstOverlapPolicy.SECOND, ["10-30 23:00:00", "10-31 02:00:00"]),
            ("30 * * * *", DstOverlapPolicy.FIRST, ["10-30 23:30:00", "10-31 00:30:00", "10-31 01:30:00"]),
            ("*/30 2 * * *", DstOverlapPolicy.SECOND, ["10-31 00:00:00", "10-31 00:30:00", "10-31 01:00:00"]),
        ],
    )
    def test_an_overlap_is_met_as_the_policy_says(
        self, expression: str, policy: DstOverlapPolicy, expected: list[str]
    ) -> None:
        trigger = compiled(expression, "Europe/Berlin", dst_overlap_policy=policy)
        assert instants(trigger, "2027-10-30T22:59:00", len(expected)) == expected

    def test_an_interval_does_not_notice_clock_changes(self) -> None:
        anchor_us = at("2027-03-27T23:30:00")
        trigger = Trigger(interval=Interval(HOUR_US, anchor_us), time_zone="Europe/Berlin")
        found = triggers.compile(TriggerSet((trigger,))).between(anchor_us, NEVER_US, 100)
        assert set(np.diff(np.array(found)).tolist()) == {HOUR_US}


class TestBoundsAndExclusions:
    def test_the_start_is_included_and_the_end_is_not(self) -> None:
        trigger = Trigger(cron=Cron("0 0 * * *"))
        start_us, end_us = at("2027-01-02T00:00:00"), at("2027-01-04T00:00:00")
        found = triggers.compile(TriggerSet((trigger,), start_us=start_us, end_us=end_us))
        assert found.between(0, NEVER_US, 10) == [start_us, at("2027-01-03T00:00:00")]
        assert found.next_after(0) == start_us
        assert found.next_after(at("2027-01-03T00:00:00")) is None
        assert found.latest_between(0, NEVER_US, 1) == [at("2027-01-03T00:00:00")]
        bases = np.array([0, start_us, at("2027-01-03T00:00:00")], dtype=np.int64)
        assert found.next_after_many(bases).tolist() == [start_us, at("2027-01-03T00:00:00"), NEVER_US]

    def test_an_excluded_date_is_the_local_one(self) -> None:
        trigger = Trigger(cron=Cron("0 1 * * *"), time_zone="Asia/Tokyo")
        found = triggers.compile(TriggerSet((trigger,), frozenset({date(2027, 1, 2)})))
        # 01:00 in Tokyo is 16:00Z of the day before.
        assert instants(found, "2026-12-31T00:00:00", 2) == ["12-31 16:00:00", "01-02 16:00:00"]

    def test_calendar_dates_come_on_top(self) -> None:
        trigger_set = TriggerSet((Trigger(cron=Cron("0 9 * * *")),), frozenset({date(2027, 1, 1)}))
        found = triggers.compile(trigger_set, frozenset({date(2027, 1, 2)}))
        assert instants(found, "2026-12-31T12:00:00", 1) == ["01-03 09:00:00"]

    def test_several_triggers_that_agree_fire_once(self) -> None:
        both = TriggerSet((Trigger(cron=Cron("0 */2 * * *")), Trigger(cron=Cron("0 */3 * * *"))))
        found = instants(triggers.compile(both), "2027-01-01T00:00:00", 5)
        assert [text[6:8] for text in found] == ["02", "03", "04", "06", "08"]


class TestStoredForm:
    everything = TriggerSet(
        (
            Trigger(cron=Cron("0 9 * * MON", Dialect.UNIX), time_zone="Europe/Berlin"),
            Trigger(interval=Interval(60 * SECOND_US, 17), dst_gap_policy=DstGapPolicy.SKIP),
            Trigger(instants_us=(5 * SECOND_US, 9 * SECOND_US), dst_overlap_policy=DstOverlapPolicy.BOTH),
            Trigger(rrule=Rrule("DTSTART:20270101T000000\nRRULE:FREQ=DAILY"), time_zone="Asia/Tokyo"),
        ),
        frozenset({date(2027, 12, 25), date(2027, 1, 1)}),
        1_000_000,
        9_000_000_000_000_000,
        30_000_000,
    )

    def test_it_comes_back_as_it_was(self) -> None:
        data = canonical_bytes(self.everything)
        back = from_canonical(data)
        assert set(back.triggers) == set(self.everything.triggers)
        assert back.exclusions == self.everything.exclusions
        assert (back.start_us, back.end_us, back.jitter_us) == (1_000_000, 9_000_000_000_000_000, 30_000_000)
        assert canonical_bytes(back) == data
        ours, theirs = triggers.compile(self.everything), triggers.compile(back)
        assert ours.between(0, NEVER_US, 50) == theirs.between(0, NEVER_US, 50)

    def test_sets_that_say_the_same_have_one_identity(self) -> None:
        shuffled = TriggerSet(
            (
                self.everything.triggers[3],
                Trigger(
                    instants_us=(9 * SECOND_US, 5 * SECOND_US, 5 * SECOND_US),
                    dst_overlap_policy=DstOverlapPolicy.BOTH,
                ),
                self.everything.triggers[1],
                Trigger(cron=Cron(" 0 9  *\t* mon "), time_zone="Europe/Berlin"),
                self.everything.triggers[1],
            ),
            frozenset({date(2027, 1, 1), date(2027, 12, 25)}),
            1_000_000,
            9_000_000_000_000_000,
            30_000_000,
        )
        assert trigger_id(canonical_bytes(shuffled)) == trigger_id(canonical_bytes(self.everything))

    def test_every_field_is_part_of_the_identity(self) -> None:
        base = Trigger(cron=Cron("0 9 * * *"))
        variants = [
            TriggerSet((base,)),
            TriggerSet((base,), frozenset({date(2027, 1, 1)})),
            TriggerSet((base,), start_us=1),
            TriggerSet((base,), end_us=1),
            TriggerSet((base,), jitter_us=1),
            TriggerSet((Trigger(cron=Cron("0 8 * * *")),)),
            TriggerSet((Trigger(cron=Cron("0 9 * * *", Dialect.QUARTZ)),)),
            TriggerSet((Trigger(cron=Cron("0 9 * * *"), time_zone="Europe/Berlin"),)),
            TriggerSet((Trigger(cron=Cron("0 9 * * *"), dst_gap_policy=DstGapPolicy.SKIP),)),
            TriggerSet((Trigger(cron=Cron("0 9 * * *"), dst_overlap_policy=DstOverlapPolicy.BOTH),)),
            TriggerSet((Trigger(interval=Interval(SECOND_US, 1)),)),
            TriggerSet((Trigger(interval=Interval(SECOND_US, 2)),)),
        ]
        ids = {trigger_id(canonical_bytes(variant)) for variant in variants}
        assert len(ids) == len(variants)
        assert all(0 < found < 2**63 for found in ids)

    def test_the_form_is_stable(self) -> None:
        # A change of these bytes gives every stored trigger a new identity.
        assert canonical_bytes(TriggerSet((Trigger(cron=Cron("0 9 * * *"), time_zone="Europe/Berlin"),))) == (
            b'{"triggers":[{"cron":{"dialect":"UNIX","expression":"0 9 * * *"},"time_zone":"Europe/Berlin"}]}'
        )

    @pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"triggers":[{"cron":5}]}', b"\xff\xfe"])
    def test_bytes_that_are_no_trigger_are_refused(self, data: bytes) -> None:
        with pytest.raises(InvalidArgument):
            from_canonical(data)


class TestHashSpread:
    def hashed(self, expression: str, name: str) -> str:
        found = resolve_hash(TriggerSet((Trigger(cron=Cron(expression)),)), name).triggers[0].cron
        assert found is not None
        return found.expression

    def test_the_numbers_depend_on_the_name_only(self) -> None:
        assert self.hashed("H H * * *", "tenants/a/schedules/b") == self.hashed(
            "h h * * *", "tenants/a/schedules/b"
        )
        assert self.hashed("H H * * *", "tenants/a/schedules/b") != self.hashed(
            "H H * * *", "tenants/a/schedules/c"
        )

    def test_the_resolved_form_compiles_without_the_name(self) -> None:
        resolved = resolve_hash(TriggerSet((Trigger(cron=Cron("H H(1-5) H * H")),)), "nightly")
        assert "H" not in canonical_bytes(resolved).decode().replace("UNIX", "")
        triggers.compile(resolved)

    def test_many_names_spread_over_the_whole_field(self) -> None:
        minutes = [int(self.hashed("H 0 * * *", f"schedule-{i}").split()[0]) for i in range(6_000)]
        counts = np.bincount(minutes, minlength=60)
        assert counts.min() > 50
        assert counts.max() < 160
        days = {int(self.hashed("0 0 H * *", f"schedule-{i}").split()[2]) for i in range(1_000)}
        assert days == set(range(1, 29))

    def test_a_stepped_hash_keeps_its_step(self) -> None:
        for i in range(50):
            minute = self.hashed("H/15 * * * *", f"schedule-{i}").split()[0]
            parsed = cron.parse(f"{minute} * * * *", Dialect.UNIX)
            found = [value for value in range(60) if parsed.minute_mask >> value & 1]
            assert len(found) == 4
            assert set(np.diff(found).tolist()) == {15}

    def test_a_name_of_a_weekday_is_no_hash(self) -> None:
        assert self.hashed("0 0 * * THU", "x") == "0 0 * * THU"


class TestJitter:
    def offsets(
        self, jitter_us: int, next_us: int | None = None, count: int = 100_000
    ) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng(7)
        times = np.full(count, at("2027-01-01T00:00:00"), dtype=np.int64)
        following = np.full(count, NEVER_US if next_us is None else next_us, dtype=np.int64)
        high, low = (rng.integers(0, 2**64, count, dtype=np.uint64) for _ in range(2))
        return jitter_offsets_us(high, low, times, jitter_us, following)

    def test_a_midnight_is_spread_flat(self) -> None:
        found = self.offsets(60 * SECOND_US)
        assert found.min() >= 0
        assert found.max() < 60 * SECOND_US
        per_second = np.bincount(found // SECOND_US, minlength=60)
        assert per_second.max() <= 0.025 * len(found)
        assert per_second.min() >= 0.010 * len(found)

    def test_it_never_reaches_the_next_occurrence(self) -> None:
        midnight_us = at("2027-01-01T00:00:00")
        found = self.offsets(60 * SECOND_US, midnight_us + 10 * SECOND_US)
        assert found.max() < 10 * SECOND_US
        assert (self.offsets(60 * SECOND_US, midnight_us + 1) == 0).all()

    def test_the_same_occurrence_always_has_the_same_offset(self) -> None:
        one = np.array([1], dtype=np.uint64)
        when = np.array([at("2027-01-01T00:00:00")], dtype=np.int64)
        never = np.array([NEVER_US], dtype=np.int64)
        # A change of this number moves every jittered schedule, and splits old nodes from new ones.
        assert jitter_offsets_us(one, one, when, 60 * SECOND_US, never).tolist() == [JITTER_OF_ONE_US]
        other = jitter_offsets_us(one, one, when + 1, 60 * SECOND_US, never)
        assert other.tolist() != [JITTER_OF_ONE_US]

    def test_it_is_off_by_default(self) -> None:
        assert not self.offsets(0, count=10).any()


JITTER_OF_ONE_US = 23_218_221


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_of_many_triggers_is_answered_like_each_alone(seed: int) -> None:
    draw = random.Random(seed)
    members = [
        compiled(f"{draw.randrange(60)} {draw.choice(('*', '*/3', '5', '1,13'))} * * *", "Europe/Berlin")
        for _ in range(20)
    ]
    members.append(triggers.compile(TriggerSet((Trigger(interval=Interval(7 * SECOND_US, 3)),))))
    members.append(triggers.compile(TriggerSet((Trigger(instants_us=(at("2027-03-28T00:00:00"),)),))))
    index = np.array([draw.randrange(len(members)) for _ in range(2_000)], dtype=np.intp)
    bases = np.array(
        [at("2027-03-26T00:00:00") + draw.randrange(5 * 24 * HOUR_US) for _ in index], dtype=np.int64
    )
    found = triggers.next_after_grouped(members, index, bases).tolist()
    for member, base_us, found_us in zip(index.tolist(), bases.tolist(), found, strict=True):
        expected = members[member].next_after(base_us)
        assert found_us == (NEVER_US if expected is None else expected), seed


def test_empty_batches_are_answered() -> None:
    nothing = np.array([], dtype=np.int64)
    assert len(compiled("* * * * *").next_after_many(nothing)) == 0
    assert len(triggers.next_after_grouped([compiled("* * * * *")], nothing.astype(np.intp), nothing)) == 0


def month_shapes() -> list[tuple[int, int]]:
    """A year and month for each of the 28 shapes a month can have: its length and its first weekday."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for year in range(2000, 2028):
        for month in range(1, 13):
            weekday, length = calendar.monthrange(year, month)
            found.setdefault((length, weekday), (year, month))
    assert len(found) == 28
    return sorted(found.values())


@pytest.mark.parametrize(("year", "month"), month_shapes())
def test_every_day_rule_is_right_in_every_shape_of_month(year: int, month: int) -> None:
    first_weekday, length = calendar.monthrange(year, month)
    days = [date(year, month, day) for day in range(1, length + 1)]
    working = [day.day for day in days if day.isoweekday() < 6]

    def matching(day_field: str, weekday_field: str) -> list[int]:
        parsed = cron.parse(f"0 0 {day_field} * {weekday_field}", Dialect.UNIX)
        bits = parsed.day_bits(length, (first_weekday + 1) % 7)
        assert bits < 1 << (length + 1)
        assert bits & 1 == 0
        return [day for day in range(1, 32) if bits >> day & 1]

    for wanted in range(1, 32):
        nearest = [min(working, key=lambda day: abs(day - wanted))] if wanted <= length else []
        assert matching(f"{wanted}W", "*") == nearest
        assert matching(str(wanted), "*") == ([wanted] if wanted <= length else [])
        if wanted <= 30:
            assert matching(f"L-{wanted}", "*") == ([length - wanted] if wanted < length else [])
    assert matching("L", "*") == [length]
    assert matching("LW", "*") == [working[-1]]
    for weekday in range(7):
        found = [day.day for day in days if day.isoweekday() % 7 == weekday]
        assert matching("*", str(weekday)) == found
        assert matching("*", f"{weekday}L") == found[-1:]
        for nth in range(1, 6):
            assert matching("*", f"{weekday}#{nth}") == found[nth - 1 : nth]
