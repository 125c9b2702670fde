"""Which addresses the entries of a list stand for: pure, but for the loop that looks names up.

An entry is fixed, `HOST:PORT`, or `dns:NAME:PORT`: every address that the name has.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.config import check_address
from common.errors import ConfigurationError
from common.settings import MAX_PORT

log = logging.getLogger(__name__)
PREFIX = "dns:"
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
MAX_NAME_LEN = 253


@dataclass(frozen=True)
class Entry:
    """One entry of --target or --draft; equal ones stand for the same addresses."""

    text: str  # as peers are called that come from it
    port: int
    name: str = ""  # to be looked up; empty: the text is the address


@dataclass(frozen=True)
class Answer:
    """What name servers say of a name's addresses of one kind."""

    kind: str  # A or AAAA
    addresses: frozenset[str] = frozenset()  # empty if it has none
    failure: str = ""  # why nothing is known; empty if it is


Lookup = Callable[[str], Awaitable[Sequence[Answer]]]
"""A name's answers, one of each kind; never raises what a name server may cause."""


@dataclass(frozen=True)
class Change:
    """What to do about peers, in the order of the addresses."""

    new: tuple[str, ...]
    gone: tuple[str, ...]


def read_entry(text: str, field: str) -> Entry:
    """An entry out of its text; raises `ConfigurationError` naming the field if it is wrong."""
    rest = text.removeprefix(PREFIX)
    if rest == text or rest.isdecimal():  # a host may be called dns
        host, _, port = check_address(text, field).rpartition(":")
        return Entry(joined(host.strip("[]"), int(port)), int(port))
    name, _, port = rest.rpartition(":")
    if _is_address(name.strip("[]")):
        raise ConfigurationError(
            f'is "{text}", which holds an address, not a name: leave out "{PREFIX}"', field=field
        )
    if not _NAME.fullmatch(name) or len(name.rstrip(".")) > MAX_NAME_LEN:
        raise ConfigurationError(f'is "{text}", must be dns:NAME:PORT', field=field)
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= MAX_PORT:
        raise ConfigurationError(
            f'is "{text}", must be dns:NAME:PORT with a port from 1 to {MAX_PORT}', field=field
        )
    name = name.lower()
    return Entry(f"{PREFIX}{name}:{int(port)}", int(port), name)


def joined(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in its shortest form and in brackets."""
    if ":" in host:
        host = f"[{ipaddress.IPv6Address(host)}]" if _is_address(host) else f"[{host}]"
    return f"{host}:{port}"


class Source:
    """An entry and the addresses that it stands for now, as far as is known."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.failure = ""  # why the last lookup has failed, at least in part
        self._known: dict[str, frozenset[str]] = {}  # by kind: of the last good answer
        if not entry.name:
            self._known[""] = frozenset([entry.text])

    @property
    def addresses(self) -> list[str]:
        """HOST:PORT each, in order."""
        return sorted(frozenset().union(*self._known.values()))

    @property
    def vacancy(self) -> str:
        """Why it stands for no address; empty if it does for some."""
        if any(self._known.values()):
            return ""
        if self.failure:
            return f"the lookup has failed: {self.failure}"
        return "the name has no address" if self._known else "not looked up yet"

    def learn(self, answers: Iterable[Answer]) -> None:
        """Take what a lookup has found. A kind whose lookup failed stays as it was."""
        failures: dict[str, None] = {}
        for answer in answers:
            if answer.failure:
                failures[answer.failure] = None
            else:
                port = self.entry.port
                self._known[answer.kind] = frozenset(joined(a, port) for a in answer.addresses)
        failure = "; ".join(failures)
        if failure and failure != self.failure:
            log.warning("%s: lookup failed, addresses stay: %s", self.entry.text, failure)
        elif self.failure and not failure:
            log.info("%s: lookups work again", self.entry.text)
        self.failure = failure


def wanted(sources: Iterable[Source]) -> dict[str, str]:
    """Every address that there should be a peer for, once, and the first entry that names it."""
    origins: dict[str, str] = {}
    for source in sources:
        for address in source.addresses:
            origins.setdefault(address, source.entry.text)
    return origins


def difference(present: Collection[str], origins: Mapping[str, str]) -> Change:
    """How the addresses of peers differ from those that are wanted."""
    return Change(
        new=tuple(a for a in origins if a not in present),
        gone=tuple(a for a in present if a not in origins),
    )


async def follow(
    name: str, lookup: Lookup, seconds: float, learn: Callable[[Sequence[Answer]], None]
) -> None:
    """Look a name up for ever, a little irregularly, and tell each time what was found."""
    while True:
        try:
            learn(await lookup(name))
        except Exception:  # ours: this lookup is lost, not the next ones
            log.exception("fault in a lookup of %s", name)
        await asyncio.sleep(seconds * random.uniform(0.9, 1.1))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
