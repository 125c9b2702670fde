"""Handing over from a thread to the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time

from common.bell import Bell, _write


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
    """Who waits for the GIL, as a woken loop does, does not get it by a hand-over."""
    ear, rope = os.pipe()
    num_turns = 0

    def wait_for_the_gil() -> None:
        nonlocal num_turns
        while os.read(ear, 1) != b"\1":
            num_turns += 1

    async def main() -> int:
        bell: Bell[int] = Bell(asyncio.get_running_loop(), lambda _: None)
        num_given = 0
        for _ in range(50):
            _write(rope, b"\0", 1)
            until = time.perf_counter() + 2e-4  # it is awake then, and waits
            while time.perf_counter() < until:
                pass
            before = num_turns
            bell.hand_over(1)
            num_given += num_turns > before
            await asyncio.sleep(0.001)  # the bell is heard, and the other thread has its turn
        bell.close()
        return num_given

    other = threading.Thread(target=wait_for_the_gil)
    other.start()
    num_given = asyncio.run(main())
    os.write(rope, b"\1")
    other.join()
    os.close(ear)
    os.close(rope)
    assert num_given <= 5  # the interpreter takes it away now and then


def test_closing_leaves_no_file_open() -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        Bell(asyncio.get_running_loop(), print).close()
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(main())
