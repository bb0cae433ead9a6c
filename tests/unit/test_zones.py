"""The zone tables against the standard library, and the names that are refused."""

from __future__ import annotations

import io
import pkgutil
import random
import zoneinfo
from datetime import UTC, datetime, timedelta

import pytest

from tickwheel.domain import zone as zones
from tickwheel.errors import TimeZoneUnknown

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NAMES = sorted(name for name in zones._names() if name != "Factory")
RANDOM_SEED = 20_261_129


def reference(name: str) -> zoneinfo.ZoneInfo:
    """The standard library's reading of the very same file."""
    data = pkgutil.get_data("tzdata", f"zoneinfo/{name}")
    assert data is not None
    return zoneinfo.ZoneInfo.from_file(io.BytesIO(data))


def changes(zone: zones.Zone, from_s: int, until_s: int) -> list[zones.Segment]:
    return [zone.segment(index) for index in range(zone.index_at(from_s) + 1, zone.index_at(until_s) + 1)]


def test_every_zone_has_the_offsets_of_the_standard_library_at_and_beside_each_change() -> None:
    draw = random.Random(RANDOM_SEED)
    checked = 0
    for name in NAMES:
        zone, standard = zones.zone(name), reference(name)
        instants = [draw.randrange(-(10**10), 3 * 10**10) for _ in range(20)]
        for segment in changes(zone, -(10**10), 2**32):
            instants += [segment.start_s - 1, segment.start_s]
        for instant_s in instants:
            offset = (EPOCH + timedelta(seconds=instant_s)).astimezone(standard).utcoffset()
            assert offset is not None
            assert zone.offset_at(instant_s) == offset.total_seconds(), (name, instant_s, RANDOM_SEED)
            checked += 1
    assert len(NAMES) > 500
    assert checked > 50_000


@pytest.mark.parametrize(
    "name", ["Europe/Berlin", "Australia/Lord_Howe", "Pacific/Apia", "Africa/Casablanca"]
)
def test_a_wall_time_has_no_instant_in_a_gap_and_two_in_an_overlap(name: str) -> None:
    zone = zones.zone(name)
    for segment in changes(zone, 1_200_000_000, 2_000_000_000):
        before_s = zone.offset_at(segment.start_s - 1)
        first_s, last_s = sorted((segment.start_s + before_s, segment.start_s + segment.offset_s))
        expected = 0 if segment.offset_s > before_s else 2
        assert len(zone.instants_of(first_s)) == expected
        assert len(zone.instants_of(last_s - 1)) == expected
        assert len(zone.instants_of(first_s - 1)) == len(zone.instants_of(last_s)) == 1
        assert segment.gap_size_s == max(0, segment.offset_s - before_s)


def test_no_zone_changes_again_within_the_width_of_a_change() -> None:
    # What lets a segment look at two neighbours only, and a search trust two days of distance.
    for name in NAMES:
        zone = zones.zone(name)
        for segment in changes(zone, -(10**10), 2**32):
            width_s = abs(segment.offset_s - zone.offset_at(segment.start_s - 1))
            assert width_s <= 86_400, (name, segment)
            assert segment.gap_size_s < segment.end_s - segment.start_s, (name, segment)


def test_a_date_that_a_zone_skipped_has_no_stretch() -> None:
    apia = zones.zone("Pacific/Apia")
    skipped = (datetime(2011, 12, 30) - datetime(1970, 1, 1)).days
    assert apia.day_stretches(skipped) == []
    assert [end - start for start, end in apia.day_stretches(skipped + 1)] == [86_400]


def test_the_rule_holds_to_the_end_of_the_calendar() -> None:
    berlin = zones.zone("Europe/Berlin")
    assert berlin.offset_at(int((datetime(9999, 7, 1, tzinfo=UTC) - EPOCH).total_seconds())) == 7_200
    assert berlin.offset_at(zones.INSTANT_S_MAX) == 3_600
    assert berlin.offset_at(2**60) == 3_600


NO_ZONES = [
    *("", "Mars/Olympus", "../../etc/passwd", "/etc/localtime", "America", "zone.tab", "tzdata.zi", "."),
    *("localtime", "posixrules", "right/UTC", "posix/UTC", "Factory", "Etc/Unknown", "__init__.py"),
    *("UTC\0", "Europe/Berlin ", "europe/berlin", "UTC+2", "Ünited", "A" * 10_000),
]


@pytest.mark.parametrize("name", NO_ZONES)
def test_a_name_that_is_no_zone_of_the_data_is_refused(name: str) -> None:
    with pytest.raises(TimeZoneUnknown) as refused:
        zones.zone(name)
    assert refused.value.field == "time_zone"
    assert len(str(refused.value)) < 300


def test_the_version_of_the_data_is_known() -> None:
    version = zones.tzdata_version()
    assert version[:4].isdigit()
    assert version >= "2024b"
