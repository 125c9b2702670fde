"""Target, draft and gateway as processes on this machine."""

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

log = logging.getLogger(__name__)
_SERVES = re.compile(r" serves on (\S+)")
STOP_SECONDS = 40.0  # longer than a service drains


class StackError(Exception):
    """A process did not start, or has ended when it should not have."""


class ServiceProcess:
    """One service, `python -m MODULE ARGS`, in its own process.

    It hears no Ctrl-C of the terminal: whoever started it stops it.
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
            | os.environ
            | {"OMP_WAIT_POLICY": "PASSIVE"}
            | dict(env or {}),
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

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
    """A target, perhaps a draft, and a gateway; a context manager.

    `draft` is "ngram", "none" or a model to draft with. Services take free ports, the
    gateway takes `port`. `env` comes on top of this process's environment. Entering waits
    until the gateway serves.
    """

    def __init__(
        self,
        *,
        model: str = "",
        draft: str = "ngram",
        dtype: str = "auto",
        port: int = 0,
        target_args: Sequence[str] = (),
        draft_args: Sequence[str] = (),
        gateway_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_timeout_seconds: float = 600.0,
    ) -> None:
        cores, last_core = share_cores()
        self._timeout_seconds = start_timeout_seconds
        self._env = env
        self._target_args = ["--port=0", f"--cores={cores}", f"--model={model}"]
        self._target_args += [f"--dtype={dtype}", *target_args]
        self._draft_args: list[str] | None = None
        if draft != "none":
            drafter = ["--drafter=ngram"]
            if draft != "ngram":
                drafter = ["--drafter=model", f"--model={draft}", f"--dtype={dtype}"]
            self._draft_args = [f"--cores={last_core}", *drafter, *draft_args]
        self._gateway_args = [f"--port={port}", f"--cores={last_core}", *gateway_args]
        self.target: ServiceProcess | None = None
        self.draft: ServiceProcess | None = None
        self.gateway: ServiceProcess | None = None
        self._draft_port = 0
        self._draft_started_at = 0.0

    @property
    def gateway_address(self) -> str:
        """Where clients connect."""
        assert self.gateway is not None, "the stack has not been started"
        return self.gateway.address

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
        self.target = ServiceProcess("target_service", self._target_args, self._env)
        args = list(self._gateway_args)
        if self._draft_args is not None:
            self.start_draft()
            assert self.draft is not None
            address = self.draft.wait_until_serving(self._timeout_seconds)
            self._draft_port = int(address.rpartition(":")[2])
            args.append(f"--draft={address}")
        address = self.target.wait_until_serving(self._timeout_seconds)
        self.gateway = ServiceProcess("gateway", [f"--target={address}", *args], self._env)
        self.gateway.wait_until_serving(self._timeout_seconds)

    def start_draft(self) -> None:
        """Start the draft, where it was before; returns before it serves."""
        assert self._draft_args is not None, "this stack has no draft"
        self._draft_started_at = time.monotonic()
        self.draft = ServiceProcess(
            "draft_service", [f"--port={self._draft_port}", *self._draft_args], self._env
        )

    def kill_draft(self) -> None:
        """End the draft without notice."""
        assert self.draft is not None, "this stack has no draft"
        self.draft.kill()

    def check(self) -> None:
        """Restart a draft that has died; raises `StackError` if target or gateway have."""
        for process in (self.target, self.gateway):
            if process is not None and process.exit_code is not None:
                raise StackError(f"the {process.name} has ended with code {process.exit_code}")
        if self.draft is not None and self.draft.exit_code is not None:
            if time.monotonic() - self._draft_started_at < 1.0:
                return  # not in a frenzy
            log.warning("the draft has ended with code %s; restarted", self.draft.exit_code)
            self.start_draft()

    def stop(self) -> None:
        """Stop everything, the gateway first; an interruption makes it sudden."""
        processes = [p for p in (self.gateway, self.draft, self.target) if p is not None]
        try:
            for process in processes:
                process.stop()
        finally:
            for process in processes:
                process.kill()


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
