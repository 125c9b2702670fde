"""Compiles the kernels, once for each version of their source; `make install` calls it.

The libraries have plain C interfaces: no torch headers, a few seconds to compile. The native
step needs AVX512-BF16; attention takes what the processor has, of any kind.
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

# Sources of a library: what is compiled, then what it includes.
_HEADERS = ("avx512.h", "threads.h", "model.h", "products.h", "softmax.h", "choose.h")
STEP = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", *_HEADERS))
ATTENTION = tuple(Path(__file__).with_name(name) for name in ("attention.cpp", "numbers.h"))
PLAIN = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w")
FLAGS = (
    *PLAIN,
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
    *("-mamx-tile", "-mamx-bf16"),
)
NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
# Products are added as one operation wherever the processor can: everywhere or nowhere.
ATTENTION_FLAGS = (*PLAIN, "-ffp-contract=fast")
# What the processor must say it can, and the flags that use it; the best first.
LEVELS = (
    ({"avx512f", "fma", "f16c"}, ("-mavx512f", "-mfma", "-mf16c")),
    ({"avx2", "fma", "f16c"}, ("-mavx2", "-mfma", "-mf16c")),
    (set[str](), ()),
)


def processor_flags() -> set[str]:
    """What the processor says it can do; empty where nobody says."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        return set()
    lines = (x for x in cpuinfo.read_text().splitlines() if x.startswith("flags"))
    return set(next(lines, "").partition(":")[2].split())


def library(cache_dir: str) -> tuple[ctypes.CDLL | None, str]:
    """The compiled kernels of the native step, or None and why there are none."""
    if missing := NEEDED - processor_flags():
        return None, f"the processor lacks {', '.join(sorted(missing))}"
    return _compiled(STEP, FLAGS, cache_dir)


def attention_library(
    cache_dir: str, flags: set[str] | None = None
) -> tuple[ctypes.CDLL | None, str]:
    """The compiled attention for a processor with such flags (None: this one), or why not."""
    flags = processor_flags() if flags is None else flags
    best = next(options for needed, options in LEVELS if needed <= flags)
    return _compiled(ATTENTION, (*ATTENTION_FLAGS, *best), cache_dir)


def prebuild() -> list[Path]:
    """Compile into the folder of the sources, where they are looked for first; what was made.

    For images: nothing is compiled where they run, and a volume may hide what was in the cache.
    All levels are made: this machine's processor is not the one it will run on. Raises `OSError`
    if something can't be compiled.
    """
    wanted: list[tuple[tuple[Path, ...], tuple[str, ...]]]
    wanted = [(ATTENTION, ATTENTION_FLAGS)]
    if platform.machine() == "x86_64":
        levels = [options for _, options in LEVELS]
        wanted = [(ATTENTION, (*ATTENTION_FLAGS, *options)) for options in levels]
        wanted.append((STEP, FLAGS))
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("there is no C++ compiler (g++ or clang++)")
    paths = []
    for sources, flags in wanted:
        path = sources[0].with_name(_name(sources, flags))
        if error := _compile(compiler, sources[0], flags, path):
            raise OSError(f"{Path(compiler).name} could not compile {sources[0].name}: {error}")
        os.chmod(path, 0o755)  # another user loads it
        paths.append(path)
    return paths


def _compiled(
    sources: tuple[Path, ...], flags: tuple[str, ...], cache_dir: str
) -> tuple[ctypes.CDLL | None, str]:
    """The library of the first source; the others are what it includes."""
    source = sources[0]
    path = source.with_name(_name(sources, flags))  # an image brings it along
    if not path.exists():
        path = Path(cache_dir).expanduser() / "native" / path.name
    if not path.exists():
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            return None, "there is no C++ compiler (g++ or clang++)"
        if error := _compile(compiler, source, flags, path):
            return None, f"{Path(compiler).name} could not compile {source.name}: {error}"
    return ctypes.CDLL(str(path)), ""


def _name(sources: tuple[Path, ...], flags: tuple[str, ...]) -> str:
    told = b"".join(s.read_bytes() for s in sources)
    digest = hashlib.sha256(told + " ".join(flags).encode()).hexdigest()[:12]
    return f"{sources[0].stem}-{digest}.so"


def _compile(compiler: str, source: Path, flags: tuple[str, ...], path: Path) -> str:
    """Compile into path; returns the first line of what went wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, fresh = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    command = [compiler, *flags, str(source), "-o", fresh]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        os.rename(fresh, path)  # another process may have been faster, with the same bytes
        return ""
    os.unlink(fresh)
    return done.stderr.strip().partition("\n")[0]
