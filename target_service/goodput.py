"""How many draft tokens are worth a row: the most tokens for the time that a step takes.

A drafted row costs time, and pays with the chance that it and all before it are kept. Chances
are estimated for each sequence from what was tested lately, times from the steps themselves.
Rows are taken in order of gain while the objective improves, none if none pays. (Liu et al.:
Optimizing Speculative Decoding for Serving Large Language Models Using Goodput, 2024; here a
lookahead is found for each sequence.)

None of this looks at a draft token's value, so a decision stays exact under every rule.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from enum import Enum
from typing import Protocol

import numpy as np

from common.types import FloatArray, IntArray
from target_service.cost import Shape, StepCost
from target_service.estimates import Acceptance
from target_service.sequence import Sequence

PROBE_EVERY = 8  # steps of a paused sequence until one draft token is asked for
CAUTION = 0.9  # a paused sequence's chance counts less, so that it doesn't flutter
LATE = 1.5  # a draft token this many times later than expected is not waited for any more


class Objective(Enum):
    """What drafted rows are to bring."""

    LATENCY = "latency"  # the least time per token, in the mean over requests
    THROUGHPUT = "throughput"  # the most tokens in a second, over all requests


class DraftPolicy(Protocol):
    """Decides how much is drafted. Sequences given are those that decide in a step."""

    def runs(self, seqs: Many[Sequence], shape: Shape) -> IntArray:
        """How many of each sequence's waiting draft tokens the next step tests. [S]

        shape is the step without them.
        """

    def tell(self, seqs: Many[Sequence]) -> None:
        """Set how far each one's draft may be ahead from now on; once a step, after it."""

    def tested(self, seq: Sequence, num_tested: int, num_accepted: int) -> None:
        """Learn how a step went for one of them."""

    def ran(self, shape: Shape, seconds: float) -> None:
        """Learn what a step has cost."""

    def hold_until(self, seq: Sequence) -> float:
        """Until when (monotonic) a step of this sequence alone should wait for draft tokens."""

    def num_prompt_rows(self, seconds: float, position: int) -> int:
        """How many rows of a prompt, from a position on, fit into so many seconds."""


class Fixed:
    """Tests whatever has arrived. See `DraftPolicy`."""

    def runs(self, seqs: Many[Sequence], shape: Shape) -> IntArray:
        """See `DraftPolicy`."""
        return np.array([seq.run_len() for seq in seqs], np.int64)

    def tell(self, seqs: Many[Sequence]) -> None:
        """See `DraftPolicy`."""

    def tested(self, seq: Sequence, num_tested: int, num_accepted: int) -> None:
        """See `DraftPolicy`."""

    def ran(self, shape: Shape, seconds: float) -> None:
        """See `DraftPolicy`."""

    def hold_until(self, seq: Sequence) -> float:
        """See `DraftPolicy`."""
        return 0.0

    def num_prompt_rows(self, seconds: float, position: int) -> int:
        """See `DraftPolicy`."""
        return 1 << 30


class Goodput:
    """Drafted rows only where they pay. See `DraftPolicy`."""

    def __init__(self, cost: StepCost, objective: Objective) -> None:
        self._cost = cost
        self._objective = objective
        self._everyone = Acceptance(memory=0.95)  # what a new sequence is expected to be like

    def runs(self, seqs: Many[Sequence], shape: Shape) -> IntArray:
        """See `DraftPolicy`."""
        caps = np.array([seq.run_len() for seq in seqs], np.int64)
        return self._best(seqs, caps, shape) if caps.any() else caps

    def tell(self, seqs: Many[Sequence]) -> None:
        """See `DraftPolicy`."""
        caps = np.array([min(seq.lookahead, seq.room) for seq in seqs], np.int64)
        if not caps.any():
            return
        shape = Shape(len(seqs), 0, float(sum(len(seq.tokens) for seq in seqs)))
        for seq, num in zip(seqs, self._best(seqs, caps, shape).tolist(), strict=True):
            seq.num_steps_untested += 1
            seq.num_wanted = num
            if num:  # one for the last row, and the next run while this one is tested
                seq.told_lookahead = min(seq.lookahead, 2 * num + 1)
            else:  # the last row tests one without a row of its own: probing costs the draft only
                probes = seq.acceptance.kept_last or seq.num_steps_untested >= PROBE_EVERY
                seq.told_lookahead = min(seq.lookahead, int(probes))

    def tested(self, seq: Sequence, num_tested: int, num_accepted: int) -> None:
        """See `DraftPolicy`."""
        if num_tested:
            seq.num_steps_untested = 0
            for acceptance in (seq.acceptance, self._everyone):
                acceptance.learn(num_tested, num_accepted)

    def ran(self, shape: Shape, seconds: float) -> None:
        """See `DraftPolicy`."""
        self._cost.observe(shape, seconds)

    def num_prompt_rows(self, seconds: float, position: int) -> int:
        """See `DraftPolicy`."""
        return self._cost.prompt_rows_within(seconds, position)

    def hold_until(self, seq: Sequence) -> float:
        """See `DraftPolicy`.

        Before the first draft token of a chain: stepping now instead decides one token, and
        lets the draft's first one be tested at the end of that step. So waiting gains a step
        where the draft token is kept, and is worth that chance times a step. After it, each
        further one is worth its own chance of being kept, at the tokens per second of a step.
        """
        arrivals, num = seq.arrivals, len(seq.chain.drafts) if seq.chain else 0
        if seq.decided_at is None or num >= min(seq.num_wanted, seq.room):
            return 0.0
        rate = float(self._rates([seq])[0])
        position = len(seq.tokens)
        step = float(self._cost.seconds(Shape(1 + num, 0, (1.0 + num) * position)))
        if num == 0:
            patience = arrivals.chance * rate * step
            expected = arrivals.turnaround
            if expected is None or expected > patience:
                return 0.0
            return seq.decided_at + min(LATE * expected, patience)
        if arrivals.spacing is None:
            return 0.0
        tokens = float(_expected(np.array([rate]), num)[0, -1])
        if arrivals.spacing * tokens / step > rate ** (num + 1):
            return 0.0
        return arrivals.last_at + LATE * arrivals.spacing

    def _rates(self, seqs: Many[Sequence]) -> FloatArray:
        """The chance that a draft token is kept once those before it are. [S]"""
        prior = self._everyone.rate(0.5)
        rates = [
            seq.acceptance.rate(prior) * (1.0 if seq.told_lookahead > 1 else CAUTION)
            for seq in seqs
        ]
        return np.array(rates, np.float64)

    def _best(self, seqs: Many[Sequence], caps: IntArray, shape: Shape) -> IntArray:
        """The numbers of drafted rows, at most caps [S], that serve the objective best. [S]"""
        num_tokens = _expected(self._rates(seqs), int(caps.max()))  # [S, J + 1]
        if self._objective is Objective.LATENCY:
            value, worth = -1.0 / num_tokens, -float(len(seqs))
        else:
            value, worth = num_tokens, float(len(seqs))
        gains = np.diff(value, axis=1)  # [S, J], falling along a row
        allowed = np.arange(gains.shape[1]) < caps[:, None]
        owners, _ = np.nonzero(allowed)
        order = np.argsort(-gains[allowed], kind="stable")
        owners = owners[order]
        contexts = np.array([len(seq.tokens) for seq in seqs], np.float64)
        taken = Shape(
            shape.rows + np.arange(len(order) + 1),
            shape.prompt_rows,
            shape.work + np.concatenate([[0.0], np.cumsum(contexts[owners])]),
        )
        totals = worth + np.concatenate([[0.0], np.cumsum(gains[allowed][order])])
        seconds = self._cost.seconds(taken)
        score = totals * seconds if self._objective is Objective.LATENCY else totals / seconds
        best: IntArray = np.bincount(owners[: int(np.argmax(score))], minlength=len(seqs))
        return best


def _expected(rates: FloatArray, longest: int) -> FloatArray:
    """Tokens that a run of 0, 1, ... longest draft tokens decides. [S] -> [S, longest + 1]"""
    tokens: FloatArray = np.cumsum(rates[:, None] ** np.arange(longest + 1), axis=1)
    return tokens
