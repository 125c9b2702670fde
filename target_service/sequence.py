"""One sequence in the target, and the chain of draft tokens that waits for it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.engine.adjustments import Adjustments, end_ids_of
from common.types import (
    Cause,
    ChainId,
    OpenSequence,
    Proposal,
    Rule,
    SamplingParams,
    SparseDist,
    StaleCounts,
)
from target_service.estimates import Acceptance, Arrivals

SUM_TOLERANCE = 1e-9
"""How far the probabilities of q may be from summing to 1."""


class Draft(NamedTuple):
    """A draft token and the distribution it was drawn from; None: one-hot."""

    token: int
    dist: SparseDist | None = None
    arrived_at: float = 0.0  # its proposal's, like the next
    traceparent: str = ""


@dataclass
class Chain:
    """Draft tokens at consecutive positions that still continue the committed prefix.

    A dead chain stays until a larger id replaces it, so that its later pieces are known for
    what they are.
    """

    chain_id: ChainId
    end: int  # absolute position after the last token received
    drafts: list[Draft] = field(default_factory=list)  # from the committed length on
    cause: str = ""  # of its death, a field of `StaleCounts`; empty while it is alive

    @property
    def alive(self) -> bool:
        """Whether its tokens may still be tested."""
        return not self.cause

    def kill(self, cause: str) -> None:
        """Nothing of this chain is to be tested any more."""
        self.cause = cause
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
    lookahead: int  # the request's own; set at open
    told_lookahead: int  # what the draft may be ahead now; set by the draft policy
    priority: int
    stop_ids: frozenset[int]
    adjustments: Adjustments | None  # of its logits; follows `tokens`
    opened_at: float  # monotonic seconds, when the service heard of it
    started_at: float | None = None  # first step's start, set by the engine
    decided_at: float | None = None  # last decision, set by the engine
    num_cached: int = 0  # tokens whose keys and values are in the cache
    chain: Chain | None = None
    num_in_pass: int = 0  # first tokens of the chain that the step under way tests; scheduler's
    num_received: int = 0  # draft tokens, ever
    num_tested: int = 0  # draft tokens, ever; grown by the engine before `settle`
    num_stale: int = 0  # draft tokens found stale, ever
    num_preemptions: int = 0  # since the last verdict; grown by the scheduler
    deadline: float = math.inf  # monotonic; set at open
    num_wanted: int = 0  # draft tokens worth testing in a step; the draft policy's
    num_steps_untested: int = 0  # decisions since a draft token was tested; the draft policy's
    acceptance: Acceptance = field(default_factory=Acceptance)
    arrivals: Arrivals = field(default_factory=Arrivals)
    cache_scope: str = ""
    parent: Sequence | None = None  # to fork from; set by the engine, cleared by the scheduler
    fork_len: int = 0  # slots to take over from it; set by the scheduler
    queued_at: float | None = None  # by the scheduler's clock, as are the next; None: it runs
    waited_seconds: float = 0.0  # in the queue, before it was last queued
    seniority: int | None = None  # which admission its first one was
    num_found: int = 0  # tokens of the prompt that its first admission had not to read
    fresh_stale: Counter[str] = field(default_factory=Counter)  # since the last `take_stale`

    @classmethod
    def of(
        cls, o: OpenSequence, eos: tuple[int, ...], context_len: int, opened_at: float
    ) -> Sequence:
        """A sequence as it was opened; the engine has checked that it fits."""
        stop_ids = end_ids_of(o.sampling, eos)
        return cls(
            sid=o.sequence_id,
            params=o.sampling,
            num_prompt=o.num_prompt,
            tokens=list(o.token_ids),
            max_len=min(o.num_prompt + o.sampling.max_tokens, context_len),
            lookahead=o.lookahead,
            told_lookahead=o.lookahead,
            num_wanted=o.lookahead,
            priority=o.priority,
            stop_ids=stop_ids,
            adjustments=Adjustments.of(o.sampling, o.token_ids, o.num_prompt, stop_ids),
            opened_at=opened_at,
            deadline=math.inf if o.timeout_seconds is None else opened_at + o.timeout_seconds,
            cache_scope=o.cache_scope,
        )

    @property
    def num_missing(self) -> int:
        """Committed tokens that are not in the cache; 1 while decoding."""
        return len(self.tokens) - self.num_cached

    @property
    def decoding(self) -> bool:
        """Whether the next row decides a token."""
        return self.num_missing == 1

    @property
    def room(self) -> int:
        """How many draft tokens can be of use before the end."""
        return max(0, self.max_len - len(self.tokens) - 1)

    @property
    def wants_logprobs(self) -> bool:
        """Whether its tokens are told with their log probabilities."""
        return self.params.num_logprobs is not None

    def num_common(self, other: Sequence) -> int:
        """How many slots of another sequence's prompt this one could take over; 0: none.

        All but its own last token, which decides the next.
        """
        num = min(len(self.tokens) - 1, other.num_prompt)
        alike = self.cache_scope == other.cache_scope and self.tokens[:num] == other.tokens[:num]
        return num if alike else 0

    def run_len(self) -> int:
        """How many waiting draft tokens are worth a row.

        A run of n can commit n + 1 tokens, so the last token that fits is never drafted.
        """
        if self.chain is None:
            return 0
        return min(len(self.chain.drafts), self.lookahead, self.room)

    def offer(self, p: Proposal, vocab_size: int) -> None:
        """Take in a piece of a chain; what does not continue the committed prefix is dropped."""
        num = len(p.token_ids)
        self.num_received += num
        if self.chain is None or p.chain_id > self.chain.chain_id:
            self.kill_chain("superseded")
            self.chain = Chain(p.chain_id, end=p.base_len)
            if p.base_len > len(self.tokens):
                self.chain.kill("malformed")
        chain = self.chain
        if p.chain_id < chain.chain_id or not chain.alive:
            self._drop(chain.cause if p.chain_id == chain.chain_id else "superseded", num)
            return
        if p.start != chain.end or not self._well_formed(p, vocab_size):
            self.kill_chain("malformed")
            self._drop("malformed", num)
            return
        chain.end += num
        num_decided = max(0, len(self.tokens) - p.start)  # of this piece, by the target alone
        decided = self.tokens[p.start : p.start + num]
        num_late = _num_agreeing(decided, p.token_ids)
        self._drop("late", num_late)
        if num_late < len(decided):
            self.kill_chain("diverged")
            self._drop("diverged", num - num_late)
            return
        if num > num_decided and p.arrived_at:
            num_ahead = p.start - len(self.tokens)
            self.arrivals.arrived(
                p.arrived_at, self.decided_at, goes_on=0 < num_ahead < self.told_lookahead
            )
        dists = p.distributions or (None,) * num
        chain.drafts += [
            Draft(token, dist, p.arrived_at, p.traceparent)
            for token, dist in zip(p.token_ids, dists, strict=True)
        ][num_decided:]

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
        if self.adjustments is not None:
            self.adjustments.append(emitted)
        self.num_in_pass = 0
        if (chain := self.chain) is None:
            self.arrivals.decided(0)
            return
        num = min(len(chain.drafts), len(emitted))
        agrees = [d.token for d in chain.drafts[:num]] == emitted[:num]
        if agrees:
            del chain.drafts[:num]
        else:
            chain.kill("diverged")
        # Every token received is tested, waiting or stale. What is none of the three yet left
        # untested with this step: behind a rejected one or, where all agree, without a row.
        lost = self.num_received - self.num_tested - len(chain.drafts) - self.num_stale
        num_late = min(lost, num) if agrees else 0
        self._drop("late", num_late)
        self._drop("diverged", lost - num_late)
        self.arrivals.decided(len(chain.drafts))

    def kill_chain(self, cause: str) -> None:
        """Drop what waits, but for what the step under way tests: `settle` accounts for that."""
        if self.chain is not None:
            self._drop(cause, len(self.chain.drafts) - self.num_in_pass)
            self.num_in_pass = 0
            self.chain.kill(self.chain.cause or cause)

    def abandon(self) -> StaleCounts:
        """No more is decided: what waits, and what the pass was to test, is stale; `take_stale`."""
        self._drop("finished", self.num_received - self.num_tested - self.num_stale)
        self.num_in_pass = 0
        if self.chain is not None:
            self.chain.kill(self.chain.cause or "finished")
        return self.take_stale()

    def take_stale(self) -> StaleCounts:
        """Draft tokens that were dropped untested since the last call, by cause."""
        fresh, self.fresh_stale = self.fresh_stale, Counter()
        return StaleCounts(**fresh)

    def _drop(self, cause: str, num: int) -> None:
        self.num_stale += num
        self.fresh_stale[cause] += num

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


def cause_of(tested: list[Draft]) -> Cause:
    """The proposals that a step consumed."""
    if not tested:
        return Cause(None)
    traceparents = dict.fromkeys(d.traceparent for d in tested if d.traceparent)
    return Cause(min(d.arrived_at for d in tested), tuple(traceparents))


def _num_agreeing(decided: list[int], guessed: tuple[int, ...]) -> int:
    pairs = enumerate(zip(decided, guessed, strict=False))
    return next((i for i, (a, b) in pairs if a != b), len(decided))


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
