"""What the page's picture is drawn from, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.tracing.model import Attempt, Bar, Chain, Request, Round, busiest
from gateway.tracing.words import RoundText

WINDOW_ROUNDS = 10


def picture(request: Request, texts: Sequence[RoundText]) -> dict[str, Any]:
    """Lanes, rounds and chains, and the window to begin with: the busiest rounds."""
    window = request.rounds[busiest(request.rounds, WINDOW_ROUNDS)]
    begin, end = 0.0, request.seconds
    if len(window) < len(request.rounds):
        begin, end = window[0].bar.begin, window[-1].bar.end
        begin = max(0.0, begin - (end - begin) / 20)
    by_id = _by_id(request, texts)
    return {
        "seconds": request.seconds,
        "first": request.first_token,
        "window": [begin, end],
        "targets": [_attempt(a) for a in request.targets],
        "drafts": [_attempt(a) for a in request.drafts],
        "rounds": [_round(r, text) for r, text in zip(request.rounds, texts, strict=True)],
        "chains": [_chain(chain, by_id) for chain in request.chains],
    }


def _by_id(request: Request, texts: Sequence[RoundText]) -> Mapping[int, str]:
    """Texts of ids, from where they were decided or tested."""
    found: dict[int, str] = {}
    for r, text in zip(request.rounds, texts, strict=True):
        for token, word in zip(r.tokens, text.tokens, strict=True):
            found.setdefault(token.token_id, word)
        for token_id, word in zip(r.rejected, text.rejected, strict=True):
            if token_id is not None:
                found.setdefault(token_id, word)
    return found


def _bar(bar: Bar | None) -> list[float] | None:
    return None if bar is None else [round(bar.begin, 6), round(bar.end, 6)]


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "session": _bar(attempt.session),
        "sequence": _bar(attempt.sequence),
        "prefill": _bar(attempt.prefill),
        "prefilled": attempt.num_prefilled,
        "address": attempt.address,
        "index": attempt.index,
        "reason": attempt.reason,
        "lost": attempt.lost,
    }


def _round(r: Round, text: RoundText) -> dict[str, Any]:
    return {
        "index": r.index,
        "begin": round(r.bar.begin, 6),
        "end": round(r.bar.end, 6),
        "target": r.target,
        "step": r.step_id,
        "batch": r.batch_size,
        "rows": r.num_rows,
        "committed": r.committed_len,
        "tested": r.num_tested,
        "accepted": r.num_accepted,
        "stale": r.num_stale,
        "wait": r.wait_seconds,
        "tokens": [{"text": word} for word in text.tokens],
        "rejected": [{"text": word} for word in text.rejected],
        "chains": r.chains,
        "unresolved": r.num_unresolved,
    }


def _chain(chain: Chain, texts: Mapping[int, str]) -> dict[str, Any]:
    return {
        "index": chain.index,
        "begin": round(chain.bar.begin, 6),
        "end": round(chain.bar.end, 6),
        "draft": chain.draft,
        "serial": chain.serial,
        "start": chain.start,
        "num": chain.num_tokens,
        "held": chain.held_seconds,
        "tokens": [{"text": texts.get(i, f"#{i}")} for i in chain.token_ids],
        "cause": chain.cause,
        "used": chain.consumed_by,
    }
