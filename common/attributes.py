"""Every span and every attribute that Tandem writes: one registry.

Names follow OpenTelemetry's semantic conventions where there is one (`rpc.*`, `gen_ai.*`, in
the version of `SCHEMA_URL`) and begin with `tandem.` where there is not. The table in the docs
is made from this file, tests check every exported span against it, and the viewer reads what it
promises. Durations are float seconds on the clock of the process that wrote them; token ids are
lists of ints; there is no prompt text.

`python -m common.attributes` writes `TRACES.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PAGE = Path(__file__).with_name("TRACES.md")
SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"


class Kind(Enum):
    """Types of attribute values."""

    STRING = "string"
    INT = "int"
    FLOAT = "double"
    BOOL = "boolean"
    INTS = "int[]"
    STRINGS = "string[]"


@dataclass(frozen=True)
class Attribute:
    """One attribute of a span."""

    name: str
    kind: Kind
    meaning: str
    required: bool = True


@dataclass(frozen=True)
class Span:
    """One kind of span."""

    name: str  # "rpc" stands for the name of the RPC, such as tandem.v1.GatewayService/Generate
    service: str  # gateway, target or draft
    kind: str  # SERVER, CLIENT or INTERNAL
    parent: str  # name of the parent span; "caller" for what comes from outside
    meaning: str
    attributes: tuple[Attribute, ...]


def _string(name: str, meaning: str, required: bool = True) -> Attribute:
    return Attribute(name, Kind.STRING, meaning, required)


def _int(name: str, meaning: str, required: bool = True) -> Attribute:
    return Attribute(name, Kind.INT, meaning, required)


def _float(name: str, meaning: str, required: bool = True) -> Attribute:
    return Attribute(name, Kind.FLOAT, meaning, required)


# -- attributes that code names -----------------------------------------------------------

REQUEST_ID = _string("tandem.request.id", "the caller's name for the request, or the one chosen")
RULE = _string("tandem.rule", "how draft tokens are tested: greedy, rejection or coupled")
LOOKAHEAD = _int("tandem.lookahead", "how many uncommitted tokens a draft may be ahead")
SEQUENCE_ID = _int("tandem.sequence.id", "id of the attempt, by the service that wrote the span")
PEER = _string("tandem.peer.address", "where the gateway dials the peer")
REOPEN = _string(
    "tandem.session.reason",
    "why the session was opened: first, or a reason of sequence_reopens_total",
)
NUM_TESTED = _int("tandem.num_tested", "draft tokens tested, after a finish has cut the run")
NUM_ACCEPTED = _int("tandem.num_accepted", "draft tokens kept")
NUM_STALE = _int("tandem.num_stale", "draft tokens dropped untested")
NUM_DRAFTED = _int("tandem.num_drafted", "draft tokens relayed to the target")
NUM_STEPS = _int("tandem.num_steps", "steps that decided tokens")
NUM_UNDRAFTED = _int("tandem.num_undrafted_steps", "steps that tested nothing")
NUM_DELIVERED = _int("tandem.num_delivered", "tokens that the client got")
NUM_DISCARDED = _int("tandem.num_discarded", "tokens decided beyond a stop string")
NUM_PREEMPTIONS = _int("tandem.num_preemptions", "how often its blocks were taken back")
NUM_CACHED = _int("tandem.num_cached", "prompt tokens out of the prefix cache")
NUM_TOKENS = _int("tandem.num_tokens", "tokens in this span: read, drawn or committed")
COMMITTED_LEN = _int("tandem.committed_len", "committed length before this step")
TOKEN_IDS = Attribute("tandem.token_ids", Kind.INTS, "tokens committed or proposed, in order")
STEP_ID = _int("tandem.step.id", "number of the target's step")
BATCH_SIZE = _int("tandem.step.batch_size", "sequences in the step")
ROWS = _int("tandem.step.rows", "rows of the step over all sequences")
CHAIN_EPOCH = _int("tandem.chain.epoch", "which attachment of a draft the chain belongs to", False)
CHAIN_SERIAL = _int("tandem.chain.serial", "which chain of that attachment")
BASE_LEN = _int("tandem.chain.base_len", "committed length that the chain starts from")
START = _int("tandem.proposal.start", "absolute position of the first token")
WAITED = _float(
    "tandem.waited_seconds", "how long the step was held back for draft tokens, if it was", False
)
TOLD_LOOKAHEAD = _int(
    "tandem.told_lookahead", "how far the draft may be ahead from now on; 0: it pauses", False
)
QUEUE = _float("tandem.queue_seconds", "from arrival at the target to the first step")
PREFILL = _float("tandem.prefill_seconds", "from the first step to the first token")
STEPS = _float(
    "tandem.steps_seconds", "from the first decision to sending the last, pauses included"
)
WIRE = _float(
    "tandem.wire_seconds",
    "both ways on the wire: from sending what caused the peer's word to receiving it, less what"
    " the peer held; of a target's last verdict, of a draft's last chain",
    False,
)
GATEWAY = _float(
    "tandem.gateway_seconds",
    "in the gateway itself: before the target is told, and after its last verdict; when a target"
    " was lost, from its last verdict until another one was told",
)
PROPOSAL_WAIT = _float(
    "tandem.proposal.wait_seconds",
    "longest wait of a tested draft token in the target, from arrival to the step's begin",
    False,
)
HELD = _float(
    "tandem.held_seconds", "from the arrival of what caused this chain to its first sending", False
)
FINISH_REASON = _string(
    "tandem.finish_reason", "stop_token, stop_string or length; absent if it was cut short", False
)
SUMMED = _int(
    "tandem.num_rounds_summed", "rounds beyond 512, which have no span of their own", False
)

_RPC = (
    _string("rpc.system", "grpc"),
    _string("rpc.service", "full name of the service"),
    _string("rpc.method", "name of the method"),
    _int("rpc.grpc.status_code", "number of the status code that the client got"),
)
_GEN_AI = (
    _string("gen_ai.operation.name", "chat or text_completion"),
    _string("gen_ai.provider.name", "tandem"),
    _string("gen_ai.request.model", "what the client asked for", False),
    _string("gen_ai.response.model", "what answered", False),
    _float("gen_ai.request.temperature", "as asked for", False),
    _float("gen_ai.request.top_p", "as asked for", False),
    _float("gen_ai.request.top_k", "as asked for; a double by convention", False),
    _int("gen_ai.request.max_tokens", "as asked for, within the context", False),
    _int("gen_ai.request.seed", "as asked for or chosen; signed 64 bits", False),
    _int("gen_ai.usage.input_tokens", "length of the prompt", False),
    _int("gen_ai.usage.output_tokens", "tokens decided, delivered or not", False),
    Attribute("gen_ai.response.finish_reasons", Kind.STRINGS, "stop or length", False),
)


def _optional(*attributes: Attribute) -> tuple[Attribute, ...]:
    return tuple(Attribute(a.name, a.kind, a.meaning, required=False) for a in attributes)


_SUMS = _optional(
    NUM_STEPS, NUM_DRAFTED, NUM_TESTED, NUM_ACCEPTED, NUM_STALE, NUM_UNDRAFTED, FINISH_REASON
)

SPANS: tuple[Span, ...] = (
    Span(
        "rpc",
        "gateway",
        "SERVER",
        "caller",
        "a client's request, from its arrival to its last event",
        (
            *_RPC,
            *_GEN_AI,
            REQUEST_ID,
            *_optional(RULE, LOOKAHEAD, NUM_DELIVERED, NUM_DISCARDED),
            *_SUMS,
            *_optional(QUEUE, PREFILL, STEPS, WIRE, GATEWAY),
        ),
    ),
    Span(
        "target.session",
        "gateway",
        "CLIENT",
        "rpc",
        "a sequence open at a target; a failover shows as a second one",
        (PEER, SEQUENCE_ID, REOPEN, WIRE),
    ),
    Span(
        "draft.session",
        "gateway",
        "CLIENT",
        "rpc",
        "a sequence open at a draft; one more for each that takes its place",
        (PEER, SEQUENCE_ID, REOPEN, WIRE, *_optional(NUM_DRAFTED)),
    ),
    Span(
        "target.sequence",
        "target",
        "SERVER",
        "target.session",
        "the sequence in the target, from its arrival to its end",
        (
            SEQUENCE_ID,
            *_optional(
                QUEUE,
                PREFILL,
                STEPS,
                NUM_STEPS,
                NUM_TESTED,
                NUM_ACCEPTED,
                NUM_STALE,
                NUM_UNDRAFTED,
                NUM_CACHED,
                NUM_PREEMPTIONS,
                FINISH_REASON,
            ),
            SUMMED,
        ),
    ),
    Span(
        "target.prefill",
        "target",
        "INTERNAL",
        "target.sequence",
        "reading the prompt, from the first step to the first token",
        (NUM_TOKENS, NUM_CACHED),
    ),
    Span(
        "target.verify",
        "target",
        "INTERNAL",
        "target.sequence",
        "one step's decision for this sequence; links to the proposals it consumed",
        (
            STEP_ID,
            BATCH_SIZE,
            ROWS,
            COMMITTED_LEN,
            NUM_TESTED,
            NUM_ACCEPTED,
            NUM_STALE,
            TOKEN_IDS,
            PROPOSAL_WAIT,
            WAITED,
            TOLD_LOOKAHEAD,
        ),
    ),
    Span(
        "draft.sequence",
        "draft",
        "SERVER",
        "draft.session",
        "the sequence in the draft, from its arrival to its end",
        (SEQUENCE_ID, *_optional(NUM_DRAFTED), SUMMED),
    ),
    Span(
        "draft.prefill",
        "draft",
        "INTERNAL",
        "draft.sequence",
        "reading prompt and commits before the first guess",
        (NUM_TOKENS,),
    ),
    Span(
        "draft.propose",
        "draft",
        "INTERNAL",
        "draft.sequence",
        "one chain, from what caused it to its last token; links to the verify that began it",
        (CHAIN_SERIAL, BASE_LEN, START, NUM_TOKENS, TOKEN_IDS, HELD),
    ),
)

EVENTS: tuple[tuple[str, str], ...] = (
    ("tandem.first_token", "on the rpc span: the first token was decided"),
    ("tandem.cancelled", "on any span: the client is gone or has cancelled"),
    ("tandem.deadline", "on any span: the caller's time is over"),
    ("tandem.closed", "on target.sequence: closed by the gateway, or by the end of its stream"),
    ("tandem.preempted", "on target.sequence: its blocks were taken back"),
    ("tandem.draft_lost", "on draft.session: the draft is gone; the request goes on undrafted"),
    ("tandem.target_lost", "on target.session: the target is gone, or gives the sequence up"),
    ("tandem.moved", "on target.session: the sequence goes on at another target"),
)


def span(name: str, service: str) -> Span | None:
    """The registered span of a name that was exported by a service; None if there is none."""
    wanted = "rpc" if service == "gateway" and "/" in name else name
    return next((s for s in SPANS if s.name == wanted and s.service == service), None)


def table() -> Iterator[str]:
    """The registry as lines of markdown."""
    for s in SPANS:
        yield f"### `{s.name}` ({s.service}, {s.kind}, below `{s.parent}`)"
        yield ""
        yield s.meaning[0].upper() + s.meaning[1:] + "."
        yield ""
        yield "| attribute | type | meaning |"
        yield "|---|---|---|"
        for a in s.attributes:
            optional = "" if a.required else " (where known)"
            yield f"| `{a.name}` | {a.kind.value} | {a.meaning}{optional} |"
        yield ""
    yield "| event | meaning |"
    yield "|---|---|"
    for name, meaning in EVENTS:
        yield f"| `{name}` | {meaning} |"


def page() -> str:
    """What `TRACES.md` is to hold."""
    head = (
        "# Traces",
        "",
        "Every span and attribute that Tandem writes. Made from `attributes.py` by"
        " `python -m common.attributes`; names follow the semantic conventions of"
        f" {SCHEMA_URL} where there are any.",
        "",
    )
    return "\n".join((*head, *table())) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
