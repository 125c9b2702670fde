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
)


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
    output_prefix: Tokens = ()  # what the client has of the text already, from another attempt
    cache_scope: str = ""  # whose prefix cache it may use
    index: int = 0  # which choice of the request; sampling.seed is the choice's own


@dataclass(frozen=True, slots=True)
class Started:
    """How a request was taken; the first event."""

    request_id: str
    seed: int  # reproduces the text under the coupled rule
    rule: Rule
    model: str
    weights_fingerprint: str
    num_prompt_tokens: int
    max_lookahead: int  # 0: no drafting


@dataclass(frozen=True, slots=True)
class Progress:
    """A request that has no text yet."""

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
    """The end of a text that was not cut by an error; the last event."""

    reason: FinishReason
    usage: Usage
    speculation: SpeculationFigures
    timing: GenerationTiming
    stop: str = ""  # the stop string that ended the text
    explanation: Explanation | None = None  # if the request asked for it


Event = Started | Progress | Delta | Finished


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole text."""

    text: str
    token_ids: Tokens
    origins: tuple[TokenOrigin, ...]
    started: Started
    finished: Finished

    def __repr__(self) -> str:
        """Short: a whole one fills screens."""
        spent = self.finished.speculation
        return (
            f"Generation({self.text!r}, {self.finished.reason.name}, {len(self.token_ids)} tokens,"
            f" {spent.accepted}/{spent.tested} draft tokens accepted,"
            f" {self.finished.timing.total_seconds:.2f} s)"
        )


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
