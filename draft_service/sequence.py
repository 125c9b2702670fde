"""One sequence in the draft: what the target has committed, and the chain ahead of it."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InternalFaultError
from common.types import ChainId, Commit, OpenSequence, Proposal, SamplingParams, SparseDist


@dataclass(eq=False)
class DraftSequence:
    """Committed tokens followed by the tokens of the current chain."""

    sid: int
    params: SamplingParams
    tokens: list[int]
    num_committed: int
    max_len: int  # prompt and max_tokens together
    lookahead: int  # set at open and by every commit
    serial: int = 0  # of the current chain
    base_len: int = 0  # committed length that the current chain starts from

    @classmethod
    def of(cls, o: OpenSequence) -> DraftSequence:
        """A sequence as it was opened, with an empty chain."""
        num = len(o.token_ids)
        max_len = o.num_prompt + o.sampling.max_tokens
        return cls(o.sequence_id, o.sampling, list(o.token_ids), num, max_len, o.lookahead, 0, num)

    @property
    def num_wanted(self) -> int:
        """How many more tokens to draw: within the lookahead, and never the text's last.

        The target decides one token by itself after a fully accepted run.
        """
        ahead = len(self.tokens) - self.num_committed
        return max(0, min(self.lookahead - ahead, self.max_len - 1 - len(self.tokens)))

    def commit(self, c: Commit) -> int:
        """Append what the target decided; returns how many tokens from the start still hold.

        A chain that agrees goes on. One that disagrees, or that the commit passes, is dropped:
        the next token drawn begins a new one.
        """
        if c.committed_len != self.num_committed:
            raise InternalFaultError(
                f"a commit at {c.committed_len} does not follow the {self.num_committed}"
                " tokens committed so far"
            )
        decided = list(c.token_ids)
        chain = self.tokens[self.num_committed :]
        self.lookahead = c.lookahead
        if chain[: len(decided)] == decided:
            self.num_committed += len(decided)
            return len(self.tokens)
        agreeing = (a == b for a, b in zip(chain, decided, strict=False))
        held = self.num_committed + next(
            (i for i, same in enumerate(agreeing) if not same), min(len(chain), len(decided))
        )
        self.tokens[self.num_committed :] = decided
        self.num_committed = self.base_len = len(self.tokens)
        self.serial += 1
        return held

    def extend(self, drawn: list[int], dists: tuple[SparseDist, ...] = ()) -> Proposal:
        """Append drawn tokens to the chain; returns the proposal that tells them."""
        start = len(self.tokens)
        self.tokens += drawn
        return Proposal(
            self.sid, ChainId(0, self.serial), self.base_len, start, tuple(drawn), dists
        )
