"""A draft that knows the answers, and is wrong as often as it is told: for benchmarks.

`--texts` names a JSON file of prompts and the target's own answers. How often a guess is right
is up to each request, through its seed: see `seed_for`.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import telemetry
from common.config import flag, parse, prepare_process
from common.service import run
from common.types import Commit, EngineStatus, ModelInfo, OpenSequence, Proposal, Tokens
from draft_service import servicer
from draft_service.config import DraftConfig
from draft_service.drafters import Drafter
from draft_service.sequence import DraftSequence

PERCENT = 101  # 0 to 100


def seed_for(before: int, after: int | None = None, switch_at: int = 0, variant: int = 0) -> int:
    """A seed that asks for guesses right in so many per cent, and in others from a token on."""
    digits = (before, before if after is None else after, switch_at, variant)
    return sum(
        d * b for d, b in zip(digits, (1, PERCENT, PERCENT**2, PERCENT**2 << 16), strict=True)
    )


@dataclass(frozen=True)
class ReplayConfig(DraftConfig):
    """Replays recorded answers with planted errors."""

    texts: str = flag("", "JSON file: a list of [prompt ids, answer ids]")


class ReplayDrafter:
    """Draws the recorded answer, with errors at places that depend on the seed alone."""

    def __init__(self, answers: dict[Tokens, Tokens]) -> None:
        self._answers = answers
        self._seqs: dict[int, DraftSequence] = {}
        self._guesses: dict[int, list[int]] = {}

    def open(self, s: OpenSequence) -> None:
        """See `Drafter`."""
        self._seqs[s.sequence_id] = DraftSequence.of(s)
        answer = self._answers.get(s.token_ids[: s.num_prompt], ())
        self._guesses[s.sequence_id] = _with_errors(answer, s.sampling.seed)

    def commit(self, c: Commit) -> None:
        """See `Drafter`."""
        self._seqs[c.sequence_id].commit(c)

    def close(self, sid: int) -> None:
        """See `Drafter`."""
        del self._seqs[sid], self._guesses[sid]

    def step(self) -> list[Proposal]:
        """See `Drafter`."""
        return [p for seq in self._seqs.values() if (p := self._draw(seq)) is not None]

    def has_work(self) -> bool:
        """See `Drafter`."""
        return any(self._next(seq) for seq in self._seqs.values())

    def num_unread(self, sid: int) -> int:
        """See `Drafter`."""
        return 0

    def status(self) -> EngineStatus:
        """See `Drafter`."""
        return EngineStatus(num_running=len(self._seqs))

    def _next(self, seq: DraftSequence) -> list[int]:
        guesses = self._guesses[seq.sid]
        first = len(seq.tokens) - (seq.max_len - seq.params.max_tokens)
        return guesses[first : first + seq.num_wanted]

    def _draw(self, seq: DraftSequence) -> Proposal | None:
        drawn = self._next(seq)
        return seq.extend(drawn) if drawn else None


def _with_errors(answer: Tokens, seed: int) -> list[int]:
    before, after = seed % PERCENT, seed // PERCENT % PERCENT
    switch_at = seed // PERCENT**2 % (1 << 16)
    dice = random.Random(seed)
    rates = [before if i < switch_at or not switch_at else after for i in range(len(answer))]
    return [
        t if 100 * dice.random() < rate else t ^ 1 for t, rate in zip(answer, rates, strict=True)
    ]


def main() -> None:
    """Run the draft until it is told to stop."""
    config = parse(ReplayConfig)
    prepare_process(config.cores, config.threads)
    pairs = json.loads(Path(config.texts).read_text())
    answers = {tuple(prompt): tuple(answer) for prompt, answer in pairs}

    def make() -> tuple[Drafter, ModelInfo]:
        return ReplayDrafter(answers), ModelInfo(name="replay")

    tracing = telemetry.from_environment(config.name, os.environ)
    run(config, servicer.SERVICE_NAMES, partial(servicer.start, config, make, tracing), tracing)


if __name__ == "__main__":
    main()
