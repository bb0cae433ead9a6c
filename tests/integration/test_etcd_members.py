"""Several members, TLS, and what a call costs."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from pathlib import Path

import grpc
import pytest
from aetcd import rpc
from tests.integration.etcd_proxy import EtcdProxy
from tests.integration.etcd_world import TTL_MS, client_at, fresh_prefix, mono_us, node_at, until

from tickwheel.etcd.registry import EtcdRegistry
from tickwheel.ports import AssignmentWrite, RegistryUnavailable

pytestmark = pytest.mark.asyncio(loop_scope="session")

_EVERYTHING = ("Range", "Txn", "Watch", "LeaseKeepAlive", "LeaseGrant")


async def test_a_member_that_falls_silent_costs_neither_lease_nor_leadership(etcd_endpoint: str) -> None:
    async with (
        EtcdProxy(etcd_endpoint) as one,
        EtcdProxy(etcd_endpoint) as two,
        node_at(one.url, two.url, prefix=fresh_prefix()) as node,
    ):
        await until(lambda: node.election.term() is not None, 5, "a leader")
        await node.registration.wait_registered()
        lost: list[int] = []
        node.lease.on_loss(lambda: lost.append(mono_us()))
        term, lease_id = node.election.term(), node.lease.lease_id()
        silent, other = (one, two) if node.client.endpoint.url == one.url else (two, one)
        before = other.calls["LeaseKeepAlive"]
        silent.drop.update(_EVERYTHING)
        await until(lambda: other.calls["LeaseKeepAlive"] > before, 5, "keepalives through the other member")
        since = mono_us()
        await until(lambda: mono_us() - since > TTL_MS * 1_000, 10, "a whole TTL")
        assert not lost
        assert (node.election.term(), node.lease.lease_id()) == (term, lease_id)
        assert set((await node.registry.snapshot()).timers) == {node.node_id}


def _self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    """Give a certificate for 127.0.0.1 and its key, as PEM files."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    command = [
        "openssl",
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"),
        *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


async def test_tls_needs_the_right_authority(etcd_endpoint: str, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    other, _ = _self_signed(tmp_path, "other")
    certificate, key = _self_signed(tmp_path, "etcd")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    prefix = fresh_prefix()
    async with EtcdProxy(etcd_endpoint, credentials) as proxy:
        async with client_at(proxy.url, prefix=prefix, ca_file=str(certificate)) as client:
            response = await client.call("Range", rpc.RangeRequest(key=b"x"))
            assert response.header.revision > 0
        async with client_at(proxy.url, prefix=prefix, ca_file=str(other), call_attempts_max=1) as client:
            with pytest.raises(RegistryUnavailable, match=r"certificate|CERTIFICATE"):
                await client.call("Range", rpc.RangeRequest(key=b"x"))


async def test_a_proof_over_256_shards_is_a_matter_of_milliseconds(etcd_endpoint: str) -> None:
    async with node_at(f"http://{etcd_endpoint}", prefix=fresh_prefix()) as node:
        await until(lambda: node.election.term() is not None, 5, "a leader")
        term = node.election.term()
        assert term is not None
        registry: EtcdRegistry = node.registry
        started = time.perf_counter()
        await registry.assign(term, [AssignmentWrite(shard, "t", 1, 0, 0) for shard in range(256)])
        print(f"assign 256 shards: {(time.perf_counter() - started) * 1e3:.1f} ms")
        for name, call in (
            ("snapshot", registry.snapshot),
            ("prove", lambda: registry.prove("t", dict.fromkeys(range(256), 1), 0)),
        ):
            times = []
            for _ in range(50):
                started = time.perf_counter()
                await call()
                times.append((time.perf_counter() - started) * 1e3)
            print(f"{name}: median {statistics.median(times):.1f} ms, max {max(times):.1f} ms")
            assert statistics.median(times) < 100
