"""Where the compiled kernels are looked for."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from common.engine.native import build

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86_64"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package's folder with the source alone; the processor can do everything."""
    folder = tmp_path / "package"
    folder.mkdir()
    for name in ("FLAGS", "ATTENTION_FLAGS"):  # what comes of it is not run, so it need not be fast
        flags = tuple("-O0" if flag == "-O3" else flag for flag in getattr(build, name))
        monkeypatch.setattr(build, name, flags)
    for name in ("STEP", "ATTENTION"):
        copies = tuple(folder / source.name for source in getattr(build, name))
        for source, copy in zip(getattr(build, name), copies, strict=True):
            shutil.copy(source, copy)
        monkeypatch.setattr(build, name, copies)
    monkeypatch.setattr(build, "processor_flags", lambda: build.NEEDED)
    return folder


def test_an_image_brings_its_kernels_along(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build.prebuild()
    assert {*made} == {*package.glob("*.so")}
    assert len(made) == 1 + len(build.LEVELS)
    for path in made:
        assert path.stat().st_mode & 0o055 == 0o055  # another user's, on a read-only root
    monkeypatch.setenv("PATH", "")  # no compiler where the image runs
    cache = tmp_path / "cache"
    loaded, reason = build.library(str(cache))
    assert reason == ""
    assert loaded is not None
    assert Path(loaded._name) in made
    for flags in (set[str](), {"avx2", "fma", "f16c"}, {"avx512f", "fma", "f16c"}):
        loaded, reason = build.attention_library(str(cache), flags)
        assert loaded is not None, reason
        assert Path(loaded._name) in made
    assert not cache.exists()


def test_kernels_of_another_source_are_not_taken(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in (build.STEP[0], build.ATTENTION[0]):
        source.write_text("int number;")
    build.prebuild()
    build.STEP[0].write_text("int number;  // changed")
    monkeypatch.setenv("PATH", "")
    loaded, reason = build.library(str(tmp_path / "cache"))
    assert loaded is None
    assert "no C++ compiler" in reason


def test_building_an_image_fails_where_nothing_can_be_compiled(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.ATTENTION[0].write_text("int number;")
    build.STEP[0].write_text("int broken(")
    with pytest.raises(OSError, match="could not compile"):
        build.prebuild()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="no C\\+\\+ compiler"):
        build.prebuild()
    assert not list(package.glob("kernels-*.so"))
