"""What every handler needs of its call: who asks, under which request_id, and which page of what."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, TypeVar

import grpc
import msgspec
from google.protobuf.message import Message

from tickwheel.errors import FieldInvalid, PageTokenMismatch
from tickwheel.postgres.requests import Call
from tickwheel.rpc import convert
from tickwheel.runtime.telemetry import current_traceparent

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]

ANONYMOUS = "anonymous"
"""Who calls where nobody is asked for a key."""
PAGE_SIZE_DEFAULT = 50


def call_of(context: Context, tenant_id: int, method: str, request: Any) -> Call:
    """The call as mutations want it. The request's own `request_id` and `validate_only` count."""
    request_id = convert.request_id(request.request_id)
    return Call(
        tenant_id=tenant_id,
        principal=principal_of(context),
        method=method,
        request_id=request_id,
        request_hash=_hash_without_request_id(request) if request_id else b"",
        peer=context.peer(),
        validate_only=request.validate_only,
    )


def principal_of(context: Context) -> str:
    """Who calls. Until keys are asked for, everybody is the same."""
    return ANONYMOUS


def _hash_without_request_id(request: Any) -> bytes:
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("request_id")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).digest()


def traceparent_of(_context: Context) -> str | None:
    """The trace that what is made here belongs to: this call's, which goes on with the caller's."""
    return current_traceparent() or None


def page_size(asked: int, most: int) -> int:
    """What is asked for, within bounds; 0 is the default."""
    if asked < 0:
        raise FieldInvalid("page_size", f"{asked} is negative")
    return min(asked or PAGE_SIZE_DEFAULT, most)


class PageTokens:
    """Tokens of one query: a token is a cursor that only this query reads."""

    def __init__(self, *query: object) -> None:
        self._query = hashlib.sha256(msgspec.json.encode(query)).hexdigest()[:16]

    def write(self, cursor: tuple[int, bytes] | None) -> str:
        if cursor is None:
            return ""
        number, key = cursor
        body = msgspec.json.encode([self._query, number, key.hex()])
        return base64.urlsafe_b64encode(body).decode().rstrip("=")

    def read(self, token: str) -> tuple[int, bytes] | None:
        """Raises PageTokenMismatch."""
        if not token:
            return None
        try:
            body = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
            query, number, key = msgspec.json.decode(body, type=tuple[str, int, str])
            cursor = number, bytes.fromhex(key)
        except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
            raise PageTokenMismatch("page_token", "it is not one of ours; start without it") from error
        if query != self._query:
            raise PageTokenMismatch("page_token", "it belongs to another query; start without it")
        return cursor
