"""Columns as binary Postgres arrays, from and to numpy, without an object a row.

A one-dimensional array on the wire is: dimensions (int32, 1), whether it has NULLs (int32), the type of
its elements (int32), length (int32), lower bound (int32, 1), then each element as its length (int32, -1
for NULL) and its bytes, big-endian. Fixed-width elements are therefore a numpy structured array of
(length, value), written and read in one go.

Parameters are `Column`s; `register` teaches a connection to send them as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format

_OIDS: Final = {
    "bool": (16, 1000),
    "bytea": (17, 1001),
    "int8": (20, 1016),
    "int2": (21, 1005),
    "int4": (23, 1007),
    "text": (25, 1009),
    "uuid": (2950, 2951),
}

_HEADER = np.dtype([("dims", ">i4"), ("nulls", ">i4"), ("oid", ">i4"), ("length", ">i4"), ("lower", ">i4")])
_INT2 = np.dtype([("n", ">i4"), ("v", ">i2")])
_INT4 = np.dtype([("n", ">i4"), ("v", ">i4")])
_INT8 = np.dtype([("n", ">i4"), ("v", ">i8")])
_BOOL = np.dtype([("n", ">i4"), ("v", "u1")])
_UUID = np.dtype([("n", ">i4"), ("hi", ">u8"), ("lo", ">u8")])

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Column:
    """An array parameter, already in Postgres' binary form."""

    array_oid: int
    wire: bytes


def _header(kind: str, length: int, nulls: bool = False) -> bytes:
    element_oid, _ = _OIDS[kind]
    if length == 0:
        return b"\0\0\0\0\0\0\0\0" + element_oid.to_bytes(4, "big")
    return np.array([(1, int(nulls), element_oid, length, 1)], dtype=_HEADER).tobytes()


def _fixed(kind: str, layout: np.dtype[Any], width: int, values: npt.ArrayLike) -> Column:
    source = np.asarray(values)
    rows = np.empty(len(source), dtype=layout)
    rows["n"] = width
    rows["v"] = source
    return Column(_OIDS[kind][1], _header(kind, len(source)) + rows.tobytes())


def int2(values: npt.ArrayLike) -> Column:
    return _fixed("int2", _INT2, 2, values)


def int4(values: npt.ArrayLike) -> Column:
    return _fixed("int4", _INT4, 4, values)


def int8(values: npt.ArrayLike) -> Column:
    return _fixed("int8", _INT8, 8, values)


def boolean(values: npt.ArrayLike) -> Column:
    return _fixed("bool", _BOOL, 1, np.asarray(values, dtype=np.uint8))


def uuid(hi: U64, lo: U64) -> Column:
    """Two columns of 64 bits: the first and the last eight bytes of each uuid, as numbers."""
    rows = np.empty(len(hi), dtype=_UUID)
    rows["n"] = 16
    rows["hi"] = hi
    rows["lo"] = lo
    return Column(_OIDS["uuid"][1], _header("uuid", len(rows)) + rows.tobytes())


def _variable(kind: str, values: Sequence[bytes | None]) -> Column:
    parts = [b""]
    nulls = False
    for value in values:
        if value is None:
            nulls = True
            parts.append(b"\xff\xff\xff\xff")
        else:
            parts.append(len(value).to_bytes(4, "big"))
            parts.append(value)
    parts[0] = _header(kind, len(values), nulls)
    return Column(_OIDS[kind][1], b"".join(parts))


def _all_null(kind: str, length: int) -> Column:
    return Column(_OIDS[kind][1], _header(kind, length, True) + b"\xff\xff\xff\xff" * length)


def bytea(values: Sequence[bytes | None]) -> Column:
    return _variable("bytea", values)


def bytea_nulls(length: int) -> Column:
    """`length` NULLs, at no cost a row."""
    return _all_null("bytea", length)


def text(values: Sequence[str | None]) -> Column:
    return _variable("text", [None if value is None else value.encode() for value in values])


def text_nulls(length: int) -> Column:
    return _all_null("text", length)


def _body(wire: bytes | None, layout: np.dtype[Any]) -> npt.NDArray[Any]:
    if wire is None or len(wire) < _HEADER.itemsize:
        return np.empty(0, dtype=layout)
    rows = np.frombuffer(wire, dtype=layout, offset=_HEADER.itemsize)
    assert wire[4:8] == b"\0\0\0\0", "an array read as a column has no NULLs"
    return rows


def read_int2(wire: bytes | None) -> npt.NDArray[np.int16]:
    return _body(wire, _INT2)["v"].astype(np.int16)


def read_int4(wire: bytes | None) -> npt.NDArray[np.int32]:
    return _body(wire, _INT4)["v"].astype(np.int32)


def read_int8(wire: bytes | None) -> I64:
    return _body(wire, _INT8)["v"].astype(np.int64)


def read_uuid(wire: bytes | None) -> tuple[U64, U64]:
    rows = _body(wire, _UUID)
    return rows["hi"].astype(np.uint64), rows["lo"].astype(np.uint64)


def split_uuid(value: bytes) -> tuple[int, int]:
    """The two halves of 16 bytes, as `uuid` takes them."""
    return int.from_bytes(value[:8], "big"), int.from_bytes(value[8:], "big")


def join_uuid(hi: int, lo: int) -> bytes:
    return hi.to_bytes(8, "big") + lo.to_bytes(8, "big")


class _ColumnDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: Any) -> Buffer | None:
        wire: bytes = obj.wire
        return wire

    def get_key(self, obj: Any, format: Any) -> Any:
        return (self.cls, obj.array_oid)

    def upgrade(self, obj: Any, format: Any) -> Dumper:
        dumper = _ColumnDumper(self.cls)
        dumper.oid = obj.array_oid
        return dumper


def register(context: AdaptContext) -> None:
    """Makes `Column` a parameter of this connection."""
    context.adapters.register_dumper(Column, _ColumnDumper)


# Tables that are small or new have no useful statistics: the plan of a batch is always a nested loop over its
# arrays, by index, and it is made once.
HOT_SESSION: Final = "; ".join(
    [f"SET enable_{path} = off" for path in ("hashjoin", "mergejoin", "seqscan", "bitmapscan", "material")]
    + ["SET plan_cache_mode = force_generic_plan", "SET jit = off"]
)


async def prepare_hot_connection(connection: psycopg.AsyncConnection[Any]) -> None:
    """Sets up a connection (autocommit) for batches of a timer."""
    register(connection)
    await connection.execute(HOT_SESSION)
