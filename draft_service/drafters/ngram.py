"""Prompt lookup: repeat what followed the same words earlier in prompt or output.

Needs no model. Good where answers quote their prompt: edits, summaries, code. (Saxena:
Prompt Lookup Decoding, 2023.)
"""

from __future__ import annotations

from dataclasses import dataclass

from common.types import Commit, EngineStatus, OpenSequence, Proposal
from draft_service.sequence import DraftSequence


class NgramIndex:
    """Where in a growing text each run of min_n to max_n tokens was last continued."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)  # longest first
        self._continued_at: dict[tuple[int, ...], int] = {}
        self._num_read = 0

    def read(self, tokens: list[int]) -> None:
        """Take in the tokens that were appended to the text since the last call."""
        for i in range(max(1, self._num_read), len(tokens)):
            for n in self._sizes:
                if n <= i:
                    self._continued_at[tuple(tokens[i - n : i])] = i
        self._num_read = len(tokens)

    def find(self, tokens: list[int]) -> int | None:
        """Position of the token that last followed the longest known suffix of tokens."""
        for n in self._sizes:
            if n <= len(tokens) and (at := self._continued_at.get(tuple(tokens[-n:]))) is not None:
                return at
        return None


@dataclass(eq=False)
class _Entry:
    seq: DraftSequence
    index: NgramIndex  # over committed tokens only
    source: int | None = None  # position that the chain's next token repeats; None: no match


class NgramDrafter:
    """Looks a chain up in one go and sends it in one piece."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._min, self._max = min_ngram, max_ngram
        self._entries: dict[int, _Entry] = {}
        self._fresh: dict[int, _Entry] = {}  # those that may have something to draw

    def open(self, s: OpenSequence) -> None:
        """See `Drafter`."""
        entry = _Entry(DraftSequence.of(s), NgramIndex(self._min, self._max))
        self._entries[s.sequence_id] = entry
        self._look_up(entry)

    def commit(self, c: Commit) -> None:
        """See `Drafter`."""
        entry = self._entries[c.sequence_id]
        seq = entry.seq
        goes_on = seq.commit(c) == len(seq.tokens) and entry.source is not None
        if goes_on:
            self._fresh[seq.sid] = entry
        else:
            self._look_up(entry)

    def close(self, sid: int) -> None:
        """See `Drafter`."""
        del self._entries[sid]
        self._fresh.pop(sid, None)

    def step(self) -> list[Proposal]:
        """See `Drafter`."""
        fresh, self._fresh = self._fresh, {}
        return [p for entry in fresh.values() if (p := self._draw(entry)) is not None]

    def has_work(self) -> bool:
        """See `Drafter`."""
        return bool(self._fresh)

    def num_unread(self, sid: int) -> int:
        """See `Drafter`; they are indexed as they come."""
        return 0

    def status(self) -> EngineStatus:
        """See `Drafter`."""
        return EngineStatus(num_running=len(self._entries))

    def _look_up(self, entry: _Entry) -> None:
        """Find where to continue from; the chain is empty now."""
        entry.index.read(entry.seq.tokens)
        entry.source = entry.index.find(entry.seq.tokens)
        self._fresh[entry.seq.sid] = entry

    @staticmethod
    def _draw(entry: _Entry) -> Proposal | None:
        """Fill the lookahead from the source, which may run into the chain itself."""
        seq = entry.seq
        if entry.source is None or not seq.num_wanted:
            return None
        repeated = seq.tokens[entry.source :]
        num = seq.num_wanted
        drawn = (repeated * -(-num // len(repeated)))[:num]
        entry.source += num
        return seq.extend(drawn)
