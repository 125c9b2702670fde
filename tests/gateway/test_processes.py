"""Services as processes, and `tandem up`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.errors import UnavailableError
from gateway.cli import app, commands
from gateway.cli.processes import (
    LocalStack,
    ServiceProcess,
    StackError,
    check_port,
    share_cores,
    split_cores,
)
from gateway.client import AsyncClient, Client
from tests.gateway.fakes import (
    FakeTarget,
    World,
    ending,
    in_world,
    until,
    verdicts,
)

STUB = """
import os, signal, sys, time
if "--fail" in sys.argv:
    sys.exit(3)
if "--grpc" in sys.argv:
    print("stub serves on", os.environ.get("GRPC_VERBOSITY"), flush=True)
if "--settings" in sys.argv:
    names = sorted(name for name in os.environ if name.startswith("TANDEM_"))
    print("stub serves on", ",".join(names) or "defaults", flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("stub serves on 127.0.0.1:9 after 0.0 s", flush=True)
time.sleep(60)
"""


def test_a_second_interruption_ends_a_stack_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = LocalStack()
    ended = []

    class Process:
        def stop(self) -> None:
            raise KeyboardInterrupt

        def kill(self) -> None:
            ended.append(self)

    stack.gateway = Process()  # type: ignore[assignment]
    monkeypatch.setattr(LocalStack, "targets", [Process()])
    with pytest.raises(KeyboardInterrupt):
        stack.stop()
    assert len(ended) == 2


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "stub_service.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "stub_service"


def test_a_process_tells_where_it_serves_and_stops(stub: str) -> None:
    process = ServiceProcess(stub, [])
    assert process.wait_until_serving(20) == "127.0.0.1:9"
    assert process.exit_code is None
    assert process.stop() == 0


def test_grpc_in_a_process_is_quiet_unless_asked(
    stub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked, level in ((None, "NONE"), ("DEBUG", "DEBUG")):
        if asked is None:
            monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
        else:
            monkeypatch.setenv("GRPC_VERBOSITY", asked)
        process = ServiceProcess(stub, ["--grpc"])
        assert process.wait_until_serving(20) == level
        process.kill()


def test_settings_in_the_environment_are_handed_on_to_whom_they_are_meant_for_only(
    stub: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TANDEM_LOOKAHEAD", "4")
    monkeypatch.setenv("TANDEM_PORT", "7")
    for env, told in ((None, "defaults"), ({"TANDEM_POOL": "blue"}, "TANDEM_POOL")):
        process = ServiceProcess(stub, ["--settings"], env)
        assert process.wait_until_serving(20) == told
        process.kill()
    LocalStack()
    assert "TANDEM_LOOKAHEAD, TANDEM_PORT: not used, this stack is set by flags" in caplog.text


def test_a_process_that_ends_early_is_reported(stub: str) -> None:
    with pytest.raises(StackError, match="stub has ended with code 3 before it served"):
        ServiceProcess(stub, ["--fail"]).wait_until_serving(20)


def test_every_core_is_somebodys() -> None:
    target, others = share_cores()
    assert target
    assert others
    assert split_cores("0,1,2,3,4", 2) == ["0,2,4", "1,3"]
    assert split_cores("0", 2) == ["0", "0"]
    assert split_cores("", 2) == ["", ""]


def test_a_stack_stops_what_it_started_when_a_part_fails() -> None:
    stack = LocalStack(draft="none", target_args=["--no-such-flag"])
    with pytest.raises(StackError, match="target has ended with code 2"), stack:
        pass
    assert stack.target is not None
    assert stack.target.exit_code == 2


def test_a_gateway_that_dies_is_said_to_have_gone() -> None:
    async def main() -> None:
        target = FakeTarget()
        target.script = ["he"]
        await target.start()
        process = ServiceProcess("gateway", ["--port=0", f"--target={target.address}"])
        try:
            address = await asyncio.to_thread(process.wait_until_serving, 20)
            async with AsyncClient(address) as client:
                answer = asyncio.create_task(client.generate("hi"))
                await until(lambda: target.opens)
                process.kill()
                with pytest.raises(UnavailableError) as caught:
                    await answer
            assert str(caught.value) == f"the gateway at {address} has gone"
        finally:
            process.kill()
            await target.stop()

    asyncio.run(main())


def test_the_gateway_runs_as_a_process_and_drains() -> None:
    async def main() -> None:
        target = FakeTarget()
        target.script = [ending("hello")]
        await target.start()
        process = ServiceProcess("gateway", ["--port=0", f"--target={target.address}"])
        try:
            address = await asyncio.to_thread(process.wait_until_serving, 20)

            def ask() -> str:
                with Client(address) as client:
                    return client.generate("hi").text

            assert await asyncio.to_thread(ask) == "hello"
            target.script = ["he"]
            last = asyncio.create_task(asyncio.to_thread(ask))
            await until(lambda: len(target.opens) == 2)
            process.terminate()
            await asyncio.sleep(0.2)
            assert process.exit_code is None  # it waits for the request
            target.script = []
            opened = target.opens[-1]
            length = len(opened.token_ids) + 2
            target.say(*verdicts(opened, [ending("y")], committed_len=length))
            assert await last == "hey"
            assert await asyncio.to_thread(process.stop) == 0
        finally:
            process.kill()
            await target.stop()

    asyncio.run(main())


def test_what_outlives_the_drain_is_told_when_to_try_again() -> None:
    """However often the gateway is told to stop."""

    async def main() -> None:
        target = FakeTarget()
        target.script = ["he"]  # and no end
        await target.start()
        args = ["--port=0", f"--target={target.address}", "--drain-seconds=1"]
        process = ServiceProcess("gateway", args)
        try:
            address = await asyncio.to_thread(process.wait_until_serving, 20)
            async with AsyncClient(address) as client:
                answer = asyncio.create_task(client.generate("hi"))
                await until(lambda: target.opens)
                process.terminate()
                await asyncio.sleep(0.5)
                os.kill(process.pid, signal.SIGTERM)
                with pytest.raises(UnavailableError, match="the gateway stops") as caught:
                    await answer
            assert caught.value.retry_after_seconds
            assert await asyncio.to_thread(process.stop) == 0
        finally:
            process.kill()
            await target.stop()

    asyncio.run(main())


def test_up_looks_at_its_port_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "LocalStack", None)
    monkeypatch.setattr(commands, "_stop_on_sigterm", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["up", "--port", str(port)])
    assert (result.exit_code, result.stdout) == (1, "")
    told = f"--port: can't listen on 127.0.0.1:{port} (address already in use); choose another"
    assert result.stderr == f"tandem: {told}\n"
    check_port("127.0.0.1", port)
    result = CliRunner().invoke(app, ["up", "--host", "no.such.host.invalid"])
    assert result.stderr.startswith('tandem: --host: is "no.such.host.invalid", which can\'t be')


def test_up_hands_flags_to_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: dict[str, object] = {}

    def stack(**settings: object) -> None:
        handed.update(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "LocalStack", stack)
    monkeypatch.setattr(commands, "_stop_on_sigterm", lambda: None)
    flags = ["--target-arg=--quantization=int8", "--target-arg=--max-rows=9"]
    flags += ["--draft-arg=--min-ngram=2", "--gateway-arg=--log-level=info"]
    CliRunner().invoke(app, ["up", "--port=0", *flags])
    assert handed["target_args"] == ["--quantization=int8", "--max-rows=9"]
    assert handed["draft_args"] == ["--min-ngram=2"]
    assert handed["gateway_args"] == ["--host=127.0.0.1", "--log-level=info"]


@pytest.mark.parametrize(
    ("num_live", "says"),
    [
        (0, "stopping\n"),
        (1, "stopping; 1 request may finish within 30 s (Ctrl-C again ends at once)\n"),
        (2, "stopping; 2 requests may finish within 30 s (Ctrl-C again ends at once)\n"),
    ],
)
def test_up_says_what_it_waits_for(
    num_live: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(w: World) -> None:
        class Stack(contextlib.nullcontext[None]):
            gateway_address = w.address

            def __init__(self, **_: object) -> None:
                super().__init__()

            def check(self) -> None:
                raise KeyboardInterrupt

        monkeypatch.setattr(commands, "LocalStack", Stack)
        monkeypatch.setattr(commands, "_stop_on_sigterm", lambda: None)
        tasks = [asyncio.create_task(w.stream()) for _ in range(num_live)]
        await until(lambda: len(w.target.opens) == num_live)
        result = await asyncio.to_thread(lambda: CliRunner().invoke(app, ["up", "--port", "0"]))
        for task in tasks:
            task.cancel()
        assert result.exit_code == 0
        assert result.stdout.endswith('tandem generate "Hello"\n' + says)

    in_world(test)
