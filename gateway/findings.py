"""What can bound a request: one function for each thing, all of them in `CHECKS`.

Each names the setting that would change what it found: flags such as `--lookahead` belong to
the service that is named with them; dotted names are fields of the request.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.metrics import parts
from gateway.records import RequestRecord
from gateway.types import Finding, Severity

ENOUGH = 20  # draft tokens, below which rates say little
A_PROMPT = 16  # tokens, below which reading is a step as any other
NOTICEABLE = 0.1  # of the whole time, or of all tokens
NOTICEABLE_SECONDS = 0.01


def _failed(r: RequestRecord) -> Finding | None:
    if r.ending == "error":
        return _fault("failed", f"it failed: {r.error}", {}, "see the error")
    if r.ending == "deadline":
        return _limit(
            "deadline",
            "its time was over before its text",
            {"total_seconds": r.timing.total_seconds},
            "the call's timeout, or sampling.max_tokens",
        )
    return None


def _moved(r: RequestRecord) -> Finding | None:
    if not r.num_moves:
        return None
    return _fault(
        "moved",
        f"its target was lost, full or stopped {r.num_moves} times, and another one went on;"
        f" {milliseconds(r.away_seconds)} without one",
        {"num_moves": r.num_moves, "away_seconds": r.away_seconds},
        "why the target went: its log, and `tandem status`; --silence-seconds and"
        " --failover-seconds of the gateway",
    )


def _no_draft(r: RequestRecord) -> Finding | None:
    if r.lookahead:
        return None
    setting = (
        "leave speculation.disabled unset and speculation.max_lookahead above 0"
        if r.has_draft
        else "--draft and --lookahead of the gateway"
    )
    return _note("no_draft", "it was not drafted", {"lookahead": 0}, setting)


def _draft_away(r: RequestRecord) -> Finding | None:
    total = r.timing.total_seconds
    if not r.lookahead or not _noticeable(r.undrafted_seconds, total):
        return None
    return _fault(
        "draft_away",
        f"no draft was at hand for {_share(r.undrafted_seconds, total)} of the time",
        {"undrafted_seconds": r.undrafted_seconds, "total_seconds": total},
        "--draft of the gateway; `tandem status` says what is wrong with it",
    )


def _draft_silent(r: RequestRecord) -> Finding | None:
    spent = r.speculation
    away = _noticeable(r.undrafted_seconds, r.timing.total_seconds)
    unasked = spent.undrafted_steps - r.num_paused_steps  # in these it was to speak
    if not r.lookahead or away or unasked < max(2.0, 0.5 * spent.steps):
        return None
    if r.num_chains >= 0.5 * unasked:
        return None  # it spoke often enough, if in vain
    return _limit(
        "draft_silent",
        f"{spent.undrafted_steps} of {spent.steps} steps tested nothing, and the draft began"
        f" {r.num_chains or 'no'} chain{'s' * (r.num_chains > 1)}",
        {
            "chains": r.num_chains,
            "drafted": spent.drafted,
            "steps": spent.steps,
            "undrafted_steps": spent.undrafted_steps,
        },
        "--drafter=model of the draft (tandem up: --draft MODEL), or a lower --min-ngram",
    )


def _paused(r: RequestRecord) -> Finding | None:
    spent, num = r.speculation, r.num_paused_steps
    if not r.lookahead or num < max(2.0, 0.5 * spent.steps):
        return None
    return _limit(
        "paused",
        f"drafting was paused in {num} of {spent.steps} steps, where it would have cost more time"
        " than it saves",
        {
            "paused_steps": num,
            "steps": spent.steps,
            "tested": spent.tested,
            "accepted": spent.accepted,
            "batch_size": r.mean_batch_size,
        },
        "--drafter or --model of the draft: one nearer to the target; more targets, so that fewer"
        " requests share a step",
    )


def _waited(r: RequestRecord) -> Finding | None:
    if not _noticeable(r.waited_seconds, r.timing.total_seconds):
        return None
    return _note(
        "waited",
        f"steps were held back {milliseconds(r.waited_seconds)} for draft tokens that were likely"
        " to save more",
        {"waited_seconds": r.waited_seconds, **_delays(r)},
        "--cores and --model of the draft: a faster one; or place it nearer",
    )


def _low_acceptance(r: RequestRecord) -> Finding | None:
    spent = r.speculation
    if spent.tested < ENOUGH or spent.accepted >= 0.5 * spent.tested:
        return None
    return _limit(
        "low_acceptance",
        f"the target kept {_share(spent.accepted, spent.tested)} of the draft tokens it tested",
        {"tested": spent.tested, "accepted": spent.accepted},
        "--drafter or --model of the draft: one nearer to the target; sampling.temperature lower",
    )


def _stale_late(r: RequestRecord) -> Finding | None:
    num, drafted = r.stale.late, r.speculation.drafted
    if drafted < ENOUGH or num < 0.2 * drafted:
        return None
    return _limit(
        "stale_late",
        f"{_share(num, drafted)} of the draft tokens were right but came too late",
        {"late": num, "drafted": drafted, **_delays(r)},
        "--cores and --model of the draft: a faster one; or place it nearer",
    )


def _stale_diverged(r: RequestRecord) -> Finding | None:
    num, drafted = r.stale.diverged, r.speculation.drafted
    if drafted < ENOUGH or num < 0.5 * drafted:
        return None
    return _note(
        "stale_diverged",
        f"{_share(num, drafted)} of the draft tokens were behind a wrong one",
        {"diverged": num, "drafted": drafted, "lookahead": r.lookahead},
        "speculation.max_lookahead, or --lookahead of the gateway: lower",
    )


def _stale_superseded(r: RequestRecord) -> Finding | None:
    num, drafted = r.stale.superseded, r.speculation.drafted
    if drafted < ENOUGH or num < 0.2 * drafted:
        return None
    return _note(
        "stale_superseded",
        f"{_share(num, drafted)} of the draft tokens gave way to a newer chain",
        {"superseded": num, "drafted": drafted},
        "whether the draft was restarted: `tandem status`, draft_available",
    )


def _stale_malformed(r: RequestRecord) -> Finding | None:
    if not r.stale.malformed:
        return None
    return _fault(
        "stale_malformed",
        f"{r.stale.malformed} draft tokens made no sense to the target",
        {"malformed": r.stale.malformed},
        "the draft's version: the same as the target's",
    )


def _lookahead_short(r: RequestRecord) -> Finding | None:
    spent = r.speculation
    runs = spent.steps - spent.undrafted_steps
    whole = spent.accepted_per_position[r.lookahead - 1 :] if r.lookahead else ()
    if spent.tested < ENOUGH or not whole or whole[0] < 0.3 * runs:
        return None
    return _limit(
        "lookahead_short",
        f"{_share(whole[0], runs)} of the runs were accepted to the end of the lookahead",
        {"lookahead": r.lookahead, "whole_runs": whole[0], "runs": runs},
        "speculation.max_lookahead, or --lookahead of the gateway: higher",
    )


def _round_trip(r: RequestRecord) -> Finding | None:
    """Within a round trip the target moves on by some tokens; a draft must be ahead of them."""
    spent, step = r.speculation, step_seconds(r)
    loop = (r.draft_turnaround_seconds or r.draft_round_trip_seconds or 0.0) + (
        r.target_round_trip_seconds or 0.0
    )
    if spent.tested < ENOUGH or step <= 0 or loop < 0.25 * step:
        return None
    needed = (r.usage.delivered + r.usage.discarded) / spent.steps * (1 + loop / step)
    if r.lookahead >= needed:
        return None
    return _limit(
        "round_trip",
        f"a round trip by the draft takes {loop / step:.1f} steps, in which a lookahead of"
        f" {r.lookahead} is used up",
        {"lookahead": r.lookahead, "lookahead_needed": needed, **_delays(r)},
        "speculation.max_lookahead, or --lookahead of the gateway: higher; or place the draft"
        " nearer",
    )


def _batch_mates(r: RequestRecord) -> Finding | None:
    if r.mean_batch_size < 4:
        return None
    return _note(
        "batch_mates",
        f"{r.mean_batch_size - 1:.1f} other requests shared its steps",
        {"mean_batch_size": r.mean_batch_size, "step_seconds": step_seconds(r)},
        "--max-running of the target: lower, so that others wait; or another target",
    )


def _queue(r: RequestRecord) -> Finding | None:
    return _long_part(
        r, "queue", "it waited to be admitted for", "--max-running or --num-kv-tokens of the"
        " target: higher; priority", NOTICEABLE,
    )  # fmt: skip


def _preempted(r: RequestRecord) -> Finding | None:
    if not r.num_preemptions:
        return None
    return _limit(
        "preempted",
        f"its blocks were taken back {r.num_preemptions} times, and computed again",
        {"num_preemptions": r.num_preemptions},
        "--num-kv-tokens of the target: higher; or --max-running: lower; priority",
    )


def _prefill(r: RequestRecord) -> Finding | None:
    if r.usage.prompt < A_PROMPT:
        return None
    return _long_part(
        r, "prefill", f"reading its {r.usage.prompt} prompt tokens took", "a shorter prompt, or"
        " --max-rows of the target: higher", 0.3,
    )  # fmt: skip


def _wire(r: RequestRecord) -> Finding | None:
    return _long_part(
        r, "wire", "messages between gateway and target took", "where gateway and target run:"
        " nearer to each other", NOTICEABLE,
    )  # fmt: skip


def _gateway(r: RequestRecord) -> Finding | None:
    return _long_part(
        r, "gateway", "the gateway itself, or a client that reads slowly, took",
        "--cores of the gateway: its own", NOTICEABLE,
    )  # fmt: skip


def _discarded(r: RequestRecord) -> Finding | None:
    discarded, decided = r.usage.discarded, r.usage.delivered + r.usage.discarded
    if r.ending != "stop_string" or discarded < 4 or discarded < NOTICEABLE * decided:
        return None
    return _note(
        "discarded",
        f"{_share(discarded, decided)} of the tokens were decided beyond the stop string",
        {"discarded": discarded, "decided": decided},
        "sampling.stop_token_ids, which end a text at once, in place of stop_strings",
    )


CHECKS: tuple[Callable[[RequestRecord], Finding | None], ...] = (
    _failed, _moved, _stale_malformed, _draft_away, _queue, _preempted, _wire, _gateway,
    _draft_silent, _paused, _low_acceptance, _stale_late, _round_trip, _lookahead_short, _prefill,
    _batch_mates, _waited, _stale_diverged, _stale_superseded, _discarded, _no_draft,
)  # fmt: skip


def _long_part(
    r: RequestRecord, part: str, words: str, setting: str, share: float
) -> Finding | None:
    seconds, total = parts(r)[part], r.timing.total_seconds
    if part == "gateway":
        seconds -= r.away_seconds  # `_moved` tells of that
    if not _noticeable(seconds, total, share):
        return None
    numbers = {f"{part}_seconds": seconds, "total_seconds": total}
    return _limit(
        part, f"{words} {milliseconds(seconds)}, {_share(seconds, total)}", numbers, setting
    )


def _noticeable(seconds: float, total: float, share: float = NOTICEABLE) -> bool:
    return seconds >= NOTICEABLE_SECONDS and seconds >= share * total


def step_seconds(r: RequestRecord) -> float:
    """From verdict to verdict, in the mean."""
    return r.timing.steps_seconds / max(1, r.speculation.steps - 1)


def _delays(r: RequestRecord) -> dict[str, float]:
    known = {
        "draft_turnaround_seconds": r.draft_turnaround_seconds,
        "draft_round_trip_seconds": r.draft_round_trip_seconds,
        "target_round_trip_seconds": r.target_round_trip_seconds,
        "step_seconds": step_seconds(r),
    }
    return {name: value for name, value in known.items() if value is not None}


def _finding(
    severity: Severity, kind: str, what: str, numbers: dict[str, float], setting: str
) -> Finding:
    return Finding(kind, severity, what, tuple(numbers.items()), setting)


def _note(kind: str, what: str, numbers: dict[str, float], setting: str) -> Finding:
    return _finding(Severity.NOTE, kind, what, numbers, setting)


def _limit(kind: str, what: str, numbers: dict[str, float], setting: str) -> Finding:
    return _finding(Severity.LIMIT, kind, what, numbers, setting)


def _fault(kind: str, what: str, numbers: dict[str, float], setting: str) -> Finding:
    return _finding(Severity.FAULT, kind, what, numbers, setting)


def ratio(a: float, b: float) -> float:
    """a over b, 0 if there is no b."""
    return a / b if b else 0.0


def _share(a: float, b: float) -> str:
    return f"{ratio(a, b):.0%}"


def milliseconds(seconds: float) -> str:
    """For people."""
    return f"{1000 * seconds:.0f} ms"
