"""Which peer takes a sequence: the one that has its prompt's beginning, unless that is busy.

Pure: it is told how things stand and keeps nothing but where prompts have gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from common.types import Tokens
from gateway.types import PeerState

CHUNK_LEN = 64
"""Tokens that a prompt's beginning grows by, from key to key."""
MAX_CHUNKS = 64
"""Prompts that are equal for so many chunks are alike to the router."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer as it stands."""

    address: str
    state: PeerState
    load: int  # sequences that run or wait there
    fits: bool = True  # for this sequence


def overloaded(load: int, least: int) -> bool:
    """Whether a peer is too busy to be preferred for the prefixes that it has cached.

    Twice the least load, and some more where there is little of it: up to then a longer queue
    costs less than reading a prompt again.
    """
    return load > 2 * least + 4


def prefix_keys(scope: str, prompt: Tokens) -> list[int]:
    """A key for every beginning of whole chunks, the longest last; none for a short prompt.

    Prompts of different scopes, such as models or callers, share no blocks, so no key.
    """
    keys: list[int] = []
    key = hash(scope)
    for begin in range(0, min(len(prompt), MAX_CHUNKS * CHUNK_LEN) - CHUNK_LEN + 1, CHUNK_LEN):
        key = hash((key, prompt[begin : begin + CHUNK_LEN]))
        keys.append(key)
    return keys


class Router:
    """Remembers which prompts went where, the last `size` keys of them."""

    def __init__(self, size: int = 16_384) -> None:
        self._size = size
        self._places: OrderedDict[int, str] = OrderedDict()  # key -> address
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], keys: Sequence[int] = ()) -> str | None:
        """The address to open at, None if no candidate is ready and fits.

        The one with the longest known beginning, unless it is overloaded; else the least
        loaded, and of several these in turn.
        """
        usable = {c.address: c for c in candidates if c.fits and c.state is PeerState.READY}
        if not usable:
            return None
        least = min(c.load for c in usable.values())
        known = (self._places.get(key, "") for key in reversed(keys))
        chosen = next((address for address in known if address in usable), None)
        if chosen is None or overloaded(usable[chosen].load, least):
            idlest = [address for address, c in usable.items() if c.load == least]
            chosen = idlest[self._turn % len(idlest)]
            self._turn += 1
        self._remember(keys, chosen)
        return chosen

    def _remember(self, keys: Sequence[int], address: str) -> None:
        for key in keys:
            self._places[key] = address
            self._places.move_to_end(key)
        while len(self._places) > self._size:
            self._places.popitem(last=False)
