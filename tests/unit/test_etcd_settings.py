"""Settings of the etcd adapter that cannot work are refused where they are read."""

from __future__ import annotations

import pytest

from tickwheel.etcd.client import EtcdSettings


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoints": ()},
        {"endpoints": ("127.0.0.1:2379",)},
        {"endpoints": ("http://a:1", "https://b:1")},
        {"prefix": "tickwheel"},
        {"user": "only"},
        {"cert_file": "only"},
        {"reconnect_backoff_ms_max": 13_000},
        {"call_timeout_ms": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        EtcdSettings(**{"endpoints": ("http://a:1",), **wrong})  # type: ignore[arg-type]


def test_the_password_is_not_shown() -> None:
    assert "secret" not in repr(EtcdSettings(("http://a:1",), user="u", password="secret"))
