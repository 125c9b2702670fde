"""What bounded a request, in words and numbers: a pure function of its record."""

from __future__ import annotations

from gateway.findings import CHECKS, milliseconds, ratio, step_seconds
from gateway.metrics import parts
from gateway.records import RequestRecord
from gateway.types import Explanation


def explain(r: RequestRecord) -> Explanation:
    """All that stands out, the gravest first."""
    findings = [found for check in CHECKS if (found := check(r)) is not None]
    findings.sort(key=lambda f: -f.severity.value)
    return Explanation(r.request_id, tuple(_summary(r)), tuple(findings))


def _summary(r: RequestRecord) -> list[str]:
    spent, usage, timing = r.speculation, r.usage, r.timing
    decided = usage.delivered + usage.discarded
    lines = [
        f"ended by {r.ending}: {decided} tokens in {spent.steps} steps"
        f" ({ratio(decided, spent.steps):.2f} a step), {timing.total_seconds:.3f} s,"
        f" {ratio(decided, timing.total_seconds):.1f} tokens/s"
    ]
    shares = {name: ratio(s, timing.total_seconds) for name, s in parts(r).items()}
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    lines.append(f"time: {told}; most of it {max(shares, key=lambda name: shares[name])}")
    lines.append(
        f"steps: {milliseconds(step_seconds(r))} and {r.mean_batch_size:.1f} requests in the mean"
    )
    if spent.drafted:
        causes = ", ".join(f"{cause} {num}" for cause, num in r.stale._asdict().items() if num)
        lines.append(
            f"draft tokens: {spent.drafted} relayed, {spent.tested} tested, {spent.accepted}"
            f" accepted ({ratio(spent.accepted, spent.tested):.0%}), {spent.stale} stale"
            + (f" ({causes})" if causes else "")
        )
        runs = spent.steps - spent.undrafted_steps
        rates = (f"{ratio(n, runs):.0%}" for n in spent.accepted_per_position)
        lines.append(f"accepted by place in a run: {' '.join(rates) or 'none'}")
    return lines
