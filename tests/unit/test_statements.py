"""Named SQL is read as it is written."""

import pytest

from tickwheel.postgres import statements


def test_a_statement_ends_where_the_next_name_stands() -> None:
    text = "prose\n-- name: one\n-- A sentence with 100 %.\nSELECT 1\n\n-- name: two\nSELECT 2,\n       3\n"
    assert statements.parse(text) == {"one": "SELECT 1", "two": "SELECT 2,\n       3"}


@pytest.mark.parametrize("text", ["-- name: a\nSELECT 1\n-- name: a\nSELECT 2\n", "-- name: a\n-- nothing\n"])
def test_a_name_that_stands_twice_or_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="stands"):
        statements.parse(text)


def test_the_statements_of_timers_are_found_by_name() -> None:
    assert statements.load("timer.sql")["clock"].startswith("SELECT")
