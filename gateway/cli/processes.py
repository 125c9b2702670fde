"""Targets, drafts and gateway as processes on this machine."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from common.errors import ConfigurationError
from common.settings import PREFIX

log = logging.getLogger(__name__)
_SERVES = re.compile(r" serves on (\S+)")
STOP_SECONDS = 40.0  # longer than a service drains


class StackError(Exception):
    """A process did not start, or has ended when it should not have."""


class ServiceProcess:
    """One service, `python -m MODULE ARGS`, in its own process.

    It hears no Ctrl-C of the terminal: whoever started it stops it. `env` comes on top of this
    process's environment without `TANDEM_*`: such a setting is meant for one service, and the
    others would refuse it.
    """

    def __init__(
        self, module: str, args: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self.name = module.removesuffix("_service")
        self.address = ""  # where it serves, once it does
        self._terminated = False
        self._told = threading.Event()  # it serves, or its output has ended
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdout=subprocess.PIPE,
            text=True,
            env={"GRPC_VERBOSITY": "NONE"}
            | {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
            | {"OMP_WAIT_POLICY": "PASSIVE"}
            | dict(env or {}),
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait_until_serving(self, timeout_seconds: float) -> str:
        """Its address; raises `StackError` if it ends before it serves."""
        if not self._told.wait(timeout_seconds):
            raise StackError(f"the {self.name} does not serve after {timeout_seconds:.0f} s")
        if not self.address:
            code = self._process.wait()
            raise StackError(f"the {self.name} has ended with code {code} before it served")
        return self.address

    def terminate(self) -> None:
        """Ask it to finish what it has and end; asking again changes nothing."""
        if self.exit_code is None and not self._terminated:
            self._terminated = True  # a second signal could hit it on its way out
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        if self.exit_code is None:
            self._process.kill()
        self._process.wait()

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> int:
        """Terminate it, by force after a while; returns the exit code."""
        self.terminate()
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            log.warning("the %s does not stop and is killed", self.name)
            self.kill()
            return self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if not self.address and (found := _SERVES.search(line)):
                    self.address = found[1]
                    self._told.set()
        self._told.set()


class LocalStack:
    """Targets, perhaps drafts, and a gateway; a context manager.

    `draft` is "ngram", "none" or a model to draft with. Services take free ports, the
    gateway takes `port`. `env` comes on top of this process's environment without `TANDEM_*`
    (see `ServiceProcess`). Entering waits until all of them serve.
    """

    def __init__(
        self,
        *,
        model: str = "",
        draft: str = "ngram",
        dtype: str = "auto",
        port: int = 0,
        num_targets: int = 1,
        num_drafts: int = 1,
        target_args: Sequence[str] = (),
        draft_args: Sequence[str] = (),
        gateway_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_timeout_seconds: float = 600.0,
    ) -> None:
        if unused := sorted(name for name in os.environ if name.startswith(PREFIX)):
            log.warning("%s: not used, this stack is set by flags", ", ".join(unused))
        cores, last_core = share_cores()
        self._timeout_seconds = start_timeout_seconds
        self._env = env
        target_args = [f"--model={model}", f"--dtype={dtype}", *target_args]
        drafter = ["--drafter=ngram"]
        if draft != "ngram":
            drafter = ["--drafter=model", f"--model={draft}", f"--dtype={dtype}"]
        self._targets = [
            _Place("target_service", [f"--cores={share}", *target_args], env)
            for share in split_cores(cores, num_targets)
        ]
        draft_args = [f"--cores={last_core}", *drafter, *draft_args]
        self._drafts = [
            _Place("draft_service", draft_args, env)
            for _ in range(num_drafts if draft != "none" else 0)
        ]
        self._gateway_args = [f"--port={port}", f"--cores={last_core}", *gateway_args]
        self.gateway: ServiceProcess | None = None

    @property
    def gateway_address(self) -> str:
        """Where clients connect."""
        assert self.gateway is not None, "the stack has not been started"
        return self.gateway.address

    @property
    def target(self) -> ServiceProcess | None:
        """The first target."""
        return self._targets[0].process

    @property
    def draft(self) -> ServiceProcess | None:
        """The first draft."""
        return self._drafts[0].process if self._drafts else None

    @property
    def targets(self) -> list[ServiceProcess]:
        """The targets that were started, as they are now."""
        return [place.process for place in self._targets if place.process is not None]

    @property
    def drafts(self) -> list[ServiceProcess]:
        """The drafts that were started, as they are now."""
        return [place.process for place in self._drafts if place.process is not None]

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        for place in (*self._targets, *self._drafts):
            place.start()
        addresses = {
            flag: ",".join(p.wait_until_serving(self._timeout_seconds) for p in processes)
            for flag, processes in (("draft", self.drafts), ("target", self.targets))
            if processes
        }
        args = [f"--{flag}={told}" for flag, told in addresses.items()]
        self.gateway = ServiceProcess("gateway", [*args, *self._gateway_args], self._env)
        self.gateway.wait_until_serving(self._timeout_seconds)

    def start_target(self, index: int = 0) -> ServiceProcess:
        """Start a target that has ended, where it was; returns before it serves."""
        return self._targets[index].start()

    def start_draft(self, index: int = 0) -> ServiceProcess:
        """Start a draft that has ended, where it was; returns before it serves."""
        assert self._drafts, "this stack has no draft"
        return self._drafts[index].start()

    def kill_draft(self, index: int = 0) -> None:
        """End a draft without notice."""
        assert self.drafts, "this stack has no draft"
        self.drafts[index].kill()

    def check(self) -> None:
        """Restart a draft that has died, or a target that is not the only one.

        Raises `StackError` if the gateway has, or the only target.
        """
        vital = [self.gateway, *(self.targets if len(self._targets) == 1 else ())]
        for process in vital:
            if process is not None and process.exit_code is not None:
                raise StackError(f"the {process.name} has ended with code {process.exit_code}")
        for place in (*self._targets, *self._drafts):
            place.revive()

    def stop(self) -> None:
        """Stop everything, the gateway first; an interruption makes it sudden."""
        gateway = [self.gateway] if self.gateway is not None else []
        processes = [*gateway, *self.drafts, *self.targets]
        try:
            for process in processes:
                process.stop()
        finally:
            for process in processes:
                process.kill()


class _Place:
    """A service that may be started again, on the port that it had."""

    def __init__(self, module: str, args: Sequence[str], env: Mapping[str, str] | None) -> None:
        self.process: ServiceProcess | None = None
        self._module = module
        self._args = args
        self._env = env
        self._started_at = 0.0

    def start(self) -> ServiceProcess:
        port = "0"
        if self.process is not None and self.process.address:
            port = self.process.address.rpartition(":")[2]
        self._started_at = time.monotonic()
        self.process = ServiceProcess(self._module, [f"--port={port}", *self._args], self._env)
        return self.process

    def revive(self) -> None:
        """Start it if it has ended."""
        if self.process is None or self.process.exit_code is None:
            return
        if time.monotonic() - self._started_at < 1.0:
            return  # not in a frenzy
        code = self.process.exit_code
        log.warning("the %s has ended with code %s; restarted", self.process.name, code)
        self.start()


def check_port(host: str, port: int) -> None:
    """Raises `ConfigurationError` if nothing could listen there."""
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f'is "{host}", which can\'t be resolved', field="--host"
        ) from error
    try:
        socket.create_server(where[:2], family=family).close()
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ConfigurationError(
            f"can't listen on {host}:{port} ({reason}); choose another", field="--port"
        ) from error


def share_cores() -> tuple[str, str]:
    """Cores for the target, and those that draft and gateway share: the last one.

    Two processes whose threads compute on the same cores slow each other many times over.
    """
    if not hasattr(os, "sched_getaffinity"):
        return "", ""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    return ",".join(cores[:-1] or cores), cores[-1]


def split_cores(cores: str, num: int) -> list[str]:
    """A share of the cores for each of several services; all for each if there are too few."""
    listed = cores.split(",")
    if len(listed) < num:
        return [cores] * num
    return [",".join(listed[i::num]) for i in range(num)]
