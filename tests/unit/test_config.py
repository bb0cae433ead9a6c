"""Settings: where they come from, their bounds, and the relations between them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tickwheel.runtime.config import (
    PROCESSES,
    CommonSettings,
    ConfigurationInvalid,
    CoordinatorSettings,
    TimerSettings,
    WorkerSettings,
    load_settings,
    settings_reference,
)

URL = "postgresql://somebody:secret@127.0.0.1/tickwheel"
UNITS = ("_ms", "_days", "_count", "_max", "_ratio")


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in os.environ:
        if name.startswith("TICKWHEEL_"):
            monkeypatch.delenv(name)


def problems(settings: type[CommonSettings], **overrides: object) -> str:
    with pytest.raises(ConfigurationInvalid) as caught:
        load_settings(settings, **overrides)
    return str(caught.value)


def test_the_defaults_hold_together() -> None:
    assert load_settings(CoordinatorSettings, postgres_url=URL).shard_count == 256
    assert load_settings(TimerSettings, postgres_url=URL).attempt_lease_ttl_ms == 10_000
    assert load_settings(WorkerSettings).queues == ("default",)


def test_what_is_missing_is_named_with_its_variable() -> None:
    assert "postgres_url is required: set TICKWHEEL_POSTGRES_URL" in problems(TimerSettings)


def test_all_faults_are_told_at_once() -> None:
    text = problems(TimerSettings, postgres_url=URL, listen_port=70_000, lookahead_bucket_count=0)
    assert "listen_port (70000)" in text
    assert "lookahead_bucket_count (0)" in text


def test_the_environment_wins_over_the_process_table_and_that_over_the_top_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tickwheel.toml"
    file.write_text(
        f'postgres_url = "{URL}"\nlisten_port = 1\nlog_level = "error"\nnode_name = "top"\nqueues = ["a"]\n'
        '[timer]\nlisten_port = 2\nlog_level = "warning"\n[worker]\ncapacity = 7\n'
    )
    monkeypatch.setenv("TICKWHEEL_CONFIG", str(file))
    monkeypatch.setenv("TICKWHEEL_LOG_LEVEL", "debug")
    timer = load_settings(TimerSettings)
    assert (timer.listen_port, timer.log_level, timer.node_name) == (2, "debug", "top")
    worker = load_settings(WorkerSettings)
    assert (worker.capacity, worker.queues, worker.log_level) == (7, ("a",), "debug")
    assert load_settings(TimerSettings, log_level="info").log_level == "info"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("listen_prt = 1", "there is no setting `listen_prt`"),
        ("[timer]\ncapacity = 1", "there is no setting `timer.capacity`"),
        ("[timr]\nlisten_port = 1", "there is no setting `timr.listen_port`"),
        ("listen_port = ", "TICKWHEEL_CONFIG"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str
) -> None:
    file = tmp_path / "tickwheel.toml"
    file.write_text(text)
    monkeypatch.setenv("TICKWHEEL_CONFIG", str(file))
    assert complaint in problems(TimerSettings, postgres_url=URL)


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TICKWHEEL_CONFIG", "/nowhere/tickwheel.toml")
    assert "/nowhere/tickwheel.toml" in problems(WorkerSettings)


def test_lists_have_commas_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TICKWHEEL_ETCD_ENDPOINTS", "http://a:1, http://b:2")
    assert load_settings(TimerSettings, postgres_url=URL).etcd_endpoints == ("http://a:1", "http://b:2")
    monkeypatch.setenv("TICKWHEEL_ETCD_ENDPOINTS", "http://a:1,https://b:2")
    assert "all http or all https" in problems(TimerSettings, postgres_url=URL)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"heartbeat_interval_ms": 3_334},
            "heartbeat_interval_ms * 3 (10002) must be at most attempt_lease_ttl_ms (10000)",
        ),
        (
            {"attempt_lease_ttl_ms": 6_000, "heartbeat_interval_ms": 1_000},
            "attempt_lease_ttl_ms (6000) must be more than etcd_lease_ttl_ms + takeover_ms_max (6000)",
        ),
        (
            {"etcd_call_timeout_ms": 3_000},
            "etcd_call_timeout_ms (3000) must be less than etcd_lease_ttl_ms (3000)",
        ),
        ({"seen_interval_ms": 3_000}, "seen_interval_ms (3000) must be less than etcd_lease_ttl_ms (3000)"),
        (
            {"full_sweep_interval_ms": 1_000},
            "sweep_after_ms (1000) must be less than full_sweep_interval_ms (1000)",
        ),
        ({"loop_lag_stuck_ms": 100}, "loop_lag_warning_ms (100) must be less than loop_lag_stuck_ms (100)"),
        (
            {"stream_queue_bytes_max": 1_048_576},
            "stream_message_bytes_max * 2 (2097152) must be at most stream_queue_bytes_max (1048576)",
        ),
        ({"etcd_cert_file": "a.pem"}, "etcd_cert_file (a.pem) and etcd_key_file (None) go together"),
        ({"etcd_user": "me"}, "etcd_user (me) and etcd_password go together"),
    ],
)
def test_a_relation_that_does_not_hold_is_told_with_both_values(
    overrides: dict[str, object], sentence: str
) -> None:
    assert sentence in problems(TimerSettings, postgres_url=URL, **overrides)


def test_no_secret_is_repeated() -> None:
    text = problems(TimerSettings, postgres_url=URL * 20, etcd_password=7, etcd_user="me")
    assert "postgres_url" in text
    assert "secret" not in text
    assert "(7)" not in text


@pytest.mark.parametrize("settings", PROCESSES)
def test_every_number_has_a_unit_bounds_and_a_meaning(settings: type[CommonSettings]) -> None:
    for name, field in settings.model_fields.items():
        assert field.description, name
        if field.annotation in (int, float) and not name.endswith("_port"):
            rules = " ".join(map(repr, field.metadata))
            assert re.search(r"Ge\(", rules), name
            assert re.search(r"Le\(", rules), name
            assert name.endswith(UNITS) or name in ("capacity", "threads", "page_count_max"), name


def test_the_reference_is_current() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "settings.md"
    assert page.read_text() == settings_reference(), "run `make docs`"
