"""What clients ask for and hear, without protobuf; `wire.py` turns it into messages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from common.types import (
    EngineStatus,
    FinishReason,
    ModelInfo,
    Rule,
    SamplingParams,
    TokenOrigin,
    Tokens,
    TopLogprobs,
)

MAX_CHOICES = 32
"""The most texts that one request may ask for."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; the role is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that has been found good."""

    request_id: str
    model: ModelInfo
    prompt: Tokens
    sampling: SamplingParams
    stop_strings: tuple[str, ...] = ()
    lookahead: int = 0  # 0: no drafting
    priority: int = 0
    timeout_seconds: float | None = None
    explain: bool = False  # let the final event say what bounded the request
    output_prefix: Tokens = ()  # output that the client already has
    cache_scope: str = ""  # who may share cached prefixes; empty: all without a salt
    index: int = 0  # of the choice; sampling.seed is this choice's own


@dataclass(frozen=True, slots=True)
class Started:
    """How a request was taken; the first event, one for all choices."""

    request_id: str
    seed: int  # the first choice's; reproduces all texts under the coupled rule
    rule: Rule
    model: str
    weights_fingerprint: str
    num_prompt_tokens: int
    max_lookahead: int  # 0: no drafting
    n: int = 1  # choices
    num_prefix_tokens: int = 0  # output that the client already had; above 0: a resume


@dataclass(frozen=True, slots=True)
class Progress:
    """A request whose first choice has no text yet."""

    num_ahead: int  # requests that wait before this one
    num_prefilled: int


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of text and the tokens decided, one origin and text end for each token.

    `text_ends[i]` is how many characters of `text` are out once token i is in.
    """

    text: str
    token_ids: Tokens
    origins: tuple[TokenOrigin, ...]
    text_ends: tuple[int, ...]
    index: int = 0  # of the choice
    logprobs: tuple[float, ...] = ()  # of each token, if asked for
    top_logprobs: tuple[TopLogprobs, ...] = ()  # at each token, if asked for


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens."""

    prompt: int
    cached: int = 0
    delivered: int = 0
    discarded: int = 0  # decided beyond a stop string


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """What drafting did for one request, in draft tokens unless said."""

    steps: int = 0  # verdicts that brought tokens
    drafted: int = 0  # relayed to the target
    tested: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    stale: int = 0  # not tested
    undrafted_steps: int = 0  # steps that tested nothing


@dataclass(frozen=True, slots=True)
class GenerationTiming:
    """Where the time went: gateway's clock for the first two, the target's for the others."""

    total_seconds: float = 0.0
    time_to_first_token_seconds: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    steps_seconds: float = 0.0
    wire_seconds: float = 0.0
    gateway_seconds: float = 0.0


class Severity(Enum):
    """How grave a finding is."""

    NOTE = auto()  # how things are; changing it is a matter of choice
    LIMIT = auto()  # held the request back
    FAULT = auto()  # not as it should be


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that bounded a request."""

    kind: str  # a constant for programs
    severity: Severity
    what: str
    numbers: tuple[tuple[str, float], ...]  # what it was concluded from, by name
    setting: str  # what would change it


@dataclass(frozen=True, slots=True)
class Explanation:
    """What bounded a request; made by `explain.py`."""

    request_id: str
    summary: tuple[str, ...]  # a line for each thing worth knowing of any request
    findings: tuple[Finding, ...] = ()  # the gravest first


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a text that was not cut by an error; the last event of its choice."""

    reason: FinishReason
    usage: Usage
    speculation: SpeculationFigures
    timing: GenerationTiming
    stop: str = ""  # the stop string that ended the text
    explanation: Explanation | None = None  # if the request asked for it
    index: int = 0  # of the choice


Event = Started | Progress | Delta | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several texts for the same prompt."""

    index: int
    text: str
    token_ids: Tokens
    origins: tuple[TokenOrigin, ...]
    finished: Finished
    logprobs: tuple[float, ...] = ()  # of each token, if asked for
    top_logprobs: tuple[TopLogprobs, ...] = ()  # at each token, if asked for

    def __repr__(self) -> str:
        """Short: a whole one fills screens."""
        return f"Choice({self._told()})"

    def _told(self) -> str:
        spent = self.finished.speculation
        return (
            f"{self.text!r}, {self.finished.reason.name}, {len(self.token_ids)} tokens,"
            f" {spent.accepted}/{spent.tested} draft tokens accepted,"
            f" {self.finished.timing.total_seconds:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """The whole texts of a request; what is said of a text is said of the first."""

    started: Started
    choices: tuple[Choice, ...]  # by index, at least one

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.choices[0].text

    @property
    def token_ids(self) -> Tokens:
        """The first choice's."""
        return self.choices[0].token_ids

    @property
    def origins(self) -> tuple[TokenOrigin, ...]:
        """The first choice's."""
        return self.choices[0].origins

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The first choice's."""
        return self.choices[0].logprobs

    @property
    def top_logprobs(self) -> tuple[TopLogprobs, ...]:
        """The first choice's."""
        return self.choices[0].top_logprobs

    @property
    def finished(self) -> Finished:
        """The first choice's."""
        return self.choices[0].finished

    def __repr__(self) -> str:
        """Short: a whole one fills screens."""
        more = f", and {len(self.choices) - 1} more" if len(self.choices) > 1 else ""
        return f"Generation({self.choices[0]._told()}{more})"


class PeerKind(Enum):
    """What a peer does."""

    TARGET = auto()
    DRAFT = auto()


class PeerState(Enum):
    """How things stand with a peer."""

    CONNECTING = auto()
    READY = auto()
    DRAINING = auto()
    MISMATCHED = auto()


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """One target or draft, as the gateway sees it."""

    kind: PeerKind
    address: str
    state: PeerState
    detail: str = ""
    model: ModelInfo | None = None
    engine: EngineStatus | None = None
    round_trip_seconds: float | None = None
    num_sequences: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """The peers that there are for one model."""

    model: str
    num_targets: int  # ready
    num_drafts: int | None  # ready, and fitting; None: none is configured
    target_round_trip_seconds: float | None  # of the farthest
    draft_round_trip_seconds: float | None


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """The gateway and its peers."""

    version: str
    num_live_requests: int
    peers: tuple[PeerStatus, ...]
