"""The peers of one kind: they come and go as the addresses of their entries do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.discovery import Answer, Entry, Lookup, Source, difference, follow, wanted
from gateway.peer import Peer
from gateway.session import Session
from gateway.types import PeerKind, PeerState, PeerStatus

log = logging.getLogger(__name__)


class Roster:
    """One peer for every address that the entries stand for.

    make: a peer for an address and the text of the entry that it comes from. Belongs to the
    event loop's thread; `peers` is replaced, never changed, so that a scrape may read it.
    """

    def __init__(
        self,
        kind: PeerKind,
        entries: Sequence[Entry],
        make: Callable[[str, str], Peer[Session]],
    ) -> None:
        self.peers: tuple[Peer[Session], ...] = ()
        self._kind = kind
        self._sources = [Source(entry) for entry in entries]
        self._make = make
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def configured(self) -> bool:
        """Whether there are entries, whatever they stand for."""
        return bool(self._sources)

    @property
    def num_failing(self) -> int:
        """How many names could not be looked up the last time."""
        return sum(bool(source.failure) for source in self._sources)

    def start(self, lookup: Lookup | None, seconds: float) -> None:
        """Begin to connect, and to look names up; there is a lookup if there are names."""
        self._bring_about()
        for source in self._sources:
            if source.entry.name:
                assert lookup is not None, "there are names"
                following = follow(source.entry.name, lookup, seconds, self._learner(source))
                self._tasks.append(asyncio.create_task(following))

    async def stop(self) -> None:
        """End all lookups and connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self.peers:
            await peer.stop()

    def vacant(self) -> list[PeerStatus]:
        """The entries that stand for no address now, as if they were peers."""
        return [
            PeerStatus(self._kind, source.entry.text, PeerState.CONNECTING, source.vacancy)
            for source in self._sources
            if source.vacancy
        ]

    def remove(self, peer: Peer[Session]) -> None:
        """A peer that was to leave has ended."""
        log.info("%s at %s: connection closed", self._kind.name.lower(), peer.address)
        self.peers = tuple(other for other in self.peers if other is not peer)

    def _learner(self, source: Source) -> Callable[[Sequence[Answer]], None]:
        def learn(answers: Sequence[Answer]) -> None:
            source.learn(answers)
            self._bring_about()

        return learn

    def _bring_about(self) -> None:
        """Let peers come and go until they are those that are wanted.

        Asked after every lookup, whether it has brought anything new: an address that is back
        while its last connection ends is taken the next time.
        """
        origins = wanted(self._sources)
        peers = {peer.address: peer for peer in self.peers}
        change = difference([p.address for p in self.peers if not p.leaving], origins)
        kind = self._kind.name.lower()
        for address in change.gone:
            peer = peers[address]
            log.info(
                "%s at %s: gone from %s, finishes %d", kind, address, peer.entry, len(peer.holders)
            )
            peer.leave()
        for address in change.new:
            known = peers.get(address)
            if known is None:
                log.info("%s at %s: new from %s", kind, address, origins[address])
                peer = self._make(address, origins[address])
                self.peers = (*self.peers, peer)
                peer.start()
            elif known.stay():
                log.info("%s at %s: back in %s", kind, address, origins[address])
        for peer in self.peers:
            peer.entry = origins.get(peer.address, peer.entry)
