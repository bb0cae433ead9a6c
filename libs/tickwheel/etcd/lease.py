"""Does this node still hold its lease? One lease a node: its registration and its leadership hang on it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc.aio
import structlog
from aetcd import rpc

from tickwheel.etcd.client import (
    EtcdClient,
    LeaseNotFound,
    backoff_ms,
    is_worth_a_line,
    token_is_stale,
    translate,
    write,
)
from tickwheel.ports import RegistryRefused, RegistryUnavailable

log = structlog.get_logger(__name__)

_PAST_LEASES_MAX = 16


@dataclass(frozen=True, slots=True)
class LeaseTerm:
    """What a node may believe of its lease, as a pure value.

    granted_ttl_us: never exceeded. ttl_us: by the last answer.
    sent_at_mono_us: when the last *answered* request was sent, on this node's monotonic clock.
    margin_us: how much earlier than etcd the node gives up.
    """

    lease_id: int
    granted_ttl_us: int
    ttl_us: int
    sent_at_mono_us: int
    margin_us: int

    @property
    def trusted_until_mono_us(self) -> int:
        return self.sent_at_mono_us + self.ttl_us - self.margin_us

    def is_trusted(self, now_mono_us: int) -> bool:
        return now_mono_us < self.trusted_until_mono_us

    def renewed(self, sent_at_mono_us: int, answered_ttl_s: int) -> LeaseTerm | None:
        """Give the term after an answer, or None if the answer says that the lease is gone (TTL 0 or -1).

        A TTL above the granted one is a server's mistake: the granted one stands. A smaller one is believed.
        """
        if answered_ttl_s <= 0:
            return None
        ttl_us = min(self.granted_ttl_us, answered_ttl_s * 1_000_000)
        return replace(self, ttl_us=ttl_us, sent_at_mono_us=max(sent_at_mono_us, self.sent_at_mono_us))


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """ttl_ms: whole seconds, at least 2 (etcd's least); margin_ms: trust ends so much before etcd's."""

    ttl_ms: int = 3_000
    margin_ms: int = 500

    def __post_init__(self) -> None:
        if self.ttl_ms % 1_000 or self.ttl_ms < 2_000:
            raise ValueError(f"ttl_ms ({self.ttl_ms}) must be whole seconds and at least 2000")
        if not 0 < self.margin_ms * 3 <= self.ttl_ms:
            raise ValueError(
                f"margin_ms ({self.margin_ms}) must be positive and a third of ttl_ms ({self.ttl_ms})"
            )

    @property
    def renew_interval_ms(self) -> int:
        return self.ttl_ms // 3

    @property
    def answer_timeout_ms(self) -> int:
        """A renewal unanswered for so long is sent again on a new stream, well within a third of the TTL."""
        return self.ttl_ms // 6


class NodeLease:
    """The lease of this process: granted, kept, and granted anew when it is lost, while `run` runs."""

    def __init__(self, client: EtcdClient, settings: LeaseSettings, mono_us: Callable[[], int]) -> None:
        self.settings = settings
        self._client = client
        self._mono_us = mono_us
        self._term: LeaseTerm | None = None
        self._reported: int | None = None
        self._changed = asyncio.Event()
        self._doubted = asyncio.Event()
        self._loss_callbacks: list[Callable[[], None]] = []
        self._trust_timer: asyncio.TimerHandle | None = None
        self._past: deque[int] = deque(maxlen=_PAST_LEASES_MAX)

    def term(self) -> LeaseTerm | None:
        """The term, if it can be trusted at this moment."""
        term = self._term
        return term if term is not None and term.is_trusted(self._mono_us()) else None

    def lease_id(self) -> int | None:
        """The id of the lease, if it can be trusted at this moment."""
        term = self.term()
        return None if term is None else term.lease_id

    def is_mine(self, lease_id: int) -> bool:
        """Whether this process was ever granted that lease (of the last few)."""
        return lease_id in self._past

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop whenever trust in the lease ends."""
        self._loss_callbacks.append(callback)

    async def wait_for_change(self, known: int | None) -> int | None:
        """Wait until the trusted lease is another than `known`, and give its id (None: it is lost)."""
        while (current := self.lease_id()) == known:
            await self._changed.wait()
        return current

    def doubt(self, lease_id: int, reason: str) -> None:
        """Give the lease up: a key that hangs on it is gone, so its renewals prove nothing."""
        if self._term is not None and self._term.lease_id == lease_id:
            log.warning("etcd_lease_doubted", lease_id=f"{lease_id:x}", reason=reason)
            self._doubted.set()
            self._become(None)

    async def run(self) -> None:
        """Hold a lease until cancelled. Raises RegistryRefused."""
        failures = 0
        try:
            while True:
                try:
                    await self._grant()
                    failures = 0
                    await self._keep()
                except RegistryUnavailable as error:
                    failures += 1
                    log.warning("etcd_lease_not_granted", error=str(error), failures=failures)
                    await asyncio.sleep(backoff_ms(failures, first_ms=100, max_ms=1_000) / 1_000)
        finally:
            self._become(None)

    async def release(self) -> None:
        """Revoke the lease, so that its keys vanish now; for an orderly end, after `run` was cancelled."""
        if self._past:
            try:
                await self._client.call("LeaseRevoke", rpc.LeaseRevokeRequest(ID=self._past[-1]))
            except (LeaseNotFound, RegistryUnavailable, RegistryRefused) as error:
                log.info("etcd_lease_not_revoked", error=str(error))

    async def _grant(self) -> None:
        sent_at = self._mono_us()
        response = await self._client.call(
            "LeaseGrant", rpc.LeaseGrantRequest(TTL=self.settings.ttl_ms // 1_000)
        )
        ttl_us, margin_us = self.settings.ttl_ms * 1_000, self.settings.margin_ms * 1_000
        term = LeaseTerm(response.ID, ttl_us, ttl_us, sent_at, margin_us)
        self._past.append(term.lease_id)
        self._doubted.clear()
        self._become(term.renewed(sent_at, response.TTL))

    async def _keep(self) -> None:
        """Renew until etcd says that the lease is gone, or it was doubted."""
        failures = 0
        while self._term is not None:
            answered, reason = await self._keep_on_one_stream(self._term)
            failures = 1 if answered else failures + 1
            if self._term is not None:
                if is_worth_a_line(failures):
                    log.warning("etcd_keepalive_reopened", reason=reason, failures=failures)
                wait_ms = backoff_ms(
                    failures, first_ms=self.settings.ttl_ms // 48, max_ms=self.settings.ttl_ms // 12
                )
                await asyncio.sleep(wait_ms / 1_000)

    async def _keep_on_one_stream(self, term: LeaseTerm) -> tuple[bool, str]:
        """Renew on one stream until it fails us; give whether it ever answered, and why it ended."""
        answered = False
        endpoint = self._client.endpoint
        call = None
        try:
            endpoint, call = await self._client.open_stream("lease", "LeaseKeepAlive")
            while True:
                sent_at = self._mono_us()
                # Running into this timeout cancels the call; that is meant, for it is not used again.
                async with asyncio.timeout(self.settings.answer_timeout_ms / 1_000):
                    await write(call, rpc.LeaseKeepAliveRequest(ID=term.lease_id))
                    response = await call.read()
                if response is grpc.aio.EOF:
                    raise RegistryUnavailable("LeaseKeepAlive", "EOF", "the stream ended")
                if self._term is None:
                    return answered, "doubted"
                renewed = term.renewed(sent_at, response.TTL) if term.lease_id == response.ID else None
                if renewed is None:
                    log.warning("etcd_lease_lost", lease_id=f"{term.lease_id:x}", ttl_s=response.TTL)
                    self._become(None)
                    return answered, "lost"
                answered, term = True, renewed
                self._become(term)
                if await self._doubted_within(self.settings.renew_interval_ms, sent_at):
                    return answered, "doubted"
        except (TimeoutError, RegistryUnavailable, grpc.aio.AioRpcError) as error:
            self._client.fail_over(endpoint)
            return answered, self._reason(error)
        finally:
            if call is not None:
                call.cancel()

    def _reason(self, error: Exception) -> str:
        """Why a stream failed, in words. Raises RegistryRefused where another stream cannot help."""
        if not isinstance(error, grpc.aio.AioRpcError):
            return str(error) or "no answer in time"
        if token_is_stale(error):
            self._client.forget_token()
            return "the token is stale"
        translated = translate("LeaseKeepAlive", error)
        if isinstance(translated, RegistryRefused):
            raise translated from error
        return str(translated)

    async def _doubted_within(self, interval_ms: int, since_mono_us: int) -> bool:
        """Wait until it is time for the next renewal; give True at once when the lease is doubted."""
        wait_us = since_mono_us + interval_ms * 1_000 - self._mono_us()
        try:
            async with asyncio.timeout(max(0, wait_us) / 1e6):
                await self._doubted.wait()
            return True
        except TimeoutError:
            return False

    def _become(self, term: LeaseTerm | None) -> None:
        """Adopt a term, see to it that its end is noticed, and tell whoever waits."""
        self._term = term
        if self._trust_timer is not None:
            self._trust_timer.cancel()
            self._trust_timer = None
        if term is not None:
            wait_us = max(0, term.trusted_until_mono_us - self._mono_us())
            self._trust_timer = asyncio.get_running_loop().call_later(
                wait_us / 1e6, self._trust_may_have_ended
            )
        self._report()

    def _trust_may_have_ended(self) -> None:
        if self._term is not None:
            self._become(self._term) if self._term.is_trusted(self._mono_us()) else self._report()

    def _report(self) -> None:
        current = self.lease_id()
        if current == self._reported:
            return
        lost = self._reported is not None
        self._reported = current
        self._changed.set()
        self._changed = asyncio.Event()
        if lost:
            for callback in self._loss_callbacks:
                callback()
