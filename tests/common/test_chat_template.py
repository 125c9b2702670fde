"""Chat templates render as transformers renders them, and reach nothing outside."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from common.chat_template import ChatTemplate
from tests.integration.stacks import packaged_model

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = (
    {"role": "system", "content": "  Be <brief> & kind. "},
    {"role": "user", "content": "Größe?\n\nIs 'x' \"y\" 日本 {{ 1 }}"},
    {"role": "assistant", "content": "yes</s>"},
    {"role": "user", "content": ""},
)
# Each uses a part of the dialect in the way that models' own templates do.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nA default.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "slices and namespaces": (
        "{%- set ns = namespace(first=true, said='') -%}{{ bos_token }}\n"
        "{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% endif %}\n"
        "{%- for m in rest | default(messages) %}\n"
        "  {%- if not ns.first %}, {% endif %}{% set ns.first = false %}\n"
        "    {{- m.role | upper }}:{{ m.content.strip() | trim }}\n"
        "  {%- set ns.said = ns.said ~ m.role[0] %}\n"
        "{%- endfor %}[{{ ns.said }}]{{ eos_token }}"
    ),
    "blocks on lines of their own": (
        "{% for m in messages %}\n    {% if m.content %}\n  {{ m.content }}\n"
        "    {% else %}\n  nothing\n    {% endif %}\n{% endfor %}\nend\n"
    ),
    "tojson": (
        "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}"
        "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
        "{% if m.role == 'assistant' %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% set who = m.role %}{% if who == 'assistant' %}"
        "{%- generation -%} {{ who }}{{ m.content }}{% set who = 'changed' %}{% endgeneration %}"
        "{% endif %}{{ who }}{% endfor %}"
    ),
    "macros and dicts": (
        "{% macro turn(m, sep='|') %}{{ m.role }}{{ sep }}{{ m.content }}{% endmacro %}"
        "{% set names = dict(user='U', system='S') %}{% set ones = dict.fromkeys(['a'], 1) %}"
        "{% for m in messages %}{{ names.get(m.role, '?') }}{{ turn(m) }}{% endfor %}"
        "{% for k, v in (names | dictsort) %}{{ k }}{{ v }}{% endfor %}{{ ones }}"
    ),
    "what is not given": (
        "{% if tools %}tools{% endif %}{% if tools is none and documents is none %}none{% endif %}"
        "{% if enable_thinking is defined %}thinks{% endif %}{{ missing }}"
        "{% if messages[0].tool_calls %}calls{% endif %}"
    ),
}


def by_transformers(template: str, messages: tuple[dict[str, str], ...]) -> str:
    rendered: Any = render_jinja_template(
        [[dict(m) for m in messages]],
        chat_template=template,
        add_generation_prompt=True,
        **SPECIAL,
    )
    return str(rendered[0][0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_transformers_renders(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    texts = []
    for messages in (MESSAGES, MESSAGES[1:], MESSAGES[:1]):
        if name == "tojson" and len(messages) < 2:
            continue
        texts.append(template.render(messages, SPECIAL))
        assert texts[-1] == by_transformers(TEMPLATES[name], messages)
    assert all(texts)


def test_the_packaged_models_template() -> None:
    source = (Path(packaged_model()) / "chat_template.jinja").read_text()
    text = ChatTemplate(source).render(MESSAGES, SPECIAL)
    assert text == by_transformers(source, MESSAGES)
    assert text.endswith("<|im_start|>assistant\n")


def test_the_date_is_todays() -> None:
    days = {datetime.now().strftime("%d %b %Y")}
    text = ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(MESSAGES, SPECIAL)
    assert text in days | {datetime.now().strftime("%d %b %Y")}  # it may be midnight


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for m in messages %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__class__ }}{{ dict.mro()[-1] }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{% set _ = messages.append({}) %}",
        "{% set _ = messages[0].update(role='x') %}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ (1).to_bytes.__self__ }}{{ cycler.__init__.__globals__ }}",
    ],
)
def test_what_is_no_template_or_does_harm_is_refused(source: str) -> None:
    with pytest.raises((jinja2.TemplateError, OverflowError)):
        ChatTemplate(source).render(MESSAGES, SPECIAL)


def test_a_refusal_has_the_templates_own_words() -> None:
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(MESSAGES, SPECIAL)
