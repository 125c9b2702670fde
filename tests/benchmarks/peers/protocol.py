"""What a peer's worker speaks: a line of JSON in, a line of JSON out. Standard library only.

Asked: {"prompts": [[ids], ...], "num_tokens": n}. Answered: {"seconds": of the whole batch,
"first_seconds": [until each prompt's first token], "token_ids": [[ids], ...]}; first_seconds is
null where a peer does not tell. Greedy; an end-of-text token does not end a text.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Batch = Sequence[Sequence[int]]
Answer = tuple[Sequence[float] | None, Batch]
"""Seconds from the call to each first token, and the tokens."""


def serve(answer: Callable[[list[list[int]], int], Answer], out: Any) -> None:
    """Answer jobs from standard input until it ends."""
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        began = time.perf_counter()
        first, token_ids = answer(job["prompts"], job["num_tokens"])
        seconds = time.perf_counter() - began
        told = {"seconds": seconds, "first_seconds": first, "token_ids": token_ids}
        print(json.dumps(told), file=out, flush=True)


def take_stdout() -> Any:
    """Standard output for answers alone; whatever libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out
