"""The command line, and services as processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli import app
from gateway.cli.processes import LocalStack, ServiceProcess, StackError, share_cores
from gateway.client import Client
from tests.gateway.fakes import TOKENIZER, FakeTarget, World, ending, in_world, until, verdicts

STUB = """
import signal, sys, time
if "--fail" in sys.argv:
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("stub serves on 127.0.0.1:9 after 0.0 s", flush=True)
time.sleep(60)
"""


async def tandem(w: World, *args: str) -> Result:
    command = [args[0], "--gateway", w.address, *args[1:]]
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, command))


def test_generate_prints_the_text_and_nothing_else() -> None:
    async def test(w: World) -> None:
        w.target.script = ["[b]he", ending("llo")]
        result = await tandem(w, "generate", "hi", "--temperature", "0")
        assert (result.exit_code, result.stdout) == (0, "[b]hello\n")
        assert w.target.opens[-1].token_ids == TOKENIZER.encode("<s>user:hi<s>assistant:")
        await tandem(w, "generate", "hi", "--system", "be brief", "--max-tokens", "9")
        prompt = "<s>system:be brief<s>user:hi<s>assistant:"
        assert w.target.opens[-1].token_ids == TOKENIZER.encode(prompt)
        assert w.target.opens[-1].sampling.max_tokens == 9
        await tandem(w, "generate", "hi", "--raw", "--no-speculate", "--seed", "5")
        assert w.target.opens[-1].token_ids == TOKENIZER.encode("hi")
        assert w.target.opens[-1].sampling.seed == 5
        assert w.target.opens[-1].lookahead == 0

    in_world(test, draft_address="127.0.0.1:1")


def test_generate_can_show_origins_and_figures() -> None:
    async def test(w: World) -> None:
        w.target.script = ["he", ending("llo", num_stale=1)]
        result = await tandem(w, "generate", "hi", "--show-drafts", "--stats", "--seed", "5")
        assert result.exit_code == 0
        assert "hello" in result.stdout
        assert "seed 5, coupled, tiny" in result.stdout
        assert "delivered 5" in result.stdout

    in_world(test)


def test_errors_are_one_line() -> None:
    async def test(w: World) -> None:
        result = await tandem(w, "generate", "hi", "--top-p", "2")
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr == "tandem: sampling.top_p: is 2.0, must be above 0, at most 1\n"

    in_world(test)


def test_status_shows_the_peers() -> None:
    async def test(w: World) -> None:
        result = await tandem(w, "status")
        assert result.exit_code == 0
        assert f"target  {w.target.address}  ready  tiny" in " ".join(result.stdout.splitlines())

    in_world(test)


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


def test_a_process_that_ends_early_is_reported(stub: str) -> None:
    with pytest.raises(StackError, match="stub has ended with code 3 before it served"):
        ServiceProcess(stub, ["--fail"]).wait_until_serving(20)


def test_every_core_is_somebodys() -> None:
    target, others = share_cores()
    assert target
    assert others


def test_a_stack_stops_what_it_started_when_a_part_fails() -> None:
    stack = LocalStack(draft="none", target_args=["--no-such-flag"])
    with pytest.raises(StackError, match="target has ended with code 2"), stack:
        pass
    assert stack.target is not None
    assert stack.target.exit_code == 2


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
