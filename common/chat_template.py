"""Chat templates: the Jinja dialect that models ship, rendered without transformers.

A template comes with a model and is not trusted: it runs in Jinja's sandbox and sees plain
values only. The dialect is the one `transformers.apply_chat_template` documents; tests compare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class ChatTemplate:
    """A compiled template; raises `jinja2.TemplateError` if it can't be compiled."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": _now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self._template = environment.from_string(source)

    def render(
        self, messages: Iterable[Mapping[str, str]], special_tokens: Mapping[str, str]
    ) -> str:
        """The text of a conversation (role and content), up to where the assistant answers.

        Raises `jinja2.TemplateError` if the template refuses the messages.
        """
        return self._template.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; it adds nothing here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it as an instance's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body in a scope of its own, as if there were no tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]


class _Dict:
    """`dict` without the attributes of the type, which lead out of the sandbox."""

    fromkeys: Callable[..., dict[Any, Any]] = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace` that holds no name that Python itself gives a meaning."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.TemplateError(f"a namespace may not hold {name!r}: it begins with _")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
