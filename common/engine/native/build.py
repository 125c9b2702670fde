"""Compiles the kernels, once for each version of their source; `make install` calls it.

The library has a plain C interface: no torch headers, two seconds to compile.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
    *("-mamx-tile", "-mamx-bf16"),
)
NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}


def processor_flags() -> set[str]:
    """What the processor says it can do; empty where nobody says."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        return set()
    lines = (x for x in cpuinfo.read_text().splitlines() if x.startswith("flags"))
    return set(next(lines, "").partition(":")[2].split())


def library(cache_dir: str) -> tuple[ctypes.CDLL | None, str]:
    """The compiled kernels, or None and why there are none."""
    if missing := NEEDED - processor_flags():
        return None, f"the processor lacks {', '.join(sorted(missing))}"
    path = _beside()
    if not path.exists():
        path = Path(cache_dir).expanduser() / "native" / path.name
    if not path.exists():
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            return None, "there is no C++ compiler (g++ or clang++)"
        error = _compile(compiler, path)
        if error:
            return None, f"{Path(compiler).name} could not compile the kernels: {error}"
    return ctypes.CDLL(str(path)), ""


def prebuild() -> str:
    """Compile into the folder of the source, where `library` looks first; returns what came of it.

    For images: nothing is compiled where they run, and a volume may hide what was in the cache.
    This machine's processor need not be able to run it. Raises `OSError` if it can't be compiled.
    """
    if platform.machine() != "x86_64":
        return f"not compiled: there are no kernels for {platform.machine()}"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("there is no C++ compiler (g++ or clang++)")
    if error := _compile(compiler, _beside()):
        raise OSError(f"{Path(compiler).name} could not compile the kernels: {error}")
    os.chmod(_beside(), 0o755)  # another user loads it
    return f"compiled into {_beside()}"


def _beside() -> Path:
    """Where an image has the library of this source and these flags."""
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:12]
    return SOURCE.with_name(f"kernels-{digest}.so")


def _compile(compiler: str, path: Path) -> str:
    """Compile into path; returns the first line of what went wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, fresh = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    command = [compiler, *FLAGS, str(SOURCE), "-o", fresh]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        os.rename(fresh, path)  # another process may have been faster, with the same bytes
        return ""
    os.unlink(fresh)
    return done.stderr.strip().partition("\n")[0]
