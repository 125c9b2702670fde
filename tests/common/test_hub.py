"""The token for the hub: read from a file, handed to the download, quoted nowhere."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from common.config import ModelConfig
from common.engine import hub
from common.engine.loader import resolve
from common.errors import ConfigurationError

TOKEN = "hf_abcXYZ0123456789"


class Hub:
    """Stands for the library's download; keeps what it was asked with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fails = folder, False
        self.asked: list[tuple[str, str | None]] = []

    def download(self, repo: str, *, allow_patterns: list[str], token: str | None) -> str:
        assert "*.safetensors" in allow_patterns
        self.asked.append((repo, token))
        if self.fails:
            raise OSError("401 Client Error: gated")
        return str(self.folder)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.download)
    return fake


def _config(token_file: Path | str) -> ModelConfig:
    return ModelConfig(model="house/model", hub_token_file=str(token_file))


@pytest.mark.parametrize("content", [TOKEN, f"{TOKEN}\n", f" {TOKEN} \r\n"])
def test_the_download_has_the_token_of_the_file(content: str, fake: Hub, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    assert resolve(_config(path)) == (tmp_path, "model")
    assert fake.asked == [("house/model", TOKEN)]


def test_without_a_file_the_hub_s_own_tools_look_for_one(fake: Hub) -> None:
    resolve(_config(""))
    assert fake.asked == [("house/model", None)]


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"two\nlines", b"\xff\xfe"])
def test_a_file_without_a_token_is_refused_unquoted(
    content: bytes, fake: Hub, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        resolve(_config(path))
    assert str(caught.value) == f"--hub-token-file: {path} must hold a token and nothing else"
    assert fake.asked == []


def test_a_token_file_that_is_not_there_is_refused(fake: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(_config(tmp_path / "none"))
    assert caught.value.field == "--hub-token-file"
    assert "none can't be read (No such file or directory)" in str(caught.value)
    assert fake.asked == []


def test_a_model_that_is_here_needs_no_token(fake: Hub, tmp_path: Path) -> None:
    config = ModelConfig(model=str(tmp_path), hub_token_file=str(tmp_path / "none"))
    assert resolve(config)[0] == tmp_path
    assert fake.asked == []


def test_what_the_hub_refuses_is_told_without_the_token(fake: Hub, tmp_path: Path) -> None:
    fake.fails = True
    path = tmp_path / "token"
    path.write_text(TOKEN)
    with pytest.raises(ConfigurationError, match="could not be had from the hub") as caught:
        hub.download("house/model", str(path))
    assert caught.value.field == "--model"
    assert TOKEN not in str(caught.value)
    assert "401" in str(caught.value)
