"""Command lines of services: what is refused, and which flag is blamed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from common.config import ServiceConfig, check_address, parse
from common.errors import ConfigurationError
from draft_service.config import DraftConfig
from gateway.config import GatewayConfig


@pytest.mark.parametrize("kind", [GatewayConfig, DraftConfig])
@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_out_of_range_is_refused(
    kind: type[ServiceConfig], flag: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(kind, [f"{flag}={port}"])
    assert (
        f'argument {flag}: is "{port}", must be a whole number from 0 to 65535'
        in capsys.readouterr().err
    )
    assert parse(kind, [f"{flag}=65535"]) != kind()


@pytest.mark.parametrize(
    ("kind", "args", "says"),
    [
        (
            GatewayConfig,
            ["--target=http://a:1"],
            'gateway: --target: is "http://a:1", must be HOST:PORT without http://',
        ),
        (GatewayConfig, ["--draft=a"], 'gateway: --draft: is "a", must be HOST:PORT'),
        (GatewayConfig, ["--target=a:1,b"], 'gateway: --target[1]: is "b", must be HOST:PORT'),
        (GatewayConfig, ["--target=a:1,"], 'gateway: --target[1]: is "", must be HOST:PORT'),
        (
            GatewayConfig,
            ["--draft=a:1,b:2, a:1"],
            'gateway: --draft[2]: is "a:1", which is there already',
        ),
        (
            GatewayConfig,
            ["--failover-seconds=0"],
            "gateway: --failover-seconds: is 0.0, must be above 0",
        ),
        (DraftConfig, ["--model=a"], "draft: --model: needs --drafter model"),
    ],
)
def test_what_does_not_fit_ends_with_one_line(
    kind: type[ServiceConfig], args: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(kind, args)
    assert caught.value.code == f"tandem {says}"


def test_several_peers_are_told_apart() -> None:
    config = parse(GatewayConfig, ["--target=a:1, b:2", "--draft=c:3"])
    assert (config.targets, config.drafts) == (("a:1", "b:2"), ("c:3",))
    assert GatewayConfig().drafts == ()


def test_a_draft_model_with_its_drafter_is_taken() -> None:
    config = parse(DraftConfig, ["--model=a", "--drafter=model"])
    assert (config.model, config.drafter) == ("a", "model")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "gateway.here-or_there:65535", "[::1]:7070"])
def test_addresses(address: str) -> None:
    assert check_address(address, "--x") == address


@pytest.mark.parametrize("address", ["a", ":1", "a:", "a:0", "a:65536", "a b:1", "::1:1", "a:1/b"])
def test_no_addresses(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--x: is .*, must be HOST:PORT"):
        check_address(address, "--x")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="nothing to bind to")
def test_cores_that_are_not_there_are_refused() -> None:
    here = min(os.sched_getaffinity(0))
    code = "import sys; from common.config import pin_to_cores; print(pin_to_cores(sys.argv[1]))"

    def pin(cores: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, cores]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert pin(str(here)).stdout == "1\n"
    for cores in (f"{here},900", "900", "3-1", "x"):
        refused = pin(cores)
        assert refused.returncode == 1
        assert refused.stderr.startswith(
            f'tandem: --cores: "{cores}" does not name cores of this machine'
        )
