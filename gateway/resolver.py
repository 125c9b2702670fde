"""Addresses of names, by dnspython."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import dns.asyncresolver
import dns.exception
import dns.resolver

from common.errors import ConfigurationError
from gateway.discovery import Answer

TRY_SECONDS, LOOKUP_SECONDS = 1.0, 4.0
"""How long one name server may take, and all tries together."""


class Resolver:
    """Asks this machine's name servers, or a given one, and honours its search domains.

    nameserver: ADDRESS:PORT, or empty. Raises `ConfigurationError` if there is none to ask.
    """

    def __init__(self, nameserver: str = "", lookup_seconds: float = LOOKUP_SECONDS) -> None:
        try:
            self._resolver = dns.asyncresolver.Resolver()
        except dns.resolver.NoResolverConfiguration as error:
            if not nameserver:
                raise ConfigurationError(
                    "is empty, must be ADDRESS:PORT: this machine has no /etc/resolv.conf",
                    field="--nameserver",
                ) from error
            self._resolver = dns.asyncresolver.Resolver(configure=False)
        if nameserver:
            host, _, port = nameserver.rpartition(":")
            self._resolver.nameservers = [host.strip("[]")]
            self._resolver.port = int(port)
        self._resolver.timeout = min(TRY_SECONDS, lookup_seconds)
        self._resolver.lifetime = self._seconds = lookup_seconds

    async def lookup(self, name: str) -> Sequence[Answer]:
        """See `discovery.Lookup`."""
        return await asyncio.gather(self._ask(name, "A"), self._ask(name, "AAAA"))

    async def _ask(self, name: str, kind: str) -> Answer:
        try:
            found = await self._resolver.resolve(name, kind, search=True, raise_on_no_answer=False)
        except dns.resolver.NXDOMAIN:
            return Answer(kind)
        except dns.resolver.LifetimeTimeout:
            return Answer(kind, failure=f"no name server has answered within {self._seconds:g} s")
        except (dns.exception.DNSException, OSError) as error:
            # "All nameservers failed to answer the query ...: Server ... answered SERVFAIL"
            return Answer(kind, failure=str(error).rpartition(" answered ")[2] or repr(error))
        return Answer(kind, frozenset(record.to_text() for record in found))
