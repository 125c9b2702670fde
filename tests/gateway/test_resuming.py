"""Resuming: what was delivered before the break and what comes after it make the whole text."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gateway
from common.errors import InvalidRequestError, UnavailableError
from common.types import FinishReason, Verdict
from gateway.client import Client, Delta, Finished, Started
from gateway.text import TextStream
from tests.gateway.fakes import EOS, TOKENIZER, World, ending, in_world, until, verdicts
from tests.gateway.test_text import SENTENCEPIECE, SENTENCEPIECE_IDS, TEXTS

STOPS = st.lists(st.text("ab é😀", min_size=1, max_size=4), max_size=3)


def run(stream: TextStream, ids: list[int], reason: FinishReason) -> list[Delta]:
    """The deltas of ids that come one by one, up to a stop string."""
    deltas = []
    for i, token_id in enumerate(ids):
        if stream.stop is None:
            last = reason if i == len(ids) - 1 else None
            deltas.append(stream.take(Verdict(0, 0, 0, 0, (token_id,), finish_reason=last)))
    return deltas


def check_resumed_anywhere(
    tokenizer: Any, prompt: list[int], ids: list[int], stops: list[str], reason: FinishReason
) -> None:
    """Wherever the stream breaks, the two parts of the text are the undisturbed one."""
    whole = run(TextStream(tokenizer, prompt, stops), ids, reason)
    text = "".join(delta.text for delta in whole)
    undisturbed = TextStream(tokenizer, prompt, stops)
    run(undisturbed, ids, reason)
    for cut in range(len(whole)):  # a prefix that ends the text is refused before
        before = "".join(delta.text for delta in whole[:cut])
        stream = TextStream(tokenizer, prompt, stops, prefix=ids[:cut])
        assert stream.stop is None
        after = run(stream, ids[cut:], reason)
        assert before + "".join(delta.text for delta in after) == text
        assert stream.stop == undisturbed.stop
        assert [delta.text_ends for delta in after] == [delta.text_ends for delta in whole[cut:]]
        assert stream.num_delivered == len(whole) - cut


@given(
    prompt=TEXTS,
    output=st.one_of(TEXTS, st.text("ab é😀", max_size=20)),
    stops=STOPS,
    reason=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP_TOKEN]),
)
@example("", "a👩‍👩‍👧b", ["👧b"], FinishReason.LENGTH)
@example("x", "ab ab é", ["ab é"], FinishReason.STOP_TOKEN)
@example("x", "aaaab", ["aab", "aaa é"], FinishReason.LENGTH)
def test_a_text_may_break_anywhere(
    prompt: str, output: str, stops: list[str], reason: FinishReason
) -> None:
    ids = [*TOKENIZER.encode(output), EOS]
    check_resumed_anywhere(TOKENIZER, list(TOKENIZER.encode(prompt)), ids, stops, reason)


@given(
    prompt=SENTENCEPIECE_IDS,
    ids=SENTENCEPIECE_IDS,
    stops=st.lists(st.text("a th", min_size=1, max_size=3), max_size=2),
    reason=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP_TOKEN]),
)
def test_a_text_of_byte_tokens_may_break_anywhere(
    prompt: list[int], ids: list[int], stops: list[str], reason: FinishReason
) -> None:
    check_resumed_anywhere(SENTENCEPIECE, prompt, ids, stops, reason)


def test_a_resumed_request_goes_on_where_it_was() -> None:
    prompt, prefix = TOKENIZER.encode("ab"), TOKENIZER.encode("one, tw")

    async def test(w: World) -> None:
        w.target.script = [ending("o.")]
        events = await w.stream("ab", output_prefix_ids=prefix, seed=5, max_tokens=20)
        opened = w.target.opens[0]
        assert (opened.token_ids, opened.num_prompt) == (prompt + prefix, len(prompt))
        assert (opened.sampling.max_tokens, opened.sampling.seed) == (20, 5)
        started, finished = events[0], events[-1]
        assert isinstance(started, Started)
        assert (started.num_prompt_tokens, started.num_prefix_tokens) == (2, 7)
        assert w.text(events) == "o."
        assert isinstance(finished, Finished)
        usage = finished.usage
        assert (usage.prompt, usage.delivered, usage.discarded) == (2, 2, 0)
        fresh = await w.stream("ab")
        assert fresh[0].num_prefix_tokens == 0

    in_world(test)


def test_what_the_prefix_holds_back_comes_after_it() -> None:
    async def test(w: World) -> None:
        smile = TOKENIZER.encode("a😀")
        w.target.script = [Verdict(0, 0, 0, 0, smile[3:]), ending("b")]
        answer = await w.client.generate("x", output_prefix_ids=smile[:3])
        assert answer.text == "😀b"
        begun = TOKENIZER.encode("say st")
        w.target.script = ["o", ending("p")]
        answer = await w.client.generate("x", output_prefix_ids=begun, stop=("stop",))
        assert (answer.text, answer.finished.stop) == ("", "stop")
        assert answer.finished.usage.delivered == 2
        w.target.script = ["e", ending("p")]
        answer = await w.client.generate("x", output_prefix_ids=begun, stop=("stop",))
        assert answer.text == "step"

    in_world(test)


def test_a_prefix_that_has_ended_is_refused_by_its_token() -> None:
    async def test(w: World) -> None:
        ids = TOKENIZER.encode("no stop here")
        with pytest.raises(InvalidRequestError) as caught:
            await w.client.generate("x", output_prefix_ids=ids, stop=("stop",))
        assert caught.value.field == "output_prefix_ids[6]"

    in_world(test)


def documented() -> str:
    """The example of gateway/README.md."""
    readme = (Path(gateway.__file__).parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(ids = .*?)```", readme, re.DOTALL)
    return str(example)


def test_the_documented_way_to_resume_works() -> None:
    def use(address: str, pieces: list[str]) -> None:
        def take(text: str, **_: Any) -> None:
            pieces.append(text)

        with Client(address) as client:
            names = {"client": client, "prompt": "ab", "Delta": Delta, "time": time}
            exec(documented(), names | {"UnavailableError": UnavailableError, "print": take})

    async def test(w: World) -> None:
        pieces: list[str] = []
        task = asyncio.create_task(asyncio.to_thread(use, w.address, pieces))
        await until(lambda: w.target.opens)
        w.target.say(*verdicts(w.target.opens[0], ["half a sm", "ile "]))
        await until(lambda: len(pieces) == 2)
        await w.target.stop()
        w.target.opens.clear()
        w.target.script = [ending("and the rest")]
        await w.target.start()
        await task
        assert "".join(pieces) == "half a smile and the rest"
        assert w.target.opens[-1].token_ids == TOKENIZER.encode("abhalf a smile ")

    in_world(test)
