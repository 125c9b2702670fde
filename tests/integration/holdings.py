"""What processes hold: open files, sockets and threads, as Linux tells them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.cli.processes import LocalStack, ServiceProcess
from gateway.client import Client
from gateway.types import GatewayStatus, PeerState

SETTLE_SECONDS = 20.0


@dataclass(frozen=True)
class Holdings:
    """Counts of one process."""

    num_files: int
    num_threads: int


def processes(stack: LocalStack) -> dict[str, ServiceProcess]:
    """Everything that runs, by name."""
    assert stack.gateway is not None
    named = {"gateway": stack.gateway}
    named |= {f"target {i}": process for i, process in enumerate(stack.targets)}
    return named | {f"draft {i}": process for i, process in enumerate(stack.drafts)}


def holdings(stack: LocalStack) -> dict[str, Holdings]:
    """What each process holds now."""
    return {
        name: Holdings(len(_listed(process.pid, "fd")), len(_listed(process.pid, "task")))
        for name, process in processes(stack).items()
    }


def sockets(pid: int) -> set[str]:
    """The sockets that a process has open; each has a number that is never used again."""
    found = set()
    for name in _listed(pid, "fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue  # closed since
    return {name for name in found if name.startswith("socket:")}


def is_idle(status: GatewayStatus) -> bool:
    """Whether nothing is open anywhere, and every block is free."""
    return status.num_live_requests == 0 and all(
        peer.state is PeerState.READY
        and peer.num_sequences == 0
        and peer.engine is not None
        and peer.engine.num_running == peer.engine.num_waiting == 0
        and peer.engine.num_free_blocks == peer.engine.num_blocks > 0
        for peer in status.peers
    )


def wait_until_idle(stack: LocalStack) -> None:
    """Every block of targets and drafts that have some is free; raises if not in a while."""
    with Client(stack.gateway_address) as client:
        settled(lambda: is_idle(client.status(timeout=5)), client.status)


def settled(holds: Callable[[], bool], told: Callable[[], object]) -> None:
    """Wait until something holds; raises with what is told if it does not in a while."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(0.1)


def _listed(pid: int, what: str) -> list[str]:
    return [path.name for path in Path(f"/proc/{pid}/{what}").iterdir()]
