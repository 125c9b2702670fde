"""Settings that every service has.

Configuration is a frozen dataclass built in `__main__` and passed to constructors. Every
setting is a field with its help beside it; `parse` fills the dataclass from flags, environment
and a file (`settings.py`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common import settings
from common.errors import ConfigurationError

C = TypeVar("C", bound="ServiceConfig")


def flag(default: Any, text: str, *, listed: bool = False, **options: Any) -> Any:
    """A dataclass field that is also a setting; options go to argparse (choices, metavar).

    listed: its values are separated by commas, and a file may say them as an array.
    """
    return field(default=default, metadata={"help": text, "listed": listed, **options})


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
    health_port: int = flag(0, "port that answers health probes and nothing else; 0: none")
    pool: str = flag("default", "name of the group of services this one belongs to, for metrics")
    cores: str = flag("", "CPU cores for this process, such as 0-2 or 0,2; empty: all")
    origins: Mapping[str, settings.Origin] = field(  # set by `parse`; defaults have none
        default_factory=dict, repr=False, compare=False
    )

    def named(self, setting: str) -> str:
        """What an error calls a setting: as it was set, else by its flag."""
        if origin := self.origins.get(setting):
            return origin.named(setting)
        return "--" + setting.replace("_", "-")

    def told(self, error: ConfigurationError) -> str:
        """An error's text; the setting that it names by its flag is named as it was set."""
        return settings.blamed(error, self.origins)


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
    quantization: str = flag(
        "none",
        "weights in few bits, in the native step: int8, or int4 (the output head stays int8)",
        choices=("none", "int8", "int4"),
    )
    allow_batch_dependent: bool = flag(
        False,
        "take the faster kernel for a row that is alone; with drafts, texts may then differ by"
        " rounding",
    )
    device: str = flag("cpu", "where the model runs: cpu, cuda or cuda:N")
    threads: int = flag(0, "threads for torch; 0: one for each of the process's cores")
    num_kv_tokens: int = flag(
        0, "size of the KV cache in tokens; 0: four whole contexts, on CUDA what memory allows"
    )
    block_size: int = flag(0, "tokens in a block of the KV cache; 0: 16, on CUDA 256")
    gpu_memory_utilization: float = flag(
        0.9, "part of a GPU's memory for weights and KV cache, where --num-kv-tokens is 0"
    )
    cuda_graphs: bool = flag(True, "replay small steps from captured graphs on CUDA")
    prefix_cache: bool = flag(True, "keep what was read of prompts for others that begin alike")
    cache_dir: str = flag("~/.cache/tandem", "where converted models are kept")
    hub_token_file: str = flag(
        "", "file that holds the token for the hub; empty: what the hub's own tools find"
    )


def check_address(address: str, field: str) -> str:
    """The address if it is HOST:PORT; raises `ConfigurationError` naming the field if not."""
    if "://" in address:
        scheme = address.partition("://")[0]
        raise ConfigurationError(
            f'is "{address}", must be HOST:PORT without {scheme}://', field=field
        )
    found = re.fullmatch(r"(?:[^\s:/\[\]]+|\[[^\s/\[\]]+\]):(\d{1,5})", address)  # [::1]:7070 too
    if found is None or not 1 <= int(found[1]) <= settings.MAX_PORT:
        raise ConfigurationError(f'is "{address}", must be HOST:PORT', field=field)
    return address


def prepare_process(cores: str, threads: int = 0, named: str = "--cores") -> None:
    """Bind to cores and set up OpenMP; to be called before torch is imported.

    OpenMP reads its environment when it is loaded. Idle threads sleep instead of spinning:
    two processes whose threads spin on the same cores slow each other 10 to 50 times.
    """
    num_cores = pin_to_cores(cores, named)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(threads or num_cores)


def parse(
    kind: type[C], argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> C:
    """The configuration that flags, environment and a file ask for.

    argv None: the process's own flags; environ None: no environment. Exits with the reason if
    something is wrong, and after printing where it was only to print.
    """
    origins: dict[str, settings.Origin] = {}
    try:
        found, printed = settings.read(kind, kind.name, argv, environ or {})
        origins = {name: origin for name, (_, origin) in found.items()}
        values: dict[str, Any] = {name: value for name, (value, _) in found.items()}
        config = kind(**values, origins=origins)
    except ConfigurationError as error:
        sys.exit(f"tandem {kind.name}: {settings.blamed(error, origins)}")
    if printed:
        sys.stdout.write(settings.show(kind, kind.name, config, origins))
        sys.exit(0)
    return config


def pin_to_cores(cores: str, named: str = "--cores") -> int:
    """Bind this process to cores such as "0-2,5"; returns how many it may use.

    Exits with a message if the text, set by what `named` says, can't be read or names a core
    that is not there.
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
        sys.exit(
            f'tandem: {named}: "{cores}" does not name cores of this machine, such as 0-1 ({error})'
        )
    return len(chosen)
