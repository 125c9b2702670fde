"""One request, made of the spans of its trace.

Times are seconds since the request's begin. `reading.py` makes these out of spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from common.types import TokenOrigin

PARTS = ("queue", "prefill", "steps", "wire", "gateway")


class Outcome(Enum):
    """How a request ended, as far as its spans tell."""

    RUNNING = "running"  # its root has not arrived
    FINISHED = "finished"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Token:
    """A decided token."""

    index: int  # among the known ones, from 0
    position: int  # absolute
    token_id: int
    origin: TokenOrigin
    round_index: int


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time on a lane."""

    begin: float
    end: float
    span_id: str = ""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Chain:
    """A `draft.propose` span: one chain of draft tokens."""

    bar: Bar
    index: int  # in order of time, over all drafts
    draft: int  # index into Request.drafts
    serial: int
    base_len: int
    start: int  # absolute position of the first token
    token_ids: tuple[int, ...]
    num_tokens: int
    held_seconds: float | None
    cause: int | None  # index of the round whose commit began it
    consumed_by: tuple[int, ...]  # indices of rounds

    def token_at(self, position: int) -> int | None:
        """The id at an absolute position."""
        place = position - self.start
        return self.token_ids[place] if 0 <= place < len(self.token_ids) else None


@dataclass(frozen=True, slots=True)
class Round:
    """A `target.verify` span: what one step decided for this request."""

    bar: Bar
    index: int  # in order of time, over all targets
    target: int  # index into Request.targets
    step_id: int
    batch_size: int
    num_rows: int
    committed_len: int
    num_tested: int
    num_accepted: int
    num_stale: int
    wait_seconds: float | None
    tokens: tuple[Token, ...]
    rejected: tuple[int | None, ...]  # ids of draft tokens tested in vain; None: not known
    chains: tuple[int, ...]  # indices of the chains that it consumed
    num_unresolved: int  # links to chains that are not here


@dataclass(frozen=True, slots=True)
class Attempt:
    """A sequence at a target or draft: the gateway's session and what the peer says of it."""

    index: int
    session: Bar | None
    sequence: Bar | None
    prefill: Bar | None
    num_prefilled: int
    address: str
    reason: str
    num_summed: int  # rounds without a span
    lost: bool
    shifted_seconds: float  # by which its clock was corrected for the picture


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts of the whole request, as the client was told them where the root is here."""

    tokens: int = 0  # decided: delivered and discarded
    delivered: int = 0
    discarded: int = 0
    prompt: int = 0
    cached: int = 0
    steps: int = 0
    undrafted_steps: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    stale: int = 0
    preemptions: int = 0
    summed: int = 0

    @property
    def rejected(self) -> int:
        """Draft tokens tested in vain."""
        return self.tested - self.accepted

    @property
    def acceptance(self) -> float | None:
        """Accepted of tested; None if none was tested."""
        return self.accepted / self.tested if self.tested else None


@dataclass(frozen=True, slots=True)
class Request:
    """All that a trace tells of one request."""

    trace_id: str
    request_id: str
    name: str
    model: str
    rule: str
    lookahead: int | None
    temperature: float | None
    outcome: Outcome
    detail: str  # finish reason or error
    began_at: float  # unix seconds
    seconds: float
    first_token: float | None
    figures: Figures
    parts: tuple[tuple[str, float], ...]  # those of PARTS that were measured
    targets: tuple[Attempt, ...]
    drafts: tuple[Attempt, ...]
    rounds: tuple[Round, ...]
    chains: tuple[Chain, ...]
    missing: tuple[str, ...] = ()  # spans that belong here and have not arrived
    notes: tuple[str, ...] = ()
    per_position: tuple[tuple[int, int], ...] = field(default=())  # (tested, accepted)

    @property
    def complete(self) -> bool:
        """Whether all its spans are here."""
        return self.outcome is not Outcome.RUNNING and not self.missing

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens whose ids are known, in order."""
        return tuple(token for r in self.rounds for token in r.tokens)

    @property
    def tokens_per_second(self) -> float | None:
        """Over the whole duration."""
        return self.figures.tokens / self.seconds if self.seconds > 0 else None

    @property
    def unexplained(self) -> float | None:
        """Seconds that no part accounts for (negative: parts overlap); None without parts."""
        return self.seconds - sum(s for _, s in self.parts) if self.parts else None


def busiest(rounds: Sequence[Round], size: int) -> slice:
    """The run of `size` rounds in which most was drafted and, of equals, most was rejected."""
    if len(rounds) <= size:
        return slice(0, len(rounds))

    def worth(begin: int) -> tuple[int, int, int]:
        run = rounds[begin : begin + size]
        tested = sum(r.num_tested for r in run)
        rejects = any(r.num_tested > r.num_accepted for r in run)
        return tested + size * rejects, tested, -begin

    begin = max(range(len(rounds) - size + 1), key=worth)
    return slice(begin, begin + size)
