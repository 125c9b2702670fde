"""What every contender is asked, and what it answers; and Tandem as one of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.client import AsyncClient, Generation, Options

Prompts = Sequence[Sequence[int]]
_salts = itertools.count()


@dataclass(frozen=True)
class Answer:
    """What one batch of prompts got."""

    seconds: float  # of the whole batch
    first_seconds: tuple[float, ...]  # until each prompt's first token
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.token_ids)) / self.seconds


def generations(
    address: str, prompts: Prompts, num_tokens: int, seeds: Sequence[int] = (), **options: Any
) -> tuple[float, list[Generation]]:
    """Seconds, and answers to all prompts at once, each of exactly so many tokens.

    Greedy if not told otherwise. Every call has a cache of its own: no prompt is read already.
    """
    defaults: dict[str, Any] = {"temperature": 0.0, "cache_salt": f"call {next(_salts)}"}
    asked = Options(max_tokens=num_tokens, ignore_eos=True, **(defaults | options))
    given: Sequence[int | None] = seeds or [None] * len(prompts)

    async def main() -> tuple[float, list[Generation]]:
        async with AsyncClient(address) as client:
            await client.status()  # connected before the clock starts
            began = time.perf_counter()
            calls = [client.generate(p, asked, seed=s) for p, s in zip(prompts, given, strict=True)]
            answers = await asyncio.gather(*calls)
            return time.perf_counter() - began, list(answers)

    seconds, answers = asyncio.run(main())
    lengths = {len(a.token_ids) for a in answers}
    assert lengths == {num_tokens}, f"Tandem answered {lengths}, not {num_tokens} tokens"
    return seconds, answers


def ask(
    address: str, prompts: Prompts, num_tokens: int, seeds: Sequence[int] = (), **options: Any
) -> Answer:
    """What `generations` finds, as peers tell it; first tokens by the gateway's clock."""
    seconds, answers = generations(address, prompts, num_tokens, seeds, **options)
    first = [a.finished.timing.time_to_first_token_seconds for a in answers]
    return Answer(seconds, tuple(first), tuple(tuple(a.token_ids) for a in answers))
