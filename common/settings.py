"""Where settings come from: flags, then `TANDEM_*` variables, then a TOML file, then defaults.

A setting is a field of a configuration that `common.config.flag` has made. Its name
`drain_seconds` is the key at the top of the file; `--drain-seconds` is its flag and
`TANDEM_DRAIN_SECONDS` its variable. What names no setting is refused, and every source is
checked, whether another one goes before it or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from common.errors import ConfigurationError

PREFIX = "TANDEM_"
MAX_PORT = 65535
_SERVICE_LINKS = "set enableServiceLinks: false where Kubernetes made it"
_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_MUST = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
}


class BadValueError(argparse.ArgumentTypeError):
    """What a setting can't be; the text reads on after its name."""


@dataclass(frozen=True)
class Origin:
    """Where a value was set."""

    source: str  # flag, environment or file
    place: str  # the flag, the variable, or the file's path

    def named(self, key: str) -> str:
        """What an error calls the setting of this key."""
        return f"{self.place}: {key}" if self.source == "file" else self.place


Found = dict[str, tuple[Any, Origin]]
"""Values by the names of their settings."""


@dataclass(frozen=True)
class Setting:
    """A flag, a variable and a key of a file."""

    name: str
    kind: type[Any]  # bool, int, float or str
    default: Any
    listed: bool  # values separated by commas; a file may say them as an array
    options: Mapping[str, Any]  # for argparse: help, choices

    @property
    def flag(self) -> str:
        """Its flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper()

    def from_text(self, text: str) -> Any:
        """The value of a flag or a variable; raises `BadValueError`."""
        try:
            value = _BOOLS[text.lower()] if self.kind is bool else self.kind(text)
        except (ValueError, KeyError):
            raise self._refusal(text) from None
        return self._checked(value, text)

    def from_toml(self, value: object) -> Any:
        """The value of a key in a file; raises `BadValueError`."""
        if self.listed and isinstance(value, list) and all(isinstance(v, str) for v in value):
            return ",".join(value)
        accepted = (int, float) if self.kind is float else self.kind
        if not isinstance(value, accepted) or isinstance(value, bool) != (self.kind is bool):
            quoted = isinstance(value, str) and self.kind is not str
            raise self._refusal(value, ", without quotes" * quoted)  # a bool is an int to Python
        return self._checked(self.kind(value), value)

    def to_toml(self, value: Any) -> str:
        """A line of a file."""
        shown: object = value
        if self.listed:
            shown = [part.strip() for part in value.split(",")] if value else []
        # What JSON escapes, TOML escapes alike, but for this one character.
        text = repr(shown) if self.kind is float else json.dumps(shown, ensure_ascii=False)
        return f"{self.name} = {text}".replace("\x7f", "\\u007f")

    def _checked(self, value: Any, said: object) -> Any:
        choices = self.options.get("choices")
        if (choices and value not in choices) or (self._is_port and not 0 <= value <= MAX_PORT):
            raise self._refusal(said)
        return value

    @property
    def _is_port(self) -> bool:
        return self.name == "port" or self.name.endswith("_port")

    def _refusal(self, said: object, hint: str = "") -> BadValueError:
        must = _MUST[self.kind]
        if choices := self.options.get("choices"):
            must = f"{', '.join(choices[:-1])} or {choices[-1]}"
        elif self._is_port:
            must = f"a whole number from 0 to {MAX_PORT}"
        elif self.listed:
            must = "a string or an array of strings"
        shown = json.dumps(said, ensure_ascii=False, default=str)
        return BadValueError(f"is {shown}, must be {must}{hint}")


CONFIG = Setting("config", str, "", False, {"help": "TOML file with settings", "metavar": "FILE"})


def settings_of(kind: type[Any]) -> list[Setting]:
    """The settings of a configuration's dataclass, in its order."""
    types = get_type_hints(kind)
    return [
        Setting(
            name=f.name,
            kind=types[f.name],
            default=f.default,
            listed=f.metadata["listed"],
            options={k: v for k, v in f.metadata.items() if k != "listed"},
        )
        for f in dataclasses.fields(kind)
        if "listed" in f.metadata
    ]


def read(
    kind: type[Any], service: str, argv: Sequence[str] | None, environ: Mapping[str, str]
) -> tuple[Found, bool]:
    """What is set, the first source first, and whether it is only to be printed.

    argv None: the process's own. Exits with usage if a flag is wrong; raises
    `ConfigurationError` if a variable or the file is.
    """
    settings = settings_of(kind)
    flags, printed = _from_flags(kind, service, [*settings, CONFIG], argv)
    told = _from_environment([*settings, CONFIG], service, environ) | flags
    path, origin = told.pop(CONFIG.name, ("", None))
    if origin is None or not path:
        return told, printed
    return _from_file(settings, service, path, origin) | told, printed


def show(kind: type[Any], service: str, config: object, origins: Mapping[str, Origin]) -> str:
    """The effective settings as a TOML file that sets the same, each with where it came from."""
    lines = [f"# settings of the {service}"]
    for setting in settings_of(kind):
        origin = origins.get(setting.name)
        came_from = f"{origin.source} {origin.place}" if origin else "default"
        lines.append(f"{setting.to_toml(getattr(config, setting.name))}  # {came_from}")
    return "\n".join(lines) + "\n"


def blamed(error: ConfigurationError, origins: Mapping[str, Origin]) -> str:
    """The error's text; a setting that it names by its flag is named as it was set."""
    found = re.fullmatch(r"--([a-z-]+)(\[\d+\])?", error.field)
    key = found[1].replace("-", "_") if found else ""
    if found is None or key not in origins or origins[key].source == "flag":
        return str(error)
    glue = "" if error.message.startswith("is ") else ":"
    return f"{origins[key].named(key)}{found[2] or ''}{glue} {error.message}"


class _Flags(argparse.ArgumentParser):
    """Says what is wrong in one line, without all flags above it."""

    def error(self, message: str) -> NoReturn:
        """Exit."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists all)\n")


def _from_flags(
    kind: type[Any], service: str, settings: Sequence[Setting], argv: Sequence[str] | None
) -> tuple[Found, bool]:
    parser = _Flags(
        prog=f"python -m {kind.__module__.split('.')[0]}",
        description=kind.__doc__,
        epilog=f"--drain-seconds 9 may also be set as {PREFIX}DRAIN_SECONDS=9 in the environment,"
        " or as drain_seconds = 9 in the file that --config names; flags go before the"
        " environment, and that before the file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for setting in settings:
        options = dict(setting.options)
        if setting.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = setting.from_text
        parser.add_argument(setting.flag, default=setting.default, **options)
    parser.add_argument(
        "--print-config", action="store_true", help="print what is set and from where, then end"
    )
    # argparse leaves alone what a namespace has already, so None stays where no flag is given.
    unset = argparse.Namespace(**dict.fromkeys(s.name for s in settings))
    given, unknown = parser.parse_known_args(argv, unset)
    if unknown:
        name = unknown[0].partition("=")[0]
        known = {s.name: s.flag for s in settings}
        parser.error(f"{name} is no setting of the {service}{_meant(name, known)}")
    found = {
        s.name: (getattr(given, s.name), Origin("flag", s.flag))
        for s in settings
        if getattr(given, s.name) is not None
    }
    return found, given.print_config


def _from_environment(
    settings: Iterable[Setting], service: str, environ: Mapping[str, str]
) -> Found:
    known = {s.variable: s for s in settings}
    found: Found = {}
    for variable in sorted(v for v in environ if v.startswith(PREFIX)):
        text, setting = environ[variable], known.get(variable)
        if setting is None:
            names = {s.name: v for v, s in known.items()}
            meant = _meant(variable.removeprefix(PREFIX), names)
            otherwise = " otherwise unset it" if meant else "; unset it"
            raise ConfigurationError(
                f"{variable} is no setting of the {service}{meant}{otherwise}, or {_SERVICE_LINKS}"
            )
        try:
            found[setting.name] = setting.from_text(text), Origin("environment", variable)
        except BadValueError as error:
            hint = f"; {_SERVICE_LINKS}" if text.startswith("tcp://") else ""
            raise ConfigurationError(f"{variable} {error}{hint}") from None
    return found


def _from_file(settings: Iterable[Setting], service: str, path: str, asked_by: Origin) -> Found:
    try:
        with Path(path).expanduser().open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(
            f"{path} can't be read ({error.strerror})", field=asked_by.place
        ) from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigurationError(f"is no TOML: {error}", field=path) from error
    known = {s.name: s for s in settings}
    origin = Origin("file", path)
    found: Found = {}
    for key, value in content.items():
        if key not in known:
            meant = _meant(key, {name: name for name in known})
            raise ConfigurationError(f"{origin.named(key)} is no setting of the {service}{meant}")
        try:
            found[key] = known[key].from_toml(value), origin
        except BadValueError as error:
            raise ConfigurationError(f"{origin.named(key)} {error}") from None
    return found


def _meant(name: str, known: Mapping[str, str]) -> str:
    """Asks for the nearest known setting; known: what to call each by its name."""
    near = difflib.get_close_matches(name.strip("-").replace("-", "_").lower(), known, 1)
    return f"; did you mean {known[near[0]]}?" if near else ""
