"""The embedded etcd, through everything that a development machine does to it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tickwheel.embedded.errors import BinaryMissing, FolderBusy, FolderUnusable, PortBusy
from tickwheel.embedded.etcd import EmbeddedEtcd
from tickwheel.embedded.folder import processes_in, wait_until


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="twe-", dir="/tmp"))
    yield path / "etcd"
    assert not processes_in(path / "etcd"), "the test left an etcd behind"
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def server(folder: Path) -> Iterator[EmbeddedEtcd]:
    server = EmbeddedEtcd(folder)
    try:
        yield server
    finally:
        server.stop()


def call(server: EmbeddedEtcd, method: str, **body: str) -> dict[str, object]:
    """Through etcd's JSON gateway, so that this test needs no client of ours."""
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in body.items()}
    request = urllib.request.Request(f"http://{server.endpoint}/v3/kv/{method}", json.dumps(encoded).encode())
    with urllib.request.urlopen(request, timeout=5) as answer:
        result: dict[str, object] = json.loads(answer.read())
    return result


def count(server: EmbeddedEtcd, key: str) -> int:
    return int(str(call(server, "range", key=key).get("count", 0)))


def test_data_and_endpoint_survive_a_restart(server: EmbeddedEtcd) -> None:
    server.start()
    endpoint = server.endpoint
    call(server, "put", key="a", value="1")
    server.restart()
    assert server.endpoint == endpoint
    assert count(server, "a") == 1


def test_data_survive_a_kill(server: EmbeddedEtcd) -> None:
    server.start()
    call(server, "put", key="a", value="1")
    server.kill9()
    assert server.exit_code == -signal.SIGKILL
    assert not server.ready()
    server.start()
    assert count(server, "a") == 1


def test_a_paused_one_answers_nothing_until_it_is_resumed(server: EmbeddedEtcd) -> None:
    server.start()
    server.pause()
    assert server.alive
    assert not server.ready()
    server.resume()
    assert wait_until(server.ready, 10)


def test_a_paused_one_can_be_stopped(server: EmbeddedEtcd) -> None:
    server.start()
    server.pause()
    server.stop()
    assert not server.alive


def test_a_second_owner_is_refused_at_once(server: EmbeddedEtcd, folder: Path) -> None:
    server.start()
    with pytest.raises(FolderBusy, match=f"process {os.getpid()}"):
        EmbeddedEtcd(folder).start()
    assert server.ready()


def test_what_a_killed_owner_left_running_is_stopped_first(server: EmbeddedEtcd, folder: Path) -> None:
    program = textwrap.dedent(f"""
        import os, signal
        from tickwheel.embedded.etcd import EmbeddedEtcd
        server = EmbeddedEtcd({str(folder)!r}).start()
        print(server.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    left_pid = int(answer.stdout)
    assert left_pid in processes_in(folder)
    server.start()
    assert left_pid not in processes_in(folder)
    assert server.ready()


def test_a_busy_port_is_named(folder: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortBusy, match=f"etcd cannot listen on 127.0.0.1:{port}"):
            EmbeddedEtcd(folder, port).start()


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(FolderUnusable, match="/proc/tickwheel"):
        EmbeddedEtcd("/proc/tickwheel").start()


def test_a_missing_binary_is_named(tmp_path: Path) -> None:
    with pytest.raises(BinaryMissing, match="etcd"):
        EmbeddedEtcd(tmp_path / "etcd", binary=tmp_path / "nothing").start()
