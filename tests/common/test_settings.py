"""Flags, environment, file, default: which one goes first, and who is blamed for what is wrong."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.config import ServiceConfig, flag, parse
from common.errors import ConfigurationError
from common.settings import Origin, Setting, settings_of, show
from draft_service.config import DraftConfig
from gateway.config import GatewayConfig
from target_service.config import TargetConfig

KINDS = [GatewayConfig, TargetConfig, DraftConfig]
EVERY = [(kind, s) for kind in KINDS for s in settings_of(kind)]
ADDRESSES = {"target", "draft"}


def _file(folder: Path, content: str) -> str:
    path = folder / "config.toml"
    path.write_text(content)
    return str(path)


def _refused(kind: type[ServiceConfig], args: list[str], environ: dict[str, str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(kind, args, environ)
    return str(caught.value.code)


def _other_than(setting: Setting, kind: type[ServiceConfig]) -> Any:
    """A value that the setting may have, and has not by default."""
    if setting.name in ADDRESSES and kind is GatewayConfig:
        return "a:1,b:2"
    if setting.name == "nameserver":
        return "10.0.0.2:53"
    if choices := setting.options.get("choices"):
        return next(c for c in reversed(choices) if c != setting.default)
    if setting.kind is bool:
        return not setting.default
    if setting.kind is str:
        return "other"
    return 0.5 if setting.kind is float else setting.default + 1


@pytest.mark.parametrize(("kind", "setting"), EVERY, ids=lambda x: getattr(x, "name", str(x)))
def test_every_setting_is_set_alike_from_everywhere(
    kind: type[ServiceConfig], setting: Setting, tmp_path: Path
) -> None:
    value = _other_than(setting, kind)
    text = str(value).lower() if setting.kind is bool else str(value)
    flags = [f"{setting.flag}={text}"]
    if setting.kind is bool:
        flags = [setting.flag if value else setting.flag.replace("--", "--no-", 1)]
    also = ["--drafter=model"] if kind is DraftConfig and setting.name == "model" else []
    path = _file(tmp_path, setting.to_toml(value))
    configs = {
        "flag": parse(kind, flags + also, {}),
        "environment": parse(kind, also, {setting.variable: text}),
        "file": parse(kind, [f"--config={path}", *also], {}),
    }
    for source, config in configs.items():
        assert getattr(config, setting.name) == value
        assert config.origins[setting.name].source == source
        assert config == configs["flag"] != kind()


@pytest.mark.parametrize("told", list(itertools.product((False, True), repeat=3)))
def test_a_flag_goes_before_the_environment_and_that_before_the_file(
    told: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    in_file, in_environment, by_flag = told
    path = _file(tmp_path, "port = 1\n" if in_file else "")
    environ = {"TANDEM_CONFIG": path} | ({"TANDEM_PORT": "2"} if in_environment else {})
    config = parse(TargetConfig, ["--port=3"] if by_flag else [], environ)
    sources = [i for i, is_told in enumerate(told, 1) if is_told]
    assert config.port == (sources[-1] if sources else TargetConfig().port)
    where = {1: f"{path}: port", 2: "TANDEM_PORT", 3: "--port"}
    assert config.named("port") == where[sources[-1] if sources else 3]


def test_no_environment_is_read_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_PORT", "x")
    assert parse(GatewayConfig, []) == GatewayConfig()


def test_a_file_may_say_lists_as_arrays(tmp_path: Path) -> None:
    path = _file(tmp_path, 'target = ["a:1", "b:2"]\ndraft = []\nsilence_seconds = 3\n')
    config = parse(GatewayConfig, [f"--config={path}"], {"TANDEM_DRAIN_SECONDS": "4"})
    assert (config.targets, config.drafts) == (("a:1", "b:2"), ())
    assert (config.silence_seconds, config.drain_seconds) == (3.0, 4.0)
    assert isinstance(config.silence_seconds, float)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("FALSE", False), ("0", False)]
)
def test_yes_and_no_in_the_environment(text: str, value: bool) -> None:
    assert parse(TargetConfig, [], {"TANDEM_PREFIX_CACHE": text}).prefix_cache is value


@pytest.mark.parametrize(
    ("kind", "environ", "says"),
    [
        (
            GatewayConfig,
            {"PORT": "x"},
            'TANDEM_PORT is "x", must be a whole number',
        ),
        (GatewayConfig, {"PORT": ""}, 'TANDEM_PORT is "", must be a whole number from 0 to 65535'),
        (
            GatewayConfig,
            {"HEALTH_PORT": "65536"},
            'TANDEM_HEALTH_PORT is "65536", must be a whole number',
        ),
        (
            GatewayConfig,
            {"PORT": "tcp://10.0.0.1:7070"},
            'TANDEM_PORT is "tcp://10.0.0.1:7070", must be a whole number from 0 to 65535;'
            " set enableServiceLinks: false where Kubernetes made it",
        ),
        (GatewayConfig, {"LOOKAHEAD": "2.5"}, 'TANDEM_LOOKAHEAD is "2.5", must be a whole number'),
        (GatewayConfig, {"LOOKAHEAD": "-1"}, "TANDEM_LOOKAHEAD is -1, must be 0 or more"),
        (GatewayConfig, {"DRAIN_SECONDS": "1m"}, 'TANDEM_DRAIN_SECONDS is "1m", must be a number'),
        (GatewayConfig, {"LOG_PROMPTS": "yes"}, 'TANDEM_LOG_PROMPTS is "yes", must be true or fal'),
        (
            GatewayConfig,
            {"LOG_FORMAT": "xml"},
            'TANDEM_LOG_FORMAT is "xml", must be text or json',
        ),
        (GatewayConfig, {"TARGET": "a:1,b"}, 'TANDEM_TARGET[1] is "b", must be HOST:PORT'),
        (DraftConfig, {"MODEL": "a"}, "TANDEM_MODEL: needs --drafter model"),
        (DraftConfig, {"SUPPORT": "0"}, "TANDEM_SUPPORT is 0, must be 1 or more"),
        (
            TargetConfig,
            {"DRAIN_SECNDS": "1"},
            "TANDEM_DRAIN_SECNDS is no setting of the target; did you mean TANDEM_DRAIN_SECONDS?"
            " otherwise unset it, or set enableServiceLinks: false where Kubernetes made it",
        ),
        (
            TargetConfig,
            {"port": "1"},
            "TANDEM_port is no setting of the target; did you mean TANDEM_PORT?",
        ),
        (
            TargetConfig,
            {"QUX_PORT_7070_TCP_ADDR": "10.0.0.1"},
            "TANDEM_QUX_PORT_7070_TCP_ADDR is no setting of the target; unset it, or set enable",
        ),
        (TargetConfig, {"TARGET": "a:1"}, "TANDEM_TARGET is no setting of the target; "),
        (TargetConfig, {"PRINT_CONFIG": "1"}, "TANDEM_PRINT_CONFIG is no setting of the target"),
    ],
)
def test_a_wrong_variable_is_named(
    kind: type[ServiceConfig], environ: dict[str, str], says: str
) -> None:
    environ = {f"TANDEM_{name}": text for name, text in environ.items()} | {"OTHER_PORT": "x"}
    assert _refused(kind, [], environ).startswith(f"tandem {kind.name}: {says}")


def test_a_wrong_variable_is_refused_where_a_flag_goes_before_it() -> None:
    assert "TANDEM_PORT is" in _refused(GatewayConfig, ["--port=1"], {"TANDEM_PORT": "x"})


@pytest.mark.parametrize(
    ("kind", "content", "says"),
    [
        (
            TargetConfig,
            "drain_secnds = 3",
            ": drain_secnds is no setting of the target; did you mean drain_seconds?",
        ),
        (
            TargetConfig,
            "drain-seconds = 3",
            ": drain-seconds is no setting of the target; did you mean drain_seconds?",
        ),
        (TargetConfig, "[gateway]\nport = 1", ": gateway is no setting of the target"),
        (TargetConfig, 'config = "a"', ": config is no setting of the target"),
        (TargetConfig, 'name = "a"', ": name is no setting of the target"),
        (TargetConfig, "origins = {}", ": origins is no setting of the target"),
        (
            GatewayConfig,
            'port = "7070"',
            ': port is "7070", must be a whole number from 0 to 65535, without quotes',
        ),
        (GatewayConfig, "port = -1", ": port is -1, must be a whole number from 0 to 65535"),
        (GatewayConfig, "lookahead = 1.0", ": lookahead is 1.0, must be a whole number"),
        (GatewayConfig, 'lookahead = "1"', ': lookahead is "1", must be a whole number'),
        (GatewayConfig, "lookahead = true", ": lookahead is true, must be a whole number"),
        (GatewayConfig, 'drain_seconds = "1"', ': drain_seconds is "1", must be a number'),
        (GatewayConfig, "drain_seconds = false", ": drain_seconds is false, must be a number"),
        (GatewayConfig, "log_prompts = 1", ": log_prompts is 1, must be true or false"),
        (GatewayConfig, "pool = 1", ": pool is 1, must be a string"),
        (GatewayConfig, 'pool = ["a"]', ': pool is ["a"], must be a string'),
        (GatewayConfig, "pool = 1979-05-27", ': pool is "1979-05-27", must be a string'),
        (
            GatewayConfig,
            'log_level = "loud"',
            ': log_level is "loud", must be debug, info, warning or error',
        ),
        (
            GatewayConfig,
            'target = ["a:1", 2]',
            ': target is ["a:1", 2], must be a string or an array of strings',
        ),
        (GatewayConfig, 'target = ["a:1", "b"]', ': target[1] is "b", must be HOST:PORT'),
        (GatewayConfig, "target = []", ': target is "", must be HOST:PORT'),
        (GatewayConfig, "failover_seconds = 0", ": failover_seconds is 0.0, must be above 0"),
        (GatewayConfig, "a = ", ": is no TOML: Invalid value (at end of document)"),
        (GatewayConfig, "port = 1\nport = 2", ": is no TOML: Cannot overwrite a value ("),
    ],
)
def test_a_wrong_key_is_named(
    kind: type[ServiceConfig], content: str, says: str, tmp_path: Path
) -> None:
    path = _file(tmp_path, content)
    told = _refused(kind, [f"--config={path}"], {})
    assert told.startswith(f"tandem {kind.name}: {path}{says}")


def test_a_file_that_can_t_be_read_is_named_by_who_asked_for_it(tmp_path: Path) -> None:
    path = str(tmp_path / "none.toml")
    says = f"{path} can't be read (No such file or directory)"
    assert _refused(DraftConfig, ["--config", path], {}) == f"tandem draft: --config: {says}"
    refusal = _refused(DraftConfig, [], {"TANDEM_CONFIG": path})
    assert refusal == f"tandem draft: TANDEM_CONFIG: {says}"
    Path(path).write_bytes(b"pool = '\xff'")
    assert f"{path}: is no TOML" in _refused(DraftConfig, [f"--config={path}"], {})


def test_an_unknown_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert _refused(TargetConfig, ["--max-runing=3"], {}) == "2"
    says = "--max-runing is no setting of the target; did you mean --max-running?"
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1  # without all flags above it


def test_what_fails_later_is_named_as_it_was_set(tmp_path: Path) -> None:
    path = _file(tmp_path, 'cores = "0"\nhealth_port = 5')
    config = parse(TargetConfig, [f"--config={path}", "--port=3"], {"TANDEM_MODEL": "./m"})
    told = {
        field: config.told(ConfigurationError("can't be had", field=field))
        for field in ("--model", "--health-port", "--port", "--device", "sampling.top_p", "")
    }
    assert told == {
        "--model": "TANDEM_MODEL: can't be had",
        "--health-port": f"{path}: health_port: can't be had",
        "--port": "--port: can't be had",
        "--device": "--device: can't be had",
        "sampling.top_p": "sampling.top_p: can't be had",
        "": "can't be had",
    }
    assert config.named("cores") == f"{path}: cores"


def test_print_config_tells_each_setting_and_where_it_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, 'target = ["a:1", "b:2"]\npool = "blue"')
    args = ["--print-config", "--config", path, "--lookahead=4"]
    with pytest.raises(SystemExit) as caught:
        parse(GatewayConfig, args, {"TANDEM_POOL": "red"})
    assert caught.value.code == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "# settings of the gateway"
    assert [line.split(" = ")[0] for line in printed[1:]] == [
        s.name for s in settings_of(GatewayConfig)
    ]
    for line in (
        'host = "127.0.0.1"  # default',
        'pool = "red"  # environment TANDEM_POOL',
        f'target = ["a:1", "b:2"]  # file {path}',
        "draft = []  # default",
        "lookahead = 4  # flag --lookahead",
        "drain_seconds = 30.0  # default",
        "log_prompts = false  # default",
    ):
        assert line in printed


def test_what_is_wrong_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--lookahead: is -1" in _refused(GatewayConfig, ["--print-config", "--lookahead=-1"], {})
    assert capsys.readouterr().out == ""


@dataclass(frozen=True)
class _AllKinds(ServiceConfig):
    """One setting of each kind."""

    text: str = flag("", "text")
    whole: int = flag(0, "whole")
    part: float = flag(0.0, "part")
    yes: bool = flag(False, "yes")
    several: str = flag("", "several", listed=True)


TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@example(text='\x00\x7f\r\n"\\\u2028', whole=0, part=1e-30, yes=True, several="")
@given(
    text=TEXT,
    whole=st.integers(-(1 << 63), (1 << 63) - 1),
    part=st.floats(allow_nan=False),
    yes=st.booleans(),
    several=st.lists(st.from_regex(r"[a-z0-9.:\"\\-]+", fullmatch=True)).map(",".join),
)
def test_what_is_printed_sets_the_same(
    text: str, whole: int, part: float, yes: bool, several: str, tmp_path_factory: Any
) -> None:
    config = _AllKinds(text=text, whole=whole, part=part, yes=yes, several=several)
    printed = show(_AllKinds, "service", config, {"text": Origin("flag", "--text")})
    assert tomllib.loads(printed)["text"] == text
    path = tmp_path_factory.mktemp("printed") / "config.toml"
    path.write_text(printed, encoding="utf-8", newline="")
    assert parse(_AllKinds, [f"--config={path}"], {}) == config
