"""How our processes call each other: channels that come back soon after their peer does."""

import grpc

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
RECONNECT_BACKOFF_MS_MAX = 1_000

OPTIONS: tuple[tuple[str, int], ...] = (
    # Without it a peer that is back after 30 s is missed for 13 more.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`, kept for the whole life of its user; it connects when it is used.

    Made on the event loop that uses it.
    """
    if credentials is not None:
        return grpc.aio.secure_channel(address, credentials, options=OPTIONS)
    return grpc.aio.insecure_channel(address, options=OPTIONS)
