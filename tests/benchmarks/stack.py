"""Services for benchmarks: target, perhaps a draft, and a gateway, on cores as told."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.cli.processes import ServiceProcess, share_cores
from tests.benchmarks.answers import Answer, Prompts, ask

TARGET = ("target_service", "--dtype=bfloat16")
NGRAM = ("draft_service", "--drafter=ngram")
START_SECONDS = 300.0


def two_cores() -> str:
    """The cores that every contender has."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))


@contextlib.contextmanager
def services(
    target: Sequence[str],
    draft: Sequence[str] | None,
    target_cores: str,
    other_cores: str,
    gateway_args: Sequence[str] = (),
) -> Iterator[str]:
    """The gateway's address; target and draft are a module and its flags.

    Raises `StackError` if one of them does not start.
    """
    with contextlib.ExitStack() as running:

        def start(module: str, cores: str, *args: str) -> ServiceProcess:
            process = ServiceProcess(module, ["--port=0", f"--cores={cores}", *args])
            running.callback(process.kill)
            running.callback(process.stop)  # what measures itself writes down what it found
            return process

        module, *args = target
        peers = {"target": start(module, target_cores, *args)}
        if draft is not None:
            module, *args = draft
            peers["draft"] = start(module, other_cores, *args)
        found = [f"--{name}={p.wait_until_serving(START_SECONDS)}" for name, p in peers.items()]
        gateway = start("gateway", other_cores, *found, *gateway_args)
        yield gateway.wait_until_serving(START_SECONDS)


@contextlib.contextmanager
def shared(
    threads: int = 2, draft: Sequence[str] | None = None, args: Sequence[str] = ()
) -> Iterator[str]:
    """All processes on the two cores that a peer has, the target with so many threads."""
    target = [*TARGET, f"--threads={threads}", *args]
    with services(target, draft, two_cores(), two_cores()) as address:
        yield address


@contextlib.contextmanager
def apart(target: Sequence[str] = TARGET, draft: Sequence[str] | None = None) -> Iterator[str]:
    """As `tandem up` shares cores out: the target has its own, the others have the last."""
    cores, last = share_cores()
    with services(target, draft, cores, last) as address:
        yield address


@contextlib.contextmanager
def replaying(prompts: Prompts, num_tokens: int, folder: Path) -> Iterator[str]:
    """`apart`, with a draft that knows the target's greedy answers; see `seed_for`.

    A request's seed says how often the draft is right.
    """
    texts = folder / "texts.json"
    with apart() as address:
        answers = ask(address, prompts, num_tokens).token_ids
    texts.write_text(json.dumps([[list(p), a] for p, a in zip(prompts, answers, strict=True)]))
    draft = ("tests.benchmarks.replay_draft", f"--texts={texts}")
    cores, last = share_cores()
    with services(TARGET, draft, cores, last, ["--lookahead=16"]) as address:
        yield address


@dataclass(frozen=True)
class Undrafted:
    """Targets without drafts and with 1 and 2 threads on the two cores, for whoever is better."""

    addresses: dict[int, str]

    def best(self, prompts: Prompts, num_tokens: int) -> tuple[int, Callable[[], Answer]]:
        """How many threads answer faster in a trial, and a function that asks them."""

        def run(threads: int) -> Answer:
            return ask(self.addresses[threads], prompts, num_tokens, speculate=False)

        trials = {threads: max(run(threads).rate for _ in range(2)) for threads in self.addresses}
        threads = max(trials, key=trials.__getitem__)
        return threads, lambda: run(threads)


@contextlib.contextmanager
def undrafted(*args: str) -> Iterator[Undrafted]:
    """See `Undrafted`; args are more of the target's flags."""
    with contextlib.ExitStack() as running:
        yield Undrafted({t: running.enter_context(shared(t, args=args)) for t in (1, 2)})
