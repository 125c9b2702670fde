"""The words of the house: what travels between gateway, draft and target.

Frozen dataclasses without torch or protobuf; `wire.py` turns them into messages. Lengths
and positions count tokens, the prompt's first token is position 0. Ids are non-negative
ints; durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.errors import InvalidRequestError, SequenceError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Tokens = tuple[int, ...]

GREEDY_BELOW = 1e-5
"""Temperatures below this decode greedily."""
MAX_LOGPROBS = 20
"""The most top tokens whose log probabilities can be had at each position."""


class Rule(Enum):
    """How a draft token is kept or dropped; none of them changes the law of the output."""

    GREEDY = auto()
    REJECTION = auto()
    COUPLED = auto()


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP_TOKEN = auto()
    STOP_STRING = auto()
    LENGTH = auto()


class TokenOrigin(Enum):
    """How a token was decided."""

    ACCEPTED = auto()
    RECOVERED = auto()
    BONUS = auto()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What shapes p, the distribution a token is decided from.

    Raises `InvalidRequestError` naming the field. A temperature below `GREEDY_BELOW` makes
    the rule GREEDY, whatever was asked for: there is nothing left to draw.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_tokens: int = 256
    stop_token_ids: Tokens = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    seed: int = 0  # 64 bits
    rule: Rule = Rule.COUPLED

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature < 1e6, "0 or more, finite")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p < 1, "at least 0, below 1")
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "1 or more")
        enough = 0 <= self.min_tokens <= self.max_tokens
        _check("min_tokens", self.min_tokens, enough, f"0 to {self.max_tokens}, max_tokens")
        repetition = self.repetition_penalty
        _check("repetition_penalty", repetition, 0 < repetition <= 10, "above 0, at most 10")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, value := getattr(self, name), -2 <= value <= 2, "-2 to 2")
        for token, bias in self.logit_bias:
            _check(f"logit_bias[{token}]", bias, -100 <= bias <= 100, "-100 to 100")
        if self.num_logprobs is not None:
            few = 0 <= self.num_logprobs <= MAX_LOGPROBS
            _check("num_logprobs", self.num_logprobs, few, f"0 to {MAX_LOGPROBS}")
        _check("seed", self.seed, 0 <= self.seed < 2**64, "an unsigned 64-bit number")
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "rule", Rule.GREEDY)
        elif self.rule is Rule.GREEDY:
            raise InvalidRequestError(
                "the greedy rule needs temperature 0; leave the rule out or set temperature 0",
                field="speculation.rule",
            )


def _check(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise InvalidRequestError(f"is {value}, must be {wanted}", field=f"sampling.{name}")


@dataclass(frozen=True, slots=True, eq=False)
class SparseDist:
    """q, exactly as a draft token was sampled from it: unique ids, probabilities summing to 1."""

    token_ids: IntArray
    probs: FloatArray


class ChainId(NamedTuple):
    """Orders the chains of one sequence; a larger one replaces a smaller one."""

    epoch: int  # set by the gateway, anew for every attachment of a draft
    serial: int  # set by the draft, grows whenever it draws anew


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Brings a sequence to a service."""

    sequence_id: int
    token_ids: Tokens  # prompt and what is already committed
    num_prompt: int
    sampling: SamplingParams
    lookahead: int = 0  # 0: no drafting
    priority: int = 0
    resumed: bool = False
    timeout_seconds: float | None = None
    cache_scope: str = ""
    traceparent: str = ""  # of the gateway's span for this sequence; empty: untraced
    fork_of: int = 0  # a sequence with the same prompt whose blocks to share; 0: none
    # Monotonic; set by the service that hears it, does not travel.
    arrived_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class CloseSequence:
    """Ends a sequence from outside; wins over anything that comes later."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """The next tokens of a chain."""

    sequence_id: int
    chain_id: ChainId
    base_len: int  # committed length that the chain starts from
    start: int  # absolute position of the first of token_ids
    token_ids: Tokens
    distributions: tuple[SparseDist, ...] = ()  # empty: a deterministic guess, q is one-hot
    traceparent: str = ""  # of the draft's span for the chain; empty: untraced
    held_seconds: float = 0.0  # from arrival of its cause in the draft to sending
    # Monotonic; set by the target, does not travel.
    arrived_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Commit:
    """A verdict, told to the draft."""

    sequence_id: int
    committed_len: int  # before token_ids
    token_ids: Tokens
    lookahead: int
    traceparent: str = ""  # the verdict's
    # Monotonic; set by the draft, does not travel.
    arrived_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class VerdictTiming:
    """Durations on the target's own clock."""

    queue_seconds: float = 0.0  # from arrival to the first step; on the first verdict
    prefill_seconds: float = 0.0  # from the first step to this decision; on the first verdict
    step_seconds: float = 0.0  # from the last decision to this one; on all but the first
    held_seconds: float = 0.0  # from arrival to sending this verdict
    told_seconds: float = 0.0  # from this decision to sending it
    waited_seconds: float = 0.0  # of step_seconds, spent waiting for draft tokens


class StaleCounts(NamedTuple):
    """Draft tokens that were dropped untested, by cause."""

    late: int = 0  # the target decided the same token before it could test this one
    diverged: int = 0  # differs from what was decided, or follows one that does
    superseded: int = 0  # of a chain that a newer one has replaced
    malformed: int = 0  # of a chain with a gap, an unknown token or no distribution
    finished: int = 0  # waited when the sequence ended


NONE_STALE = StaleCounts()


class TopLogprobs(NamedTuple):
    """The likeliest tokens at one position by the raw logits, the likeliest first."""

    token_ids: Tokens
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step decided for one sequence: of token_ids the first num_accepted were drafted."""

    sequence_id: int
    committed_len: int  # before the step
    num_tested: int
    num_accepted: int
    token_ids: Tokens
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    error: SequenceError | None = None
    lookahead: int = 0
    step_id: int = 0
    timing: VerdictTiming = VerdictTiming()
    num_stale: int = 0  # draft tokens dropped untested since the last verdict
    num_cached: int = 0  # prompt tokens out of the prefix cache, on the first verdict
    stale: StaleCounts = NONE_STALE  # num_stale by cause
    batch_size: int = 0  # sequences in the step
    num_preemptions: int = 0  # of this sequence, since the last verdict
    traceparent: str = ""  # of the target's span for this verdict; empty: untraced
    top_logprobs: tuple[TopLogprobs, ...] = ()  # one for each of token_ids, if asked for

    @property
    def ended(self) -> bool:
        """Whether nothing more will come for this sequence."""
        return self.finish_reason is not None or self.error is not None

    def origins(self) -> tuple[TokenOrigin, ...]:
        """How each of token_ids was decided."""
        recovered = self.num_tested > self.num_accepted
        return tuple(
            TokenOrigin.ACCEPTED
            if i < self.num_accepted
            else TokenOrigin.RECOVERED
            if recovered
            else TokenOrigin.BONUS
            for i in range(len(self.token_ids))
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """A sequence that has no verdict yet."""

    sequence_id: int
    num_ahead: int
    num_prefilled: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A draft does not serve this sequence, which goes on undrafted."""

    sequence_id: int
    error: SequenceError


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine's own thread says of itself."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_ignored: int = 0  # proposals, commits and closes that named an unknown sequence
    num_preemptions: int = 0  # ever
    num_cached_blocks: int = 0  # free ones that still hold a prefix


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Asks for an echo."""

    serial: int
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Draining:
    """The service is about to stop: open nothing more there."""

    grace_seconds: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Tells whether two services fit together."""

    name: str
    vocab_size: int = 0  # 0: a draft without a model, any fits
    tokenizer_fingerprint: str = ""  # empty: any fits
    weights_fingerprint: str = ""
    noise_version: str = ""
    row_invariant: bool = False
    eos_token_ids: Tokens = ()
    context_len: int = 0
    block_size: int = 0
    attention_backend: str = ""
    features: tuple[str, ...] = ()
    dtype: str = ""


TargetEvent = OpenSequence | Proposal | CloseSequence
DraftEvent = OpenSequence | Commit | CloseSequence


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One forward pass: for those who watch an engine."""

    step_id: int
    began: float  # monotonic seconds
    seconds: float  # until its tokens were decided or drawn
    num_sequences: int
    num_rows: int  # decoding, drafted and prompt rows together; a draft's: tokens drawn
    preempted: Tokens = ()  # sequences whose blocks were taken back
    num_sought: int = 0  # tokens of the sequences that were admitted
    num_found: int = 0  # of these, tokens that the prefix cache or a fork brought

    @property
    def ended(self) -> float:
        """When its tokens were decided or drawn, monotonic."""
        return self.began + self.seconds


class Cause(NamedTuple):
    """What an engine's word rests on: consumed proposals, or the latest commit or open."""

    arrived_at: float | None  # monotonic; of the first to arrive, None if there is none
    traceparents: tuple[str, ...] = ()  # of those that are traced


class Prefill(NamedTuple):
    """A draft has read a sequence's prompt."""

    sequence_id: int
    began: float  # monotonic seconds
    ended: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step of an engine has to say; sequence ids are the engine's own."""

    info: StepInfo | None = None  # None: there was nothing to run
    verdicts: tuple[Verdict, ...] = ()
    proposals: tuple[Proposal, ...] = ()
    progress: tuple[Progress, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    causes: Mapping[int, Cause] = field(default_factory=dict)  # of verdicts or proposals
    prefills: tuple[Prefill, ...] = ()  # a draft's; a target's are in its verdicts
    status: EngineStatus = field(default_factory=EngineStatus)
