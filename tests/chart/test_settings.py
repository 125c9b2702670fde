"""The services take what the chart gives them: arguments, environment and config.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import ServiceConfig, parse
from draft_service.config import DraftConfig
from gateway.config import GatewayConfig
from target_service.config import TargetConfig
from tests.chart.rendering import (
    CONFIG_PATH,
    INSTALLS,
    SERVICES,
    Object,
    config,
    config_text,
    containers,
    render,
)

KINDS: dict[str, type[ServiceConfig]] = {
    "gateway": GatewayConfig,
    "target": TargetConfig,
    "draft": DraftConfig,
}
# What everything-on says above the file.
FLAGS = {
    "--max-live-requests=500": ("max_live_requests", 500),
    "--max-waiting=2048": ("max_waiting", 2048),
}


def _argv(objects: list[Object], deployment: Object, folder: Path) -> list[str]:
    """The container's arguments, its config.toml in a folder here."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    component = deployment["metadata"]["labels"]["app.kubernetes.io/component"]
    assert container["command"] == ["python", "-m", SERVICES[component]]
    file = folder / f"{deployment['metadata']['name']}.toml"
    file.write_text(config_text(objects, deployment))
    return [str(file) if arg == CONFIG_PATH else arg for arg in container["args"]]


@pytest.mark.parametrize("install", INSTALLS)
def test_every_service_takes_its_settings(install: str, tmp_path: Path) -> None:
    objects = render(install)
    for deployment, container in containers(objects):
        argv = _argv(objects, deployment, tmp_path)
        environ = {e["name"]: e.get("value", "") for e in container["env"]}
        kind = KINDS[deployment["metadata"]["labels"]["app.kubernetes.io/component"]]
        made = parse(kind, argv, environ)
        over: dict[str, float] = dict(FLAGS[arg] for arg in argv if arg in FLAGS)
        if "TANDEM_PREFILL_MS" in environ:
            over["prefill_ms"] = 40.0
        for key, value in (config(objects, deployment) | over).items():
            said = ",".join(value) if isinstance(value, list) else value
            assert getattr(made, key) == said, (deployment["metadata"]["name"], key)


@pytest.mark.parametrize("component", SERVICES)
def test_the_command_prints_what_it_was_given(component: str, tmp_path: Path) -> None:
    objects = render("several-drafts-values")
    deployment = next(
        d
        for d, _ in containers(objects)
        if d["metadata"]["labels"]["app.kubernetes.io/component"] == component
    )
    argv = _argv(objects, deployment, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", SERVICES[component], *argv, "--print-config"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f'pool = "{config(objects, deployment)["pool"]}"  # file' in done.stdout


@pytest.mark.parametrize("component", SERVICES)
def test_a_misspelt_setting_is_the_services_to_refuse(component: str, tmp_path: Path) -> None:
    where = {
        "gateway": "gateway: {%s}",
        "target": "targets: {pools: {main: {%s}}}",
        "draft": "drafts: {pools: {ngram: {%s}}}",
    }[component]
    objects = render("minimal-cpu-values", where % "settings: {lokahead: 4, max_row: 4}")
    for deployment, _ in containers(objects):
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] == component:
            with pytest.raises(SystemExit) as ended:
                parse(KINDS[component], _argv(objects, deployment, tmp_path), {})
            assert "is no setting of the " + component in str(ended.value)
