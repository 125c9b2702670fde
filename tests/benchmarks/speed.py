"""How fast is Tandem, and against whom? `make bench-speed`, under 25 minutes on 2 cores.

The packaged model in bfloat16, greedy, 128 tokens unless a row says otherwise. Every bound is on
a ratio of runs that took turns; the figures behind it stand above it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

from tests.benchmarks import speed_drafts, speed_identity, speed_peers, speed_steps
from tests.benchmarks.harness import FULL, QUICK, Row, Scale, report
from tests.benchmarks.peers.install import PeerMissingError

PARTS: dict[str, Callable[[Scale], Iterator[Row]]] = {
    "vllm": speed_peers.against_vllm,
    "llama": speed_peers.against_llama,
    "ngram": speed_drafts.ngram,
    "replay": speed_drafts.replayed,
    "steps": speed_steps.steps,
    "host": speed_steps.host,
    "identity": speed_identity.identity,
    "invariance": speed_identity.invariance,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it works; no figures")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts")
    args = parser.parse_args()
    scale = QUICK if args.quick else FULL
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    for name in args.only:
        began = time.monotonic()
        try:
            for row in PARTS[name](scale):
                print(row, flush=True)
                rows.append(row)
        except PeerMissingError as error:
            rows.append(Row(f"against {name}", f"not measured: {error}"))
        seconds[name] = time.monotonic() - began
    whole = " (quick: no figures)" if args.quick else ""
    rows.append(Row(f"minutes{whole}", f"{sum(seconds.values()) / 60:.1f}"))
    report("bench-speed-quick" if args.quick else "bench-speed", rows, part_seconds=seconds)


if __name__ == "__main__":
    main()
