"""Tandem next to vLLM's CPU build, llama.cpp and transformers: `make bench-peers`.

Installs the peers under `build/peers`, then measures tokens per second and time to first token,
paired and interleaved: the same prompts and cores, greedy, equal numbers of tokens. Peers answer
within their process; Tandem's figures include its gateway and the wire to the client, its first
tokens are by the gateway's clock.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from statistics import median

from tests.benchmarks.answers import Answer, Prompts, ask
from tests.benchmarks.harness import FULL, QUICK, Row, Scale, interleave, ratios, report, spread
from tests.benchmarks.peers.install import PeerMissingError, install
from tests.benchmarks.peers.processes import Peer
from tests.benchmarks.pictures import Line, Panel, draw
from tests.benchmarks.prompts import chats, speaker
from tests.benchmarks.stack import NGRAM, shared

PEERS = ("vllm", "llama", "generate", "generate_batch")
OURS = {"Tandem undrafted": False, "Tandem drafted": True}
Contenders = dict[str, Callable[[Prompts], Answer]]


def contenders(
    running: contextlib.ExitStack, names: list[str], threads: int, scale: Scale
) -> Contenders:
    """Everybody, started; each has the same two cores, and the others sleep meanwhile."""
    address = running.enter_context(shared(threads, NGRAM))
    found: Contenders = {
        name: partial(ask, address, num_tokens=scale.num_tokens, speculate=speculate)
        for name, speculate in OURS.items()
    }
    for name in names:
        peer = running.enter_context(Peer(name, max(scale.loads)))
        found[name] = partial(peer.ask, num_tokens=scale.num_tokens)
    return found


def measure(everybody: Contenders, num: int, scale: Scale) -> dict[str, list[Answer]]:
    """All answers of each contender at one load."""
    prompts = chats(num)
    answers: dict[str, list[Answer]] = {name: [] for name in everybody}

    def run(name: str) -> float:
        answers[name].append(everybody[name](prompts))
        return answers[name][-1].rate

    contenders = {name: partial(run, name) for name in everybody}
    for warm_up in contenders.values():
        warm_up()
    for found in answers.values():
        found.clear()
    interleave(contenders, scale.rounds)
    return answers


def rows_for(num: int, answers: dict[str, list[Answer]]) -> Iterator[Row]:
    """The table's rows for one load."""
    ours = [a.rate for a in answers["Tandem undrafted"]]
    for name, found in answers.items():
        rates = [a.rate for a in found]
        first = spread([1e3 * median(a.first_seconds) for a in found], ".0f")
        value = f"{spread(rates, '.1f')} tok/s, first after {first} ms"
        if name not in OURS:
            value += f"; undrafted {median(ratios(ours, rates)):.2f}x as fast"
        yield Row(f"{num:2} requests, {name}", value)


def panels(found: dict[int, dict[str, list[Answer]]]) -> list[Panel]:
    """Tokens per second and time to first token against the number of requests."""
    told: list[tuple[str, str, Callable[[Answer], float]]] = [
        ("throughput", "tokens per second", lambda a: a.rate),
        ("time to first token", "ms, median request", lambda a: 1e3 * median(a.first_seconds)),
    ]
    drawn = []
    for title, label, of in told:
        panel = Panel(title, "requests at once", label, log_y=True)
        for name in next(iter(found.values())):
            values = [[of(a) for a in answers[name]] for answers in found.values()]
            lows, highs = [min(v) for v in values], [max(v) for v in values]
            panel.lines.append(Line(name, list(found), [median(v) for v in values], lows, highs))
        drawn.append(panel)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench-peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it works; no figures")
    parser.add_argument("--peers", choices=PEERS, nargs="+", default=list(PEERS))
    parser.add_argument("--threads", type=int, default=2, help="of Tandem's target")
    parser.add_argument("--install-only", action="store_true")
    args = parser.parse_args()
    try:
        install()
    except PeerMissingError as error:
        sys.exit(str(error))
    if args.install_only:
        return
    scale = QUICK if args.quick else FULL
    rows: list[Row] = []
    found: dict[int, dict[str, list[Answer]]] = {}
    with contextlib.ExitStack() as running:
        everybody = contenders(running, args.peers, args.threads, scale)
        for num in scale.loads:
            found[num] = measure(everybody, num, scale)
            rows += rows_for(num, found[num])
            print(*rows[-len(everybody) :], sep="\n", flush=True)
    for name, answers in found[min(found)].items():
        text = speaker().decode(answers[0].token_ids[0][:16])
        rows.append(Row(f"first 16 tokens, {name}", repr(text)))
    name = "bench-peers-quick" if args.quick else "bench-peers"
    runs = {
        num: {n: [asdict(a) for a in some] for n, some in of.items()} for num, of in found.items()
    }
    report(name, rows, answers=runs)
    print(draw(name, panels(found)))


if __name__ == "__main__":
    main()
