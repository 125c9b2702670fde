"""A coalescing outbox: one writer per stream, as grpc.aio wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Collects items for one stream; whatever has gathered leaves as one batch.

    Belongs to the event loop's thread. `put` never blocks; a peer that does not read
    overflows the outbox and loses its stream.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._items: list[T] = []
        self._limit = limit
        self._ready = asyncio.Event()
        self._closed = False
        self.overflowed = False  # set by put, read by whoever ends the stream

    def put(self, item: T) -> None:
        """Queue an item; dropped silently once the stream has ended."""
        if self._closed:
            return
        self._items.append(item)
        if len(self._items) > self._limit:
            self.overflowed = True
            self.close()
        self._ready.set()

    def close(self) -> None:
        """End `batches` after what is queued."""
        self._closed = True
        self._ready.set()

    async def batches(self) -> AsyncIterator[list[T]]:
        """All items in order, as few batches as the reader's pace allows."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self.overflowed:
                return
            batch, self._items = self._items, []
            if batch:
                yield batch
            elif self._closed:
                return
            if self._closed:
                self._ready.set()
