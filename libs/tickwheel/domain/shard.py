"""Which shard a key hashes to, and how epochs and fences are packed.

epoch = incarnation (10 bits) | takings (25 bits); fence = epoch (35 bits) | grant (28 bits). So a fence
is higher than every one that the shard gave before: under the same epoch, an older epoch, or an older
incarnation. An owner takes its shard again before the 28 bits of its epoch are used up.
"""

from hashlib import blake2b
from typing import NewType

ShardId = NewType("ShardId", int)
Epoch = NewType("Epoch", int)
Fence = NewType("Fence", int)

EPOCH_TAKING_BITS = 25
FENCE_GRANT_BITS = 28
GRANTS_PER_EPOCH_MAX = (1 << FENCE_GRANT_BITS) - 1
INCARNATION_MAX = (1 << 10) - 1

SHARD_COUNT_DEFAULT = 256


def shard_of(tenant: str, key: bytes, spread: int, shard_count: int) -> ShardId:
    """The shard of `key` (a schedule's name, or random bytes for a direct run) of a tenant.

    The tenant's name picks the first of its `spread` neighbouring shards, the key picks one of these.
    """
    assert 1 <= spread <= shard_count
    first = int.from_bytes(blake2b(tenant.encode(), digest_size=8).digest(), "big")
    step = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") % spread
    return ShardId((first + step) % shard_count)


def first_epoch(incarnation: int) -> Epoch:
    """The epoch under which nothing was ever taken; the first taking makes it one more."""
    assert 0 <= incarnation <= INCARNATION_MAX
    return Epoch(incarnation << EPOCH_TAKING_BITS)


def first_fence(epoch: int) -> Fence:
    return Fence(epoch << FENCE_GRANT_BITS)
