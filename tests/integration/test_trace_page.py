"""The page of a real request: what a browser shows is what the client was told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from common.types import TokenOrigin
from gateway.cli.processes import LocalStack
from gateway.cli.viewing import Viewer
from gateway.client import Client, Generation, Message, Options
from gateway.tracing import Receiver, Store, read
from gateway.tracing.html import page
from gateway.tracing.words import Words, from_target
from tests.gateway.fakes import TOKENIZER
from tests.gateway.traces import drafted, simple
from tests.integration.chromium import needs_chromium, opened
from tests.integration.stacks import packaged_model

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), needs_chromium]
QUESTION = "Write a short Python class for a stack with push, pop and peek methods."


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[Store, LocalStack]]:
    store = Store()
    with (
        Receiver(store, "127.0.0.1:0") as receiver,
        LocalStack(
            model=packaged_model(),
            draft="ngram",
            target_args=["--num-kv-tokens=4096"],
            env=receiver.environment,
        ) as stack,
    ):
        yield store, stack


def ask(
    traced: tuple[Store, LocalStack], file: Path, options: Options
) -> tuple[Generation, Viewer]:
    """An answer, once its page has been written."""
    store, stack = traced
    with Client(stack.gateway_address) as client:
        answer = client.generate([Message("user", QUESTION)], options)
    assert stack.target is not None
    viewer = Viewer(store, Console(width=120), from_target(stack.target.address), file)
    request = viewer.wait_for(answer.started.request_id, 30)
    assert request is not None
    assert request.complete, request.missing
    viewer.show(request)
    return answer, viewer


@pytest.mark.parametrize("speculate", [True, False], ids=["drafted", "undrafted"])
def test_the_browser_shows_what_the_client_was_told(
    traced: tuple[Store, LocalStack], tmp_path: Path, speculate: bool
) -> None:
    file = tmp_path / "page.html"
    options = Options(temperature=0.7, seed=1, max_tokens=96, speculate=speculate)
    answer, _ = ask(traced, file, options)
    usage, spent = answer.finished.usage, answer.finished.speculation
    dom = opened(file)
    told = dom.by_id("request")
    expected = {
        "request-id": answer.started.request_id,
        "outcome": "finished",
        "complete": "true",
        "prompt": usage.prompt,
        "tokens": usage.delivered + usage.discarded,
        "delivered": usage.delivered,
        "discarded": usage.discarded,
        "steps": spent.steps,
        "undrafted-steps": spent.undrafted_steps,
        "drafted": spent.drafted,
        "tested": spent.tested,
        "accepted": spent.accepted,
        "stale": spent.stale,
    }
    assert {name: told[f"data-{name}"] for name in expected} == {
        name: str(value) for name, value in expected.items()
    }
    # Token by token, out of the target's own spans.
    tokens = [a for _, a in dom.elements if "data-token" in a]
    for kind, origin in (
        ("accepted", TokenOrigin.ACCEPTED),
        ("recovered", TokenOrigin.RECOVERED),
        ("bonus", TokenOrigin.BONUS),
    ):
        elements = [a for a in tokens if a["class"] == f"t {kind}"]
        assert len(elements) == answer.origins.count(origin), kind
    assert tuple(int(a["data-token"]) for a in tokens) == answer.token_ids
    if speculate:
        assert spent.accepted > 0
        assert spent.tested > spent.accepted
        rejected = [a for _, a in dom.elements if a.get("class") == "t rejected"]
        assert len(rejected) == spent.tested - spent.accepted
    # The picture was drawn, and the parts explain the duration.
    assert int(told["data-drawn"]) > 3
    parts = sum(float(a["data-seconds"]) for _, a in dom.elements if "data-part" in a)
    assert parts == pytest.approx(float(told["data-seconds"]), rel=0.05)


def test_a_long_request_is_windowed(traced: tuple[Store, LocalStack], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    options = Options(temperature=0.0, max_tokens=300, ignore_eos=True, speculate=False)
    answer, _ = ask(traced, file, options)
    told = opened(file).by_id("request")
    assert told["data-tokens"] == str(answer.finished.usage.delivered) == "300"
    assert told["data-steps"] == "300"
    assert 3 < int(told["data-drawn"]) < 40


ACTS = """
const press = (key) => fall.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const told = [];
const note = (what, value) => told.push(`${what}=${value}`);
const point = (type, target, more = {}) => target.dispatchEvent(
  new PointerEvent(type, { bubbles: true, clientX: 500, clientY: 500, ...more }));
const bar = (kind, index) =>
  fall.querySelector(`[data-kind="${kind}"][data-index="${index}"] rect`);
note("window", view.end - view.begin < T.seconds);
document.querySelector('[data-do="fit"]').click();
note("fit", view.begin === 0 && view.end === T.seconds);
draw();
point("pointermove", bar("round", 1));
note("tip", tip.textContent.includes("2 of 2 accepted"));
draw();
note("related", fall.querySelectorAll(".hit:not(.off)").length);
point("pointerleave", fall);
point("pointerdown", bar("chain", 0));
point("pointerup", document.body);
note("chain", detail.textContent.includes("consumed byround 2"));
detail.querySelector('[data-kind="round"]').click();
note("linked", chosen.kind + chosen.index);
press("ArrowRight");
note("next", chosen.index);
draw();
press("+");
note("zoomed", view.end - view.begin < T.seconds);
press("Escape");
note("free", chosen);
document.querySelector('#tokens [data-round="4"]').click();
note("token", chosen.index + "," + document.querySelectorAll("#tokens .on").length);
const before = view.begin;
point("pointerdown", fall, { clientX: 900 });
point("pointermove", document.body, { clientX: 300 });
point("pointerup", document.body, { clientX: 300 });
note("dragged", view.begin > before);
fall.dispatchEvent(new WheelEvent("wheel", { ctrlKey: true, deltaY: -30, cancelable: true }));
$("theme").click();
note("theme", document.documentElement.dataset.theme);
document.body.dataset.told = told.join(" ");
"""


def test_the_picture_answers_hand_and_keyboard(tmp_path: Path) -> None:
    request = read("t", simple(drafted(60)).read())
    text = page(request, Words(TOKENIZER).of(request))
    file = tmp_path / "page.html"
    file.write_text(text.replace("</body>", f"<script>{ACTS}</script></body>"), "utf-8")
    (body,) = [attrs for tag, attrs in opened(file).elements if tag == "body"]
    assert body["data-told"].split() == [
        "window=true",
        "fit=true",
        "tip=true",
        "related=3",
        "chain=true",
        "linked=round1",
        "next=2",
        "zoomed=true",
        "free=null",
        "token=4,3",
        "dragged=true",
        "theme=dark",
    ]
