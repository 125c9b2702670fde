"""What the commands say beside answers: errors, and how things end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from common.config import ServiceConfig
from common.errors import TandemError, TimedOutError
from gateway.cli.processes import StackError
from gateway.client import Client, Delta, Event

FLAGS = {
    "address": "--gateway",
    "cache_salt": "--cache-salt",
    "model": "--model",
    "n": "--n",
    "priority": "--priority",
    "sampling.frequency_penalty": "--frequency-penalty",
    "sampling.logit_bias": "--logit-bias",
    "sampling.max_tokens": "--max-tokens",
    "sampling.min_p": "--min-p",
    "sampling.min_tokens": "--min-tokens",
    "sampling.num_logprobs": "--logprobs",
    "sampling.presence_penalty": "--presence-penalty",
    "sampling.repetition_penalty": "--repetition-penalty",
    "sampling.stop_token_ids": "--stop-token-id",
    "sampling.temperature": "--temperature",
    "sampling.top_k": "--top-k",
    "sampling.top_p": "--top-p",
    "seed": "--seed",
    "speculation.max_lookahead": "--lookahead",
    "speculation.rule": "--rule",
    "stop_strings": "--stop",
    "timeout": "--timeout",
}
"""What sets the field that an error names."""


def stderr() -> Console:
    """For what is not the answer."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


@contextlib.contextmanager
def told_errors() -> Iterator[None]:
    """Ends the process with a line for what can be told."""
    try:
        yield
    except (TandemError, StackError) as error:
        tell_error(error)
        sys.exit(1)


def tell_error(error: TandemError | StackError) -> None:
    """One red line, which names the flag at fault if there is one."""
    told = str(error)
    if isinstance(error, TimedOutError):
        told += " (--timeout)"
    elif isinstance(error, TandemError) and error.field:
        told = f"{FLAGS.get(error.field.partition('[')[0], error.field)}: {error.message}"
    stderr().print(Text(f"tandem: {told}", style="red"))


def whole_lines(events: Iterable[Event], console: Console) -> Iterator[Event]:
    """The events; a text that breaks off ends its line, so that the error begins one."""
    last = ""
    try:
        for event in events:
            if isinstance(event, Delta):
                last = event.text or last
            yield event
    except (TandemError, KeyboardInterrupt):
        if last and not last.endswith("\n"):
            console.print()
        raise


def tell_stopping(console: Console, address: str) -> None:
    """Say what a stack that is asked to stop still waits for."""
    number = 0
    with contextlib.suppress(TandemError), Client(address) as client:
        number = client.status(timeout=1.0).num_live_requests
    if number:
        seconds = f"{ServiceConfig.drain_seconds:.0f} s"
        requests = f"{number} request{'' if number == 1 else 's'}"
        end = "Ctrl-C again ends at once"
        console.print(f"stopping; {requests} may finish within {seconds} ({end})")
    else:
        console.print("stopping")
