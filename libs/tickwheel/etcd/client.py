"""How do we talk to etcd? One channel for each endpoint, a deadline on every call, failover between them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio
import structlog
from aetcd import rpc

from tickwheel.ports import RegistryError, RegistryRefused, RegistryUnavailable

log = structlog.get_logger(__name__)

_MESSAGE_BYTES_MAX = 64 * 1024 * 1024
# etcd's servers answer more frequent pings (grpc-keepalive-min-time, 5 s) by closing the connection.
_PING_INTERVAL_MS = 10_000
_PING_TIMEOUT_MS = 3_000

# Each unary call with its service, and whether repeating it after a lost answer changes nothing.
_CALLS: Mapping[str, tuple[str, bool]] = {
    "Range": ("kv", True),
    "Txn": ("kv", False),
    "LeaseGrant": ("lease", False),
    "LeaseRevoke": ("lease", True),
    "LeaseTimeToLive": ("lease", True),
}


class LeaseNotFound(RegistryError):
    """The lease is gone; a new one must be granted.

    detail: the server's words.
    """

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(f"the lease is gone ({detail}); grant a new one and write its keys again")


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """How to reach etcd.

    endpoints: URLs such as `http://127.0.0.1:2379`, tried in turn; all http or all https.
    ca_file, cert_file, key_file: PEM; for https. user, password: for a cluster with authentication.
    call_timeout_ms: one attempt; call_attempts_max: attempts of a call that may be repeated.
    """

    endpoints: tuple[str, ...]
    prefix: str = "/tickwheel/"
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    call_timeout_ms: int = 1_000
    call_attempts_max: int = 3
    reconnect_backoff_ms_max: int = 1_000

    def __post_init__(self) -> None:
        schemes = {urlsplit(endpoint).scheme for endpoint in self.endpoints}
        if schemes not in ({"http"}, {"https"}):
            raise ValueError(f"etcd endpoints must be http:// or https:// URLs, all alike: {self.endpoints}")
        if not (self.prefix.startswith("/") and self.prefix.endswith("/")):
            raise ValueError(f"the etcd prefix must start and end with '/': {self.prefix!r}")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a client certificate needs both cert_file and key_file")
        if (self.user is None) != (self.password is None):
            raise ValueError("authentication needs both user and password")
        if not 0 < self.reconnect_backoff_ms_max <= 1_000:
            raise ValueError(f"reconnect_backoff_ms_max ({self.reconnect_backoff_ms_max}) must be 1 to 1000")
        if self.call_timeout_ms <= 0 or self.call_attempts_max <= 0:
            raise ValueError(
                f"call_timeout_ms ({self.call_timeout_ms}) and call_attempts_max ({self.call_attempts_max})"
                " must be positive"
            )


class Endpoint:
    """One member: its channel, for the whole life of the client, and the stubs on it."""

    def __init__(self, url: str, settings: EtcdSettings) -> None:
        self.url = url
        options = (
            ("grpc.initial_reconnect_backoff_ms", min(100, settings.reconnect_backoff_ms_max)),
            ("grpc.min_reconnect_backoff_ms", min(500, settings.reconnect_backoff_ms_max)),
            ("grpc.max_reconnect_backoff_ms", settings.reconnect_backoff_ms_max),
            ("grpc.keepalive_time_ms", _PING_INTERVAL_MS),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
            ("grpc.enable_http_proxy", 0),
        )
        target = urlsplit(url).netloc
        if urlsplit(url).scheme == "https":
            credentials = grpc.ssl_channel_credentials(
                _read(settings.ca_file), _read(settings.key_file), _read(settings.cert_file)
            )
            self.channel = grpc.aio.secure_channel(target, credentials, options=options)
        else:
            self.channel = grpc.aio.insecure_channel(target, options=options)
        self.kv: Any = rpc.KVStub(self.channel)
        self.lease: Any = rpc.LeaseStub(self.channel)
        self.watch: Any = rpc.WatchStub(self.channel)
        self.auth: Any = rpc.AuthStub(self.channel)


class EtcdClient:
    """Calls etcd; made inside the event loop that uses it, and closed there."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        # Clients that start together spread over the members.
        urls = random.sample(settings.endpoints, len(settings.endpoints))
        self._endpoints = [Endpoint(url, settings) for url in urls]
        self._current = 0
        self._token: str | None = None
        self._authentication = asyncio.Lock()

    async def close(self) -> None:
        """Close every channel; calls in flight end as unavailable."""
        for endpoint in self._endpoints:
            await endpoint.channel.close()

    @property
    def endpoint(self) -> Endpoint:
        """The member in use."""
        return self._endpoints[self._current]

    def fail_over(self, failed: Endpoint) -> None:
        """Turn to the next member, unless somebody did since `failed` was in use."""
        if failed is self.endpoint:
            self._current = (self._current + 1) % len(self._endpoints)

    def forget_token(self) -> None:
        """Authenticate afresh before the next call: the server does not know the token any more."""
        self._token = None

    async def call(self, name: str, request: Any, *, timeout_ms: int | None = None) -> Any:
        """Make a unary call and give its response.

        Raises RegistryUnavailable (nothing is known of its effect), RegistryRefused, LeaseNotFound.
        A call that is not idempotent is sent once.
        """
        service, idempotent = _CALLS[name]
        attempts = self.settings.call_attempts_max if idempotent else 1
        timeout_s = (timeout_ms or self.settings.call_timeout_ms) / 1_000
        reauthenticated = False
        while True:
            endpoint = self.endpoint
            token = await self._metadata()
            try:
                method = getattr(getattr(endpoint, service), name)
                response = await method(request, timeout=timeout_s, metadata=token)
                if response is not None:
                    return response
                # grpc.aio's answer to a response that ended without a message, or with one it cannot read.
                raise RegistryUnavailable(name, "INTERNAL", "the response was empty or unreadable")
            except grpc.aio.AioRpcError as error:
                if token_is_stale(error) and self.settings.user is not None and not reauthenticated:
                    reauthenticated = True  # refused before it was executed, so even a write may be repeated
                    self.forget_token()
                    continue
                translated = translate(name, error)
                if not isinstance(translated, RegistryUnavailable):
                    raise translated from error
                self.fail_over(endpoint)
                attempts -= 1
                if attempts <= 0:
                    raise translated from error

    async def open_stream(self, service: str, name: str) -> tuple[Endpoint, Any]:
        """Open `Watch` or `LeaseKeepAlive`; the member must have a leader, or it ends the stream itself."""
        endpoint = self.endpoint
        metadata = (*(await self._metadata()), ("hasleader", "true"))
        return endpoint, getattr(getattr(endpoint, service), name)(metadata=metadata)

    async def _metadata(self) -> tuple[tuple[str, str], ...]:
        if self.settings.user is None:
            return ()
        async with self._authentication:
            if self._token is None:
                self._token = await self._authenticate()
        return (("token", self._token),) if self._token else ()

    async def _authenticate(self) -> str:
        """Give a token, or "" where the cluster has authentication switched off."""
        request = rpc.AuthenticateRequest(name=self.settings.user, password=self.settings.password)
        for _ in range(self.settings.call_attempts_max):
            endpoint = self.endpoint
            try:
                response = await endpoint.auth.Authenticate(
                    request, timeout=self.settings.call_timeout_ms / 1_000
                )
                return str(response.token)
            except grpc.aio.AioRpcError as error:
                if "authentication is not enabled" in (error.details() or ""):
                    log.warning("etcd_authentication_is_off", user=self.settings.user)
                    return ""
                # A wrong password comes as INVALID_ARGUMENT.
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise RegistryRefused("Authenticate", error.code().name, error.details() or "") from error
                unavailable = translate("Authenticate", error)
                if not isinstance(unavailable, RegistryUnavailable):
                    raise unavailable from error
                self.fail_over(endpoint)
        raise unavailable


async def write(call: Any, request: Any) -> None:
    """Write to a stream. Raises RegistryUnavailable for one that ended meanwhile, and AioRpcError.

    grpc.aio answers a write on a stream that is over with asyncio's InvalidStateError, not with the
    stream's error.
    """
    try:
        await call.write(request)
    except asyncio.InvalidStateError as error:
        raise RegistryUnavailable("stream", "CANCELLED", str(error)) from error


def token_is_stale(error: grpc.aio.AioRpcError) -> bool:
    """Whether fresh authentication may cure this error."""
    details = error.details() or ""
    return error.code() is grpc.StatusCode.UNAUTHENTICATED or "revision of auth store is old" in details


def translate(call: str, error: grpc.aio.AioRpcError) -> RegistryError:
    """Give our error for a gRPC one: the one table of this adapter."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
        return LeaseNotFound(details)
    if code in _REFUSALS:
        return RegistryRefused(call, code.name, details)
    return RegistryUnavailable(call, code.name, details)


_REFUSALS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


def backoff_ms(failures: int, *, first_ms: int, max_ms: int) -> float:
    """Full jitter below an exponential ceiling; `failures` counts from 1."""
    ceiling = min(max_ms, first_ms * 2 ** min(failures - 1, 16))
    return random.uniform(ceiling / 2, ceiling)


def is_worth_a_line(failures: int) -> bool:
    """Whether this failure in a row is logged: the 1st, 2nd, 4th, 8th ... so an outage is a few lines."""
    return failures & (failures - 1) == 0


def prefix_end(prefix: str) -> bytes:
    """Give the first key after all keys that start with `prefix` (which ends in an ordinary character)."""
    encoded = prefix.encode()
    return encoded[:-1] + bytes([encoded[-1] + 1])


def range_op(key: str, *, prefix: bool = False) -> Any:
    """Read a key, or all keys below a prefix, in a transaction."""
    end = prefix_end(key) if prefix else b""
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode(), range_end=end))


def put_op(key: str, value: bytes, lease_id: int = 0) -> Any:
    """Write a key in a transaction."""
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key.encode(), value=value, lease=lease_id))


def delete_op(key: str) -> Any:
    """Delete a key in a transaction."""
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key.encode()))


def if_created_at(key: str, revision: int) -> Any:
    """Compare the revision at which a key was made; 0: it does not exist."""
    return rpc.Compare(
        key=key.encode(), target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=revision
    )


def if_modified_at(key: str, revision: int) -> Any:
    """Compare the revision at which a key was last written; 0: it does not exist."""
    return rpc.Compare(
        key=key.encode(), target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=revision
    )


def _read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
