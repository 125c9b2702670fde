"""The outbox gathers what is put while its reader is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from common.outbox import Outbox


def _run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(5):
            await test

    asyncio.run(limited())


async def _rest(outbox: Outbox[int]) -> list[list[int]]:
    return [batch async for batch in outbox.batches()]


def test_what_has_gathered_leaves_as_one_batch_in_order() -> None:
    async def test() -> None:
        outbox = Outbox[int]()
        batches = outbox.batches()
        for item in (1, 2, 3):
            outbox.put(item)
        assert await anext(batches) == [1, 2, 3]
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        outbox.put(4)
        assert await waiting == [4]

    _run(test())


def test_close_lets_out_what_is_queued_and_ends() -> None:
    async def test() -> None:
        outbox = Outbox[int]()
        outbox.put(1)
        outbox.close()
        outbox.put(2)  # too late
        assert await _rest(outbox) == [[1]]
        assert not outbox.overflowed

    _run(test())


def test_close_ends_a_reader_that_waits() -> None:
    async def test() -> None:
        outbox = Outbox[int]()
        reader = asyncio.ensure_future(_rest(outbox))
        await asyncio.sleep(0)
        outbox.close()
        assert await reader == []

    _run(test())


def test_close_while_the_reader_is_busy() -> None:
    async def test() -> None:
        outbox, found = Outbox[int](), list[list[int]]()
        outbox.put(1)
        async for batch in outbox.batches():
            found.append(batch)
            if batch == [1]:
                outbox.put(2)
                outbox.close()
        assert found == [[1], [2]]

    _run(test())


def test_a_reader_that_does_not_read_loses_its_stream() -> None:
    async def test() -> None:
        outbox = Outbox[int](limit=3)
        for item in range(3):
            outbox.put(item)
        assert not outbox.overflowed
        outbox.put(3)
        assert outbox.overflowed
        assert await _rest(outbox) == []

    _run(test())


def test_reading_makes_room() -> None:
    async def test() -> None:
        outbox = Outbox[int](limit=3)
        batches = outbox.batches()
        for item in range(10):
            outbox.put(item)
            assert await anext(batches) == [item]
        assert not outbox.overflowed

    _run(test())
