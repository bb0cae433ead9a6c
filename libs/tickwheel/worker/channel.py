"""With which options does the worker open a channel?"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

MESSAGE_BYTES_MAX = 4 << 20

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # gRPC's own default is two minutes: a peer that is back after 30 s would be missed for 13 more.
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Two workers in one process must not share a connection's fate, nor one's limit on streams.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """credentials: TLS; None: plain text. metadata: sent with every call, such as an API key."""

    credentials: grpc.ChannelCredentials | None = None
    metadata: tuple[tuple[str, str], ...] = ()


def open_channel(address: str, options: ChannelOptions) -> grpc.aio.Channel:
    """A channel of the running loop. It connects when it is first used, and again whenever it must."""
    if options.credentials is not None:
        return grpc.aio.secure_channel(address, options.credentials, options=_OPTIONS)
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
