"""The gateway's settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_address

from common.config import ServiceConfig, check_address, flag
from common.errors import ConfigurationError
from gateway.discovery import Entry, read_entry


@dataclass(frozen=True)
class GatewayConfig(ServiceConfig):
    """Takes client requests and joins targets and drafts."""

    name: str = field(default="gateway", init=False)
    port: int = flag(7070, "port to listen on; 0 takes a free one, printed at start")
    target: str = flag(
        "127.0.0.1:7071",
        "addresses of the targets, separated by commas: HOST:PORT, or dns:NAME:PORT for every"
        " address that the name has",
        listed=True,
    )
    draft: str = flag(
        "", "addresses of the drafts, in the same way; empty: no drafting", listed=True
    )
    discovery_seconds: float = flag(5.0, "how often names of dns:NAME:PORT are looked up")
    nameserver: str = flag(
        "", "ADDRESS:PORT of the name server to ask; empty: those of this machine"
    )
    lookahead: int = flag(16, "how many uncommitted tokens a draft may be ahead; 0: no drafting")
    max_live_requests: int = flag(256, "requests served at a time; more are refused")
    default_max_tokens: int = flag(256, "output tokens of a request that does not say")
    silence_seconds: float = flag(10.0, "a peer with open sequences that says nothing is lost")
    failover_seconds: float = flag(
        10.0, "how long a request whose target is lost waits for one that answers the same"
    )
    client_stall_seconds: float = flag(30.0, "a client that reads nothing is cancelled")
    log_prompts: bool = flag(False, "log the text of prompts")

    def __post_init__(self) -> None:
        _read_entries(self.targets, "--target")
        _read_entries(self.drafts, "--draft")
        if self.nameserver:
            _check_nameserver(self.nameserver)
        if self.lookahead < 0:
            raise ConfigurationError(f"is {self.lookahead}, must be 0 or more", field="--lookahead")
        for name in (
            "max_live_requests",
            "default_max_tokens",
            "silence_seconds",
            "failover_seconds",
            "client_stall_seconds",
            "discovery_seconds",
        ):
            value = getattr(self, name)
            if value <= 0:
                flag_name = "--" + name.replace("_", "-")
                raise ConfigurationError(f"is {value}, must be above 0", field=flag_name)

    @property
    def targets(self) -> tuple[str, ...]:
        """Entries of the targets, one or more."""
        return _split(self.target)

    @property
    def drafts(self) -> tuple[str, ...]:
        """Entries of the drafts."""
        return _split(self.draft) if self.draft else ()

    @property
    def target_entries(self) -> tuple[Entry, ...]:
        """What stands for targets."""
        return _read_entries(self.targets, "--target")

    @property
    def draft_entries(self) -> tuple[Entry, ...]:
        """What stands for drafts."""
        return _read_entries(self.drafts, "--draft")


def _split(entries: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in entries.split(","))


def _read_entries(texts: tuple[str, ...], flag_name: str) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for index, text in enumerate(texts):
        field_name = flag_name if len(texts) == 1 else f"{flag_name}[{index}]"
        entry = read_entry(text, field_name)
        if entry in entries:
            raise ConfigurationError(f'is "{text}", which is there already', field=field_name)
        entries.append(entry)
    return tuple(entries)


def _check_nameserver(address: str) -> None:
    host = check_address(address, "--nameserver").rpartition(":")[0]
    try:
        ip_address(re.sub(r"^\[(.*)\]$", r"\1", host))
    except ValueError:
        raise ConfigurationError(
            f'is "{address}", must be ADDRESS:PORT, such as 10.96.0.10:53: a name server can\'t'
            " be looked up itself",
            field="--nameserver",
        ) from None
