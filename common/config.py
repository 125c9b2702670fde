"""Settings that every service has, and the flags that set them.

Configuration is a frozen dataclass built in `__main__` and passed to constructors. Every
flag is a field with its help beside it; `parse` makes the command line from the dataclass.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from common.errors import ConfigurationError

C = TypeVar("C", bound="ServiceConfig")
MAX_PORT = 65535


def flag(default: Any, text: str, **options: Any) -> Any:
    """A dataclass field that is also a flag; options go to argparse (choices, metavar)."""
    return field(default=default, metadata={"help": text, **options})


@dataclass(frozen=True)
class ServiceConfig:
    """What every service is told."""

    name: str = field(default="service", init=False)  # set by each service's subclass
    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = flag(0, "port to listen on; 0 takes a free one, printed at start")
    drain_seconds: float = flag(30.0, "how long running requests may finish after SIGTERM")
    log_level: str = flag(
        "warning", "least level that is logged", choices=("debug", "info", "warning", "error")
    )
    log_format: str = flag(
        "text", "text: lines to read; json: an object a line", choices=("text", "json")
    )
    metrics_port: int = flag(0, "port that answers Prometheus; 0: none")
    pool: str = flag("default", "name of the group of services this one belongs to, for metrics")
    cores: str = flag("", "CPU cores for this process, such as 0-2 or 0,2; empty: all")


@dataclass(frozen=True)
class ModelConfig:
    """What a service that runs a model is told besides."""

    model: str = flag("", "hub id, folder or .gguf file; empty: the packaged SmolLM2-135M-Instruct")
    model_name: str = flag("", "what clients call the model; empty: the last part of --model")
    dtype: str = flag(
        "auto",
        "number format of weights and KV cache; auto: as the weights are stored",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
    )
    backend: str = flag(
        "auto",
        "native: the C++ step (bfloat16 on CPU); torch: the model's own modules, with the best"
        " attention there is; reference: with torch's attention; auto: native where model and"
        " machine allow, else torch",
        choices=("auto", "native", "torch", "reference"),
    )
    device: str = flag("cpu", "where the model runs, as torch names devices")
    threads: int = flag(0, "threads for torch; 0: one for each of the process's cores")
    num_kv_tokens: int = flag(0, "size of the KV cache in tokens; 0: four whole contexts")
    block_size: int = flag(16, "tokens in a block of the KV cache")
    prefix_cache: bool = flag(True, "keep what was read of prompts for others that begin alike")
    cache_dir: str = flag("~/.cache/tandem", "where converted models are kept")


def check_address(address: str, field: str) -> str:
    """The address if it is HOST:PORT; raises `ConfigurationError` naming the field if not."""
    if "://" in address:
        scheme = address.partition("://")[0]
        raise ConfigurationError(
            f'is "{address}", must be HOST:PORT without {scheme}://', field=field
        )
    found = re.fullmatch(r"(?:[^\s:/\[\]]+|\[[^\s/\[\]]+\]):(\d{1,5})", address)  # [::1]:7070 too
    if found is None or not 1 <= int(found[1]) <= MAX_PORT:
        raise ConfigurationError(f'is "{address}", must be HOST:PORT', field=field)
    return address


def prepare_process(cores: str, threads: int = 0) -> None:
    """Bind to cores and set up OpenMP; to be called before torch is imported.

    OpenMP reads its environment when it is loaded. Idle threads sleep instead of spinning:
    two processes whose threads spin on the same cores slow each other 10 to 50 times.
    """
    num_cores = pin_to_cores(cores)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(threads or num_cores)


def parse(kind: type[C], argv: list[str] | None = None) -> C:
    """The configuration that a command line asks for; exits with the reason if it is wrong."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {kind.__module__.split('.')[0]}",
        description=kind.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    types = get_type_hints(kind)
    for f in dataclasses.fields(kind):
        if not f.init:
            continue
        options = dict(f.metadata)
        name = "--" + f.name.replace("_", "-")
        if types[f.name] is bool:
            parser.add_argument(
                name, action=argparse.BooleanOptionalAction, default=f.default, **options
            )
        else:
            read = _port if f.name.endswith("port") else types[f.name]
            parser.add_argument(name, type=read, default=f.default, **options)
    values = vars(parser.parse_args(argv))
    try:
        return kind(**values)
    except ConfigurationError as error:
        sys.exit(f"tandem {kind.name}: {error}")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"is {text}, must be 0 to {MAX_PORT}")
    return int(text)


def pin_to_cores(cores: str) -> int:
    """Bind this process to cores such as "0-2,5"; returns how many it may use.

    Exits with a usage message if the text can't be read or names a core that is not there.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS has no way to bind
        return os.cpu_count() or 1
    if not cores:
        return len(os.sched_getaffinity(0))
    try:
        chosen: set[int] = set()
        for part in cores.split(","):
            first, _, last = part.partition("-")
            chosen.update(range(int(first), int(last or first) + 1))
        os.sched_setaffinity(0, chosen)
        if missing := chosen - os.sched_getaffinity(0):  # the kernel takes what is there
            raise ValueError(f"no core {min(missing)} for this process")
    except (ValueError, OSError) as error:
        sys.exit(f"--cores: {cores!r} does not name cores of this machine, such as 0-1 ({error})")
    return len(chosen)
