"""Hands things from a thread that computes to the event loop, without making it wait.

`call_soon_threadsafe` lets go of the GIL while it wakes the loop, and gets it back when the loop
has done what it was woken for: in a target half a millisecond a step with 1 request, more than one
with 32. Here the loop is woken with the GIL held, and has its turn when the thread lets go of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_write = ctypes.PyDLL(None).write  # PyDLL keeps the GIL, unlike os.write
_write.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]


class Bell(Generic[T]):
    """`take` is called in the loop, once for each item, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        self._loop = loop
        self._take = take
        self._items: deque[T] = deque()
        self._rung = False  # and not heard yet
        self._closed = False
        self._ear, self._rope = os.pipe()
        os.set_blocking(self._ear, False)
        loop.add_reader(self._ear, self._hear)

    def hand_over(self, item: T) -> None:
        """From the other thread."""
        self._items.append(item)
        if not self._rung:
            self._rung = True
            _write(self._rope, b"\0", 1)

    def take_all(self) -> None:
        """Take what is there now; in the loop."""
        while self._items:
            self._take(self._items.popleft())

    def close(self) -> None:
        """Take what is left and hear nothing more; in the loop, once the other thread has ended."""
        self.take_all()
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._ear)
        os.close(self._ear)
        os.close(self._rope)

    def _hear(self) -> None:
        os.read(self._ear, 64)
        self._rung = False  # before the items are looked at: what comes now rings anew
        self.take_all()
