"""A storm of requests that end in every way there is, at moments that the seed draws.

A moment is an event that the client has heard, never a point in time, so how fast the machine
is does not decide what is cut where. Only deadlines are times.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc

from common.errors import AbandonedError, TimedOutError
from gateway.asking import spec_to_pb
from gateway.client import AsyncClient, Finished, Generation, Options, Progress, Started
from tests.models import VOCAB
from tests.params import VARIANTS

PHASES = ("queue", "prefill", "decode")
SHARES = {
    "finished": 4,
    "queue": 3,
    "prefill": 3,
    "decode": 3,
    "deadline": 4,
    "hung up": 2,
    "unread": 1,
}
NUM_AT_ONCE = 24
MAX_TOKENS = 60
STALL_SECONDS = 1.0  # what the gateway should bear of a client that does not read
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0)]
Prompt = list[int]


def _options(rng: random.Random, variant: str) -> Options:
    """One variant of the sampling parameters, and a rule, choices or a prefix besides."""
    named: dict[str, Any] = {"ignore_eos": True} | VARIANTS[variant]
    if "logit_bias" in named:
        named["logit_bias"] = dict(named["logit_bias"])
    if "num_logprobs" in named:
        named["logprobs"] = named.pop("num_logprobs")
    options = Options(
        max_tokens=MAX_TOKENS,
        temperature=rng.choice((0.0, 0.6, 1.0)),
        seed=rng.randrange(2**64),
        speculate=rng.random() < 0.8,
        **named,
    )
    more = rng.randrange(4)
    if more == 1:
        options = replace(options, n=3)
    elif more == 2:
        prefix = [rng.randrange(30, VOCAB) for _ in range(rng.randrange(1, 20))]
        options = replace(options, output_prefix_ids=prefix)
    elif more == 3 and options.temperature > 0:
        options = replace(options, rule="rejection")
    return options


def drawn(rng: random.Random) -> tuple[Prompt, Options]:
    """A prompt whose beginning others share, long enough to be read in many steps."""
    beginning = random.Random(rng.randrange(4))
    shared = [beginning.randrange(2, VOCAB) for _ in range(rng.choice((0, 32, 64)))]
    own = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(100, 180) - len(shared))]
    return shared + own, _options(rng, rng.choice(list(VARIANTS)))


@dataclass(frozen=True)
class Known:
    """A request and, if it has one answer, the ids of each choice."""

    prompt: Prompt
    options: Options
    answer: tuple[tuple[int, ...], ...] | None


async def learn(client: AsyncClient, rng: random.Random) -> list[Known]:
    """A request of each variant, undrafted and undisturbed."""
    asked = [(drawn(rng)[0], _options(rng, variant)) for variant in VARIANTS]
    answers = [client.generate(prompt, options, speculate=False) for prompt, options in asked]
    return [
        Known(prompt, options, None if options.rule == "rejection" else ids_of(answer))
        for (prompt, options), answer in zip(asked, await asyncio.gather(*answers), strict=True)
    ]


def ids_of(answer: Generation) -> tuple[tuple[int, ...], ...]:
    return tuple(choice.token_ids for choice in answer.choices)


@dataclass
class Storm:
    """Sends requests to one gateway and counts how they have ended."""

    address: str
    known: Sequence[Known]
    rng: random.Random
    client: AsyncClient
    ended: Counter[str] = field(default_factory=Counter)

    async def blow(self, num: int) -> None:
        """So many requests, in shares of their endings, some at a time."""
        kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
        kinds = (kinds * (num // len(kinds) + 1))[:num]
        self.rng.shuffle(kinds)
        limit = asyncio.Semaphore(NUM_AT_ONCE)

        async def one(kind: str, rng: random.Random) -> None:
            async with limit:
                await self._one(kind, rng)

        seeds = [self.rng.randrange(2**32) for _ in kinds]
        async with asyncio.TaskGroup() as group:
            for kind, seed in zip(kinds, seeds, strict=True):
                group.create_task(one(kind, random.Random(seed)))

    async def _one(self, kind: str, rng: random.Random) -> None:
        if kind == "finished":
            await self._finish(rng.choice(self.known))
        elif kind in PHASES:
            await self._cancel(kind, rng)
        elif kind == "deadline":
            await self._be_late(rng)
        elif kind == "hung up":
            await self._hang_up(rng)
        else:
            await self._stop_reading(rng)

    async def _finish(self, known: Known) -> None:
        answer = await self.client.generate(known.prompt, known.options)
        assert len(answer.choices) == known.options.n
        assert known.answer is None or ids_of(answer) == known.answer, known
        self.ended["finished"] += 1

    async def _cancel(self, wanted: str, rng: random.Random) -> None:
        """In the wanted phase; a request that has passed it is cancelled too, and the next sent.

        Of where a request is its target tells a few times a second, so some are not seen in it.
        """
        reached = ""
        while reached != wanted:
            reached = await self._cancel_one(wanted, rng)
            self.ended[reached] += 1

    async def _cancel_one(self, wanted: str, rng: random.Random) -> str:
        prompt, options = drawn(rng)
        left = rng.randrange(1, 8) if wanted == "decode" else 1  # events of the phase
        async with contextlib.aclosing(self.client.stream(prompt, options)) as events:
            async for event in events:
                phase = _phase(event)
                if phase == "decode" and wanted != "decode":
                    return phase
                if phase == wanted:
                    left -= 1
                    if left == 0:
                        return phase
                if isinstance(event, Finished):  # an early end of a text
                    return "decode"
        raise AssertionError("a stream ends with an event")

    async def _be_late(self, rng: random.Random) -> None:
        prompt, options = drawn(rng)
        timeout = math.exp(rng.uniform(math.log(0.002), math.log(2.0)))
        try:
            await self.client.generate(prompt, options, timeout=timeout)
        except TimedOutError:
            self.ended["deadline"] += 1
        else:
            self.ended["in time"] += 1

    async def _hang_up(self, rng: random.Random) -> None:
        """The whole connection goes, under two requests."""
        client = AsyncClient(self.address)
        told = asyncio.Event()

        async def listen(num_events: int) -> None:
            prompt, options = drawn(rng)
            with contextlib.suppress(AbandonedError, asyncio.CancelledError):
                async for _ in client.stream(prompt, options):
                    num_events -= 1
                    if num_events == 0:
                        told.set()
            told.set()

        tasks = [asyncio.create_task(listen(rng.randrange(1, 10))) for _ in range(2)]
        await told.wait()
        await client.close()
        await asyncio.gather(*tasks)
        self.ended["hung up"] += 2

    async def _stop_reading(self, rng: random.Random) -> None:
        async with unread(self.address, *drawn(rng)):
            await asyncio.sleep(2 * STALL_SECONDS)
        self.ended["unread"] += 1


@contextlib.asynccontextmanager
async def unread(address: str, prompt: Prompt, options: Options) -> AsyncIterator[Any]:
    """The call of a client that has heard the first event and reads nothing more."""
    # As much to say as can be, and hardly any room for it on the way.
    options = replace(options, logprobs=20, n=3, output_prefix_ids=(), stop_token_ids=())
    async with grpc.aio.insecure_channel(address, SMALL_WINDOW) as channel:
        request = pb.StreamGenerateRequest(spec=spec_to_pb(prompt, options))
        call: Any = gateway_pb2_grpc.GatewayServiceStub(channel).StreamGenerate(request)
        await call.read()
        yield call


def _phase(event: object) -> str:
    if isinstance(event, Started):
        return "queue"
    if isinstance(event, Progress):
        return "queue" if event.num_ahead else "prefill"
    return "decode"
