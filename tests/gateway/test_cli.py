"""The command line."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import common
from common.config import ModelConfig
from common.types import EngineStatus, FinishReason, TopLogprobs, Verdict
from gateway.cli import app, commands, render
from gateway.types import (
    Finished,
    GatewayStatus,
    GenerationTiming,
    PeerKind,
    PeerState,
    PeerStatus,
    SpeculationFigures,
    Usage,
)
from tests.gateway.fakes import (
    DRAFT_MODEL,
    TARGET_MODEL,
    TOKENIZER,
    World,
    ending,
    in_world,
    until,
)


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


def test_generate_asks_for_what_the_flags_say() -> None:
    async def test(w: World) -> None:
        w.target.script = [ending("hello")]
        result = await tandem(
            w,
            *("generate", "hi", "--raw", "--repetition-penalty", "1.5", "--presence-penalty", "-1"),
            *("--frequency-penalty", "0.5", "--logit-bias", "7=-2.5", "--logit-bias", "3=4"),
            *("--min-tokens", "2", "--logprobs", "0", "--cache-salt", "mine"),
        )
        assert result.exit_code == 0
        opened = w.target.opens[-1]
        sampling = opened.sampling
        assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, -1.0)
        assert (sampling.frequency_penalty, sampling.min_tokens) == (0.5, 2)
        assert sampling.logit_bias == ((3, 4.0), (7, -2.5))
        assert sampling.num_logprobs == 0
        assert opened.cache_scope

    in_world(test)


def test_generate_shows_logprobs_as_a_table() -> None:
    ids = TOKENIZER.encode("hé")
    unknown = TOKENIZER.encode("z")[0]
    tops = tuple(TopLogprobs((i, unknown), (-0.25, -2.0)) for i in ids)
    told = Verdict(
        *(0, 0, 0, 0, ids),
        logprobs=(-0.25, -1.5, -0.125),
        top_logprobs=tops,
        finish_reason=FinishReason.STOP_TOKEN,
    )

    async def test(w: World) -> None:
        w.target.script = [replace(told, finish_reason=None), ending("!", logprobs=(-3.0,))]
        result = await tandem(w, "generate", "hi", "--logprobs", "2")
        lines = [line.split() for line in result.stdout.splitlines()]
        assert lines == [
            ["hé!"],
            ["token", "logprob", "likeliest"],
            ["'h'", "-0.25", "'h'", "-0.25,", str(unknown), "-2.00"],
            [str(ids[1]), "-1.50", str(ids[1]), "-0.25,", str(unknown), "-2.00"],
            ["'é'", "-0.12", "'é'", "-0.25,", str(unknown), "-2.00"],
            ["'!'", "-3.00"],
        ]

    in_world(test)


def test_several_texts_are_printed_one_after_the_other() -> None:
    async def test(w: World) -> None:
        w.target.script = ["he", ending("llo")]
        result = await tandem(w, "generate", "hi", "--n", "3", "--stats")
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert [lines[lines.index(f"[{i}]") + 1] for i in range(3)] == ["hello"] * 3
        names = [line.split()[1] for line in lines if line.startswith("request ")]
        assert names == [names[0], f"{names[0]}/1", f"{names[0]}/2"]

    in_world(test)


def test_errors_are_one_line() -> None:
    async def test(w: World) -> None:
        for args, says in (
            (["--top-p", "0"], "--top-p: is 0.0, must be above 0, at most 1"),
            (["--stop", "a", "--stop", ""], "--stop: is empty"),
            (
                ["--rule", "greedy"],
                "--rule: the greedy rule needs temperature 0;"
                " leave the rule out or set temperature 0",
            ),
            (
                ["--logit-bias", "7:3"],
                '--logit-bias: is "7:3", must be ID=BIAS, such as 42=-1.5',
            ),
            (["--logit-bias", "7=nan"], "--logit-bias: is nan, must be -100 to 100"),
            (
                ["--min-tokens", "9", "--max-tokens", "8"],
                "--min-tokens: is 9, must be 0 to 8, max_tokens",
            ),
            (
                ["--repetition-penalty", "0"],
                "--repetition-penalty: is 0.0, must be above 0, at most 10",
            ),
            (["--timeout", "0.2"], "gave up after 0.2 s (--timeout)"),
            (
                ["--gateway", "http://a:1"],
                '--gateway: is "http://a:1", must be HOST:PORT without http://',
            ),
            (
                ["--gateway", "127.0.0.1:1"],
                'no gateway at 127.0.0.1:1; start one with "tandem up"',
            ),
        ):
            result = await tandem(w, "generate", "hi", *args)
            assert result.exit_code == 1
            assert result.stdout == ""
            assert result.stderr == f"tandem: {says}\n"

    in_world(test)


@pytest.mark.parametrize(
    "args",
    [
        ("generate", "hi", "--seed", "-1"),
        ("generate", "hi", "--top-k", "-1"),
        ("generate", "hi", "--top-p", "2"),
        ("generate", "hi", "--temperature", "-1"),
        ("generate", "hi", "--max-tokens", "0"),
        ("generate", "hi", "--priority", "99999999999"),
        ("generate", "hi", "--lookahead", "-1"),
        ("generate", "hi", "--stop-token-id", "-5"),
        ("generate", "hi", "--rule", "lucky"),
        ("generate", "hi", "--n", "33"),
        ("generate", "hi", "--logprobs", "21"),
        ("generate", "hi", "--presence-penalty", "3"),
        ("chat", "--max-tokens", "0"),
        ("up", "--port", "70000"),
        ("up", "--dtype", "int3"),
        ("up", "--lookahead", "-1"),
    ],
)
def test_a_wrong_flag_is_blamed(args: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert f"'{args[-2]}'" in result.stderr


def test_number_formats_are_those_of_the_services() -> None:
    (dtype,) = [f for f in dataclasses.fields(ModelConfig) if f.name == "dtype"]
    assert tuple(commands.DtypeName) == dtype.metadata["choices"]


def test_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"tandem {common.__version__}\n")


def test_an_answer_that_is_cut_says_so() -> None:
    async def test(w: World) -> None:
        w.target.script = ["he", ending("llo")]
        result = await tandem(w, "generate", "hi")
        assert (result.stdout, result.stderr) == (
            "hello\n",
            "[cut at 5 tokens; see --max-tokens]\n",
        )
        w.target.script = ["he", ending("llo", FinishReason.STOP_TOKEN)]
        result = await tandem(w, "generate", "hi")
        assert result.stderr == ""

    in_world(test)


def test_an_error_begins_a_line() -> None:
    async def test(w: World) -> None:
        w.target.script = ["he"]
        result = await tandem(w, "generate", "hi", "--timeout", "0.5")
        assert result.stdout == "he\n"
        assert result.stderr == "tandem: gave up after 0.5 s (--timeout)\n"

    in_world(test)


def test_grpc_says_nothing_of_its_own() -> None:
    def stderr(first: str) -> str:
        code = f"import {first}, grpc; grpc.insecure_channel('')"
        env = {k: v for k, v in os.environ.items() if k != "GRPC_VERBOSITY"}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env).stderr

    assert "dns_resolver" in stderr("sys")
    assert "dns_resolver" not in stderr("gateway.cli")


def test_status_shows_the_peers() -> None:
    async def test(w: World) -> None:
        result = await tandem(w, "status")
        assert result.exit_code == 0
        assert f"target  {w.target.address}  ready  tiny" in " ".join(result.stdout.splitlines())

    in_world(test)


def _status_lines(*peers: PeerStatus, num_live: int = 0) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as capture:
        console.print(render.status(GatewayStatus("1", num_live, peers)))
    return [re.split(r" {2,}", line.strip()) for line in capture.get().splitlines()]


def test_status_in_words() -> None:
    exact = replace(TARGET_MODEL, row_invariant=True)
    busy, idle = EngineStatus(1, 2, 8, 6), EngineStatus(0, 0, 8, 8)
    ready = PeerStatus(PeerKind.TARGET, "a:1", PeerState.READY, model=exact, engine=busy)
    lines = _status_lines(
        replace(ready, round_trip_seconds=0.0015, num_sequences=3),
        replace(ready, model=TARGET_MODEL, engine=idle),
        PeerStatus(PeerKind.DRAFT, "a:2", PeerState.READY, model=DRAFT_MODEL),
        PeerStatus(PeerKind.DRAFT, "a:3", PeerState.CONNECTING, "connection refused"),
        num_live=1,
    )
    assert lines[0] == ["gateway 1, 1 live request"]
    assert [line[4:] for line in lines[2:4]] == [
        ["invariant", "3", "1.5 ms", "1 running, 2 waiting, 6/8 blocks free"],
        ["may round", "0", "-", "idle, 8/8 blocks free"],
    ]
    assert lines[4][4:] == ["-", "0", "-", "idle"]
    assert lines[5][2] == "connecting: connection refused"
    assert _status_lines(num_live=2)[0] == ["gateway 1, 2 live requests"]


def test_a_lost_peer_is_told_shortly() -> None:
    async def test(w: World) -> None:
        await w.target.stop()
        await until(lambda: "refused" in w.relay.status()[0].detail, "the loss", 10)
        assert w.relay.status()[0].detail == "connection refused"

    in_world(test)


def test_figures_count_places_from_the_first() -> None:
    spent = SpeculationFigures(steps=10, tested=30, accepted=23, accepted_per_position=(15, 7, 1))
    finished = Finished(
        FinishReason.LENGTH, Usage(4, delivered=30, discarded=3), spent, GenerationTiming()
    )
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as capture:
        console.print(render.stats(finished))
        console.print(render.figures([("x", finished)]))
    assert "accepted by place in the run  1st 15, 2nd 7, 3rd 1" in capture.get()
    assert "0 tested nothing; 3.30 tok/step" in capture.get()
    assert "first token" in capture.get()
