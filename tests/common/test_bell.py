"""Handing over from a thread to the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time

from common.bell import Bell


def test_everything_comes_once_and_in_order() -> None:
    """Also what is handed over while the loop is busy taking."""

    async def main() -> list[int]:
        taken: list[int] = []
        done = asyncio.Event()

        def take(item: int) -> None:
            taken.append(item)
            if item % 1000 == 7:
                time.sleep(0.002)  # a slow loop: the other thread goes on meanwhile
            if item == 19_999:
                done.set()

        bell = Bell(asyncio.get_running_loop(), take)

        def hand_over() -> None:
            for i in range(20_000):
                bell.hand_over(i)

        thread = threading.Thread(target=hand_over)
        thread.start()
        await asyncio.wait_for(done.wait(), 20)
        thread.join()
        bell.close()
        return taken

    assert asyncio.run(main()) == list(range(20_000))


def test_an_idle_loop_is_woken() -> None:
    async def main() -> None:
        told = asyncio.Event()
        bell: Bell[int] = Bell(asyncio.get_running_loop(), lambda _: told.set())
        for _ in range(3):
            told.clear()
            timer = threading.Timer(0.05, bell.hand_over, (1,))
            timer.start()
            await asyncio.wait_for(told.wait(), 20)
            timer.join()
        bell.close()

    asyncio.run(main())


def test_the_thread_keeps_the_gil() -> None:
    """The loop's turn comes when the thread lets go of it, not while it hands over."""

    async def main() -> None:
        taken_at: list[float] = []
        bell: Bell[int] = Bell(
            asyncio.get_running_loop(), lambda _: taken_at.append(time.perf_counter())
        )
        ended: list[float] = []

        def compute() -> None:
            bell.hand_over(1)
            until = time.perf_counter() + 0.001  # less than the interpreter's switch interval
            while time.perf_counter() < until:
                pass
            ended.append(time.perf_counter())

        late = 0
        for _ in range(20):
            thread = threading.Thread(target=compute)
            thread.start()
            while len(taken_at) < len(ended) or thread.is_alive():  # noqa: ASYNC110  # polls a thread
                await asyncio.sleep(0.001)
            late += taken_at[-1] > ended[-1]
        bell.close()
        assert late >= 15  # a busy machine may take a thread off its core

    asyncio.run(main())


def test_closing_leaves_no_file_open() -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        Bell(asyncio.get_running_loop(), print).close()
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(main())
