"""The tokenizer out of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ConfigurationError, InvalidRequestError
from common.tokenizer import Tokenizer, fingerprint, read_files
from tests.gateway.fakes import EOS, FILES, TOKENIZER, tokenizer_files

HI = [{"role": "user", "content": "hi"}]


def test_files_of_a_folder(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert read_files(tmp_path) == FILES
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        read_files(tmp_path)


def test_the_fingerprint_tells_ids_apart_not_files() -> None:
    spaced = {"tokenizer.json": json.dumps(json.loads(FILES["tokenizer.json"])).encode()}
    assert spaced["tokenizer.json"] != FILES["tokenizer.json"]
    assert fingerprint(spaced) == fingerprint(FILES)
    other = json.loads(FILES["tokenizer.json"])
    other["added_tokens"][1]["content"] = "<end>"
    assert fingerprint({"tokenizer.json": json.dumps(other).encode()}) != fingerprint(FILES)


def test_unreadable_files_are_a_matter_of_configuration() -> None:
    for files in ({}, {"tokenizer.json": b"{"}, FILES | {"tokenizer_config.json": b"["}):
        with pytest.raises(ConfigurationError):
            Tokenizer(files)


def test_settings_of_a_training_run_do_not_cut_prompts() -> None:
    settings = json.loads(FILES["tokenizer.json"])
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    tokenizer = Tokenizer({"tokenizer.json": json.dumps(settings).encode()})
    assert len(tokenizer.encode("abcdef")) == 6


def test_special_tokens_have_no_text() -> None:
    assert TOKENIZER.encode("a</s>")[-1] == EOS
    assert TOKENIZER.decode(TOKENIZER.encode("a</s>b")) == "ab"


@pytest.mark.parametrize("form", ["file", "setting", "named", "map"])
def test_chat_templates_are_found_wherever_models_put_them(form: str) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": template}]
    files = {
        "file": tokenizer_files() | {"chat_template.jinja": template.encode()},
        "setting": tokenizer_files(chat_template=template),
        "named": tokenizer_files(chat_template=named),
        "map": tokenizer_files(chat_template=template, bos_token=None)
        | {"special_tokens_map.json": b'{"bos_token": "</s>"}'},
    }[form]
    expected = "</s>hi</s>" if form == "map" else "<s>hi</s>"
    if form == "map":  # the map is used where the settings are silent
        settings = json.loads(files["tokenizer_config.json"])
        del settings["bos_token"]
        files["tokenizer_config.json"] = json.dumps(settings).encode()
    assert Tokenizer(files).render_chat(HI) == TOKENIZER.encode(expected)


def test_chat_without_a_template_is_refused() -> None:
    tokenizer = Tokenizer({"tokenizer.json": FILES["tokenizer.json"]})
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.render_chat(HI)
    assert caught.value.field == "chat"


def test_a_template_can_do_no_harm() -> None:
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequestError):
        Tokenizer(tokenizer_files(chat_template=evil)).render_chat(HI)
