"""The fixtures of the root conftest, which every integration test stands on."""

from __future__ import annotations

import urllib.request

import psycopg


def test_a_module_gets_an_empty_database_of_its_own(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        row = connection.execute(
            "SELECT current_database(), count(*) FROM pg_tables WHERE schemaname = 'public'"
        )
        database, tables = row.fetchone() or ("", -1)
    assert database.startswith("test_")
    assert tables == 0


def test_a_module_gets_a_migrated_database_of_its_own(migrated_url: str) -> None:
    with psycopg.connect(migrated_url) as connection:
        row = connection.execute("SELECT count(*) FROM shard").fetchone()
    assert row == (16,)


def test_an_etcd_answers(etcd_endpoint: str) -> None:
    with urllib.request.urlopen(f"http://{etcd_endpoint}/version", timeout=5) as answer:
        assert answer.status == 200
