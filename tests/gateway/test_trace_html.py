"""The page: valid, self-contained, safe with any text, and with the right figures in it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from gateway.tracing import read
from gateway.tracing.html import page
from gateway.tracing.words import Words
from tests.gateway.fakes import TOKENIZER
from tests.gateway.traces import Step, TraceMaker, drafted, simple

VOID = {"meta", "link", "input", "br", "line", "rect", "path", "circle"}


class Page(HTMLParser):
    """Collects elements, and fails on what is not well-formed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    def main(self) -> dict[str, str]:
        return next(attrs for tag, attrs in self.elements if tag == "main")

    def tokens(self, kind: str) -> int:
        return sum(
            attrs.get("class") == f"t {kind}" and "data-round" in attrs
            for _, attrs in self.elements
        )


def made(t: TraceMaker, words: Words | None = None) -> tuple[str, Page]:
    request = read("t", t.read())
    text = page(request, (words or Words(TOKENIZER)).of(request))
    return text, Page(text)


def test_the_figures_are_in_the_dom() -> None:
    _, p = made(simple(drafted(12)))
    told = {name.removeprefix("data-"): value for name, value in p.main().items()}
    expected = {"tokens": 24, "delivered": 24, "discarded": 0, "prompt": 10, "steps": 12}
    expected |= {"tested": 20, "accepted": 12, "stale": 1, "undrafted-steps": 4, "drafted": 21}
    assert {name: told[name] for name in expected} == {n: str(v) for n, v in expected.items()}
    assert (told["request-id"], told["outcome"], told["complete"]) == ("req-1", "finished", "true")
    assert (p.tokens("accepted"), p.tokens("recovered"), p.tokens("bonus")) == (12, 4, 8)
    assert p.tokens("rejected") == 8
    parts = [(a["data-part"], a["data-seconds"]) for _, a in p.elements if "data-part" in a]
    assert parts == [
        ("queue", "0.002000"),
        ("prefill", "0.038000"),
        ("steps", "0.240000"),
        ("wire", "0.002000"),
        ("gateway", "0.003000"),
    ]


def test_the_picture_is_drawn_from_data_that_agrees() -> None:
    _, p = made(simple(drafted(12)))
    data = json.loads(p.scripts[0])
    assert len(data["rounds"]) == 12
    assert sum(len(r["tokens"]) for r in data["rounds"]) == 24
    assert sum(r["accepted"] for r in data["rounds"]) == 12
    assert [c["used"] for c in data["chains"]] == [[1], [2], [4], [5], [7], [8], [10], [11]]
    assert data["window"][1] - data["window"][0] < data["seconds"]


def test_nothing_is_fetched() -> None:
    text, p = made(simple(drafted(5)))
    for _, attrs in p.elements:
        for name in ("src", "href", "action", "srcset"):
            assert attrs.get(name, "data:,").startswith("data:"), attrs
    assert not re.search(r"https?://|@import|url\(", text)
    policy = [a["content"] for _, a in p.elements if a.get("http-equiv")]
    assert policy == [
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    ]


def test_any_text_stays_text() -> None:
    evil = TOKENIZER.encode("</script><img src=x onerror=alert(1)>&amp;{{json}}\"'\n")
    t = simple([Step((), tuple(evil))], request_id="<b>{{css}}</b>")
    text, p = made(t)
    assert "<img" not in text
    assert "<b>{{" not in text
    assert len(p.scripts) == 2
    assert p.main()["data-request-id"] == "<b>{{css}}</b>"
    assert json.loads(p.scripts[0])["rounds"][0]["tokens"][0]["text"] == "<"


def test_it_can_be_used_without_seeing_or_pointing() -> None:
    text, p = made(simple(drafted(5)))
    assert text.startswith('<!doctype html>\n<html lang="en">')
    ids = [a["id"] for _, a in p.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for tag, attrs in p.elements:
        if labelled := attrs.get("aria-labelledby"):
            assert labelled in ids
        if tag == "svg" and "id" in attrs:
            assert attrs["role"] == "img"
            assert attrs["aria-label"]
    assert sum(tag == "tr" for tag, _ in p.elements) == 6
    assert sum(tag == "h1" for tag, _ in p.elements) == 1


@pytest.mark.parametrize("services", [("target",), ("gateway",), ("draft",), ("gateway", "draft")])
def test_whatever_is_missing(services: tuple[str, ...]) -> None:
    request = read("t", simple(drafted(5)).read(*services))
    p = Page(page(request, Words().of(request)))
    assert p.main()["data-complete"] == "false"
    empty = read("t", [])
    Page(page(empty, ()))


def test_rounds_in_the_sums_are_counted() -> None:
    text, p = made(simple(drafted(512), summed=40))
    assert p.main()["data-steps"] == "552"
    assert "… and 40 more without a span" in text
    assert "40 rounds after the first 512" in text
    assert len(text) < 1_000_000
