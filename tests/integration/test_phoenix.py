"""Arize Phoenix takes our traces as they are.

Needs arize-phoenix, here or in another environment that PHOENIX_PYTHON names:

    python -m venv /tmp/phoenix && /tmp/phoenix/bin/pip install arize-phoenix
    PHOENIX_PYTHON=/tmp/phoenix/bin/python python -m pytest tests/integration/test_phoenix.py
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.processes import LocalStack
from gateway.client import Client
from tests.integration.stacks import tiny_model


def _python() -> str:
    """An interpreter that has Phoenix; empty if there is none."""
    if named := os.environ.get("PHOENIX_PYTHON"):
        return named
    try:
        metadata.version("arize-phoenix")
    except metadata.PackageNotFoundError:
        return ""
    return sys.executable


PYTHON = _python()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON, reason="needs arize-phoenix; see this file for how"),
]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError, TimeoutError, json.JSONDecodeError):
        return None


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of its API and of its OTLP/gRPC endpoint."""
    folder = tmp_path_factory.mktemp("phoenix")
    port, otlp = _free_port(), _free_port()
    env = os.environ | {
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(otlp),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [PYTHON, "-m", "phoenix.server.main", "serve"],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            api = f"http://127.0.0.1:{port}/v1"
            deadline = time.monotonic() + 120
            while _get(f"{api}/projects") is None:
                assert server.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.5)
            yield api, f"http://127.0.0.1:{otlp}"
        finally:
            server.terminate()
            server.wait(20)


def test_a_request_is_one_connected_tree(phoenix: tuple[str, str], tmp_path: Path) -> None:
    api, endpoint = phoenix
    model = tiny_model(tmp_path)
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "250"}
    with LocalStack(
        model=model,
        draft=model,
        target_args=["--num-kv-tokens=1024"],
        draft_args=["--num-kv-tokens=1024"],
        env=env,
    ) as stack:
        with Client(stack.gateway_address) as client:
            answer = client.generate([5, 6, 7, 8], max_tokens=24, ignore_eos=True, temperature=0.0)
        steps = answer.finished.speculation.steps
        deadline = time.monotonic() + 30
        spans: list[Any] = []
        while time.monotonic() < deadline:
            found = _get(f"{api}/projects/default/spans?limit=1000")
            spans = found["data"] if found else []
            names = [span["name"] for span in spans]
            if names.count("target.verify") >= steps and any("/" in name for name in names):
                break
            time.sleep(0.5)
    assert names.count("target.verify") == steps
    assert {"target.session", "target.sequence", "target.prefill"} <= set(names)
    assert {"draft.session", "draft.sequence", "draft.propose"} <= set(names)
    assert len({span["context"]["trace_id"] for span in spans}) == 1
    known = {span["context"]["span_id"] for span in spans}
    roots = [span for span in spans if span["parent_id"] not in known]
    assert [span["name"] for span in roots] == ["tandem.v1.GatewayService/Generate"]
    told = json.dumps(roots[0]["attributes"])
    assert answer.started.request_id in told
