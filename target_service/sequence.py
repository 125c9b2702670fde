"""One sequence in the target, and the chain of draft tokens that waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.types import ChainId, OpenSequence, Proposal, Rule, SamplingParams, SparseDist

SUM_TOLERANCE = 1e-9
"""How far the probabilities of q may be from summing to 1."""


class Draft(NamedTuple):
    """A draft token and the distribution it was drawn from; None: one-hot."""

    token: int
    dist: SparseDist | None = None


@dataclass
class Chain:
    """Draft tokens at consecutive positions that still continue the committed prefix.

    A dead chain stays until a larger id replaces it, so that its later pieces are known for
    what they are.
    """

    chain_id: ChainId
    end: int  # absolute position after the last token received
    drafts: list[Draft] = field(default_factory=list)  # from the committed length on
    alive: bool = True

    def kill(self) -> None:
        """Nothing of this chain is to be tested any more."""
        self.alive = False
        self.drafts.clear()


@dataclass(eq=False)
class Sequence:
    """The token stream of one request.

    Between steps of a running sequence `num_cached == len(tokens) - 1`, and its block table
    just covers that.
    """

    sid: int
    params: SamplingParams
    num_prompt: int
    tokens: list[int]  # committed: prompt and decided tokens; grown by the engine's commit
    max_len: int  # prompt and max_tokens, within the context; set at open
    lookahead: int
    priority: int
    stop_ids: frozenset[int]
    opened_at: float  # monotonic seconds
    started_at: float | None = None  # first step's start, set by the engine
    num_cached: int = 0  # tokens whose keys and values are in the cache
    chain: Chain | None = None
    num_received: int = 0  # draft tokens, ever
    num_tested: int = 0  # draft tokens, ever
    num_stale: int = 0  # draft tokens reported as stale, ever

    @classmethod
    def of(
        cls, o: OpenSequence, eos: tuple[int, ...], context_len: int, opened_at: float
    ) -> Sequence:
        """A sequence as it was opened; the engine has checked that it fits."""
        return cls(
            sid=o.sequence_id,
            params=o.sampling,
            num_prompt=o.num_prompt,
            tokens=list(o.token_ids),
            max_len=min(o.num_prompt + o.sampling.max_tokens, context_len),
            lookahead=o.lookahead,
            priority=o.priority,
            stop_ids=frozenset(o.sampling.stop_token_ids)
            | (frozenset() if o.sampling.ignore_eos else frozenset(eos)),
            opened_at=opened_at,
        )

    @property
    def num_missing(self) -> int:
        """Committed tokens that are not in the cache; 1 while decoding."""
        return len(self.tokens) - self.num_cached

    @property
    def decoding(self) -> bool:
        """Whether the next row decides a token."""
        return self.num_missing == 1

    def run_len(self) -> int:
        """How many waiting draft tokens are worth a row.

        A run of n can commit n + 1 tokens, so the last token that fits is never drafted.
        """
        if self.chain is None:
            return 0
        room = self.max_len - len(self.tokens) - 1
        return max(0, min(len(self.chain.drafts), self.lookahead, room))

    def offer(self, p: Proposal, vocab_size: int) -> None:
        """Take in a piece of a chain; what does not continue the committed prefix is dropped."""
        self.num_received += len(p.token_ids)
        if self.chain is None or p.chain_id > self.chain.chain_id:
            self.chain = Chain(p.chain_id, end=p.base_len)
            if p.base_len > len(self.tokens):
                self.chain.kill()
        chain = self.chain
        if p.chain_id < chain.chain_id or not chain.alive:
            return
        if p.start != chain.end or not self._well_formed(p, vocab_size):
            chain.kill()
            return
        chain.end += len(p.token_ids)
        num_decided = max(0, len(self.tokens) - p.start)  # of this piece, by the target alone
        decided = tuple(self.tokens[p.start : p.start + len(p.token_ids)])
        if decided != p.token_ids[:num_decided]:
            chain.kill()
            return
        dists = p.distributions or (None,) * len(p.token_ids)
        chain.drafts += list(map(Draft, p.token_ids, dists))[num_decided:]

    def late_draft(self, run: list[Draft]) -> Draft | None:
        """The last-row rule: a token for the position after a run may have come meanwhile."""
        if self.chain is None or not len(run) < min(len(self.chain.drafts), self.lookahead):
            return None
        ahead = self.chain.drafts[: len(run)]
        agrees = [d.token for d in ahead] == [d.token for d in run]
        return self.chain.drafts[len(run)] if agrees else None

    def settle(self, emitted: list[int]) -> None:
        """Append what a step decided, and drop what it settled from the chain."""
        self.tokens += emitted
        if (chain := self.chain) is None:
            return
        num = min(len(chain.drafts), len(emitted))
        if [d.token for d in chain.drafts[:num]] == emitted[:num]:
            del chain.drafts[:num]
        else:
            chain.kill()

    def take_stale(self) -> int:
        """Draft tokens that were dropped untested since the last call.

        Every token received is tested, waiting or stale.
        """
        waiting = len(self.chain.drafts) if self.chain else 0
        stale = self.num_received - self.num_tested - waiting
        fresh, self.num_stale = stale - self.num_stale, stale
        return fresh

    def _well_formed(self, p: Proposal, vocab_size: int) -> bool:
        """Whether every token can be tested; under REJECTION q is judged on all its support."""
        if not all(0 <= t < vocab_size for t in p.token_ids):
            return False
        if len(p.distributions) not in (0, len(p.token_ids)):
            return False
        if self.params.rule is not Rule.REJECTION or not p.distributions:
            return True
        return all(
            _is_distribution(d, vocab_size) and t in d.token_ids
            for d, t in zip(p.distributions, p.token_ids, strict=True)
        )


def _is_distribution(d: SparseDist, vocab_size: int) -> bool:
    ids, probs = d.token_ids, d.probs
    return bool(
        len(ids) == len(probs) > 0
        and len(np.unique(ids)) == len(ids)
        and ids.min() >= 0
        and ids.max() < vocab_size
        and np.isfinite(probs).all()
        and (probs > 0).all()
        and abs(probs.sum() - 1.0) <= SUM_TOLERANCE
    )
