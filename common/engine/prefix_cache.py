"""Blocks that hold a prefix which another sequence may need again.

A full block of committed tokens is known by the hash of all tokens from the first of the text to
its own last one, and of the scope that the text belongs to: keys and values depend on the whole
prefix, so equal hashes mean equal contents. Hashes are chained block by block, as in vLLM's
automatic prefix caching; SGLang's radix tree (Zheng et al., SGLang: Efficient Execution of
Structured Language Model Programs, 2024, section 3) finds the same prefixes by the tokens
themselves. The hash is BLAKE2b with 256 bits: nobody finds two texts that share one, not even who
wants to read another's, so tokens need not be compared.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

_SIZE = 32


def root_of(scope: str) -> bytes:
    """What the first block's hash is chained to: texts of different scopes share nothing."""
    return blake2b(scope.encode(), digest_size=_SIZE, person=b"scope").digest()


def chained(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a block with these tokens that follows a text with the hash `parent`."""
    data = parent + array("q", token_ids).tobytes()
    return blake2b(data, digest_size=_SIZE, person=b"block").digest()


class PrefixCache:
    """Block ids by hash, one a hash; those that no sequence holds, least recently used first."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}  # the same, the other way round
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._hashes

    @property
    def idle(self) -> list[int]:
        """Cached blocks that no sequence holds, the next to be evicted first."""
        return list(self._idle)

    @property
    def num_idle(self) -> int:
        """How many those are."""
        return len(self._idle)

    def matches(self, hashes: Iterator[bytes]) -> Iterator[tuple[bytes, int]]:
        """Hashes and their blocks, up to the first that is not there."""
        for found in hashes:
            if (block := self._blocks.get(found)) is None:
                return
            yield found, block

    def add(self, hash_: bytes, block: int) -> None:
        """Make a block known; without effect if another has the same contents."""
        if self._blocks.setdefault(hash_, block) == block:
            self._hashes[block] = hash_

    def drop(self, block: int) -> None:
        """Its contents are about to change."""
        if (hash_ := self._hashes.pop(block, None)) is not None:
            del self._blocks[hash_]

    def retire(self, block: int) -> None:
        """No sequence holds a cached block any more."""
        self._idle[block] = None

    def revive(self, block: int) -> None:
        """A sequence holds it again."""
        del self._idle[block]

    def evict(self) -> int:
        """Forget the least recently used of the blocks that nobody holds; returns it."""
        block, _ = self._idle.popitem(last=False)
        self.drop(block)
        return block

    def check_integrity(self) -> None:
        """Raise AssertionError unless both directions agree and idle blocks are cached."""
        assert {b: h for h, b in self._blocks.items()} == self._hashes, "cache maps differ"
        assert set(self._idle) <= set(self._hashes), "an idle block is not cached"
