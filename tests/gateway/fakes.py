"""A target and a draft that speak the real protocol and say what a test tells them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from common import wire
from common.outbox import Outbox
from common.tokenizer import Tokenizer
from common.types import (
    ChainId,
    CloseSequence,
    Commit,
    EngineStatus,
    FinishReason,
    ModelInfo,
    OpenSequence,
    Proposal,
    Verdict,
)
from gateway.api import GatewayServicer, add_to_server
from gateway.client import AsyncClient
from gateway.config import GatewayConfig
from gateway.relay import Relay
from gateway.spans import GatewaySpans

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{{ bos_token + m.role + ':' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant:' }}{% endif %}"
)


def tokenizer_files(**settings: Any) -> dict[str, bytes]:
    """A byte-level tokenizer: a token for each byte and one for "the", two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate([*alphabet, "th", "the"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config | settings).encode(),
    }


FILES = tokenizer_files()
TOKENIZER = Tokenizer(FILES)
VOCAB_SIZE = 260
EOS = 259
TARGET_MODEL = ModelInfo(
    name="tiny",
    vocab_size=VOCAB_SIZE,
    tokenizer_fingerprint=TOKENIZER.fingerprint,
    weights_fingerprint="w1",
    noise_version="n1",
    eos_token_ids=(EOS,),
    context_len=1000,
)
DRAFT_MODEL = ModelInfo(name="ngram")


async def until(holds: Callable[[], Any], what: str = "it", seconds: float = 20.0) -> None:
    """Wait for a condition; fails the test if it does not come."""
    try:
        async with asyncio.timeout(seconds):
            while not holds():  # noqa: ASYNC110  # what is awaited has no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen within {seconds} s") from None


class FakePeer:
    """What fake targets and drafts have in common."""

    def __init__(self, model: ModelInfo) -> None:
        self.model = model
        self.host = "127.0.0.1"
        self.echoes = True
        self.num_streams = 0
        self.num_open_streams = 0
        self.opens: list[OpenSequence] = []
        self.closes: list[int] = []
        self.outbox: Outbox[Any] = Outbox()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def say(self, *replies: Any) -> None:
        for reply in replies:
            self.outbox.put(reply)

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._add(self._server)
        self.port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            self.outbox.close()
            await self._server.stop(None)
            self._server = None

    def _add(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def hear(self, event: Any) -> None:
        if isinstance(event, CloseSequence):
            self.closes.append(event.sequence_id)

    async def _talk(
        self, requests: AsyncIterator[Any], events: Callable[[Any], Iterable[Any]]
    ) -> AsyncIterator[list[Any]]:
        outbox: Outbox[Any] = Outbox()
        self.outbox = outbox
        self.num_streams += 1
        self.num_open_streams += 1

        async def read() -> None:
            async for request in requests:
                for heartbeat in map(wire.heartbeat_from_pb, request.heartbeats):
                    if self.echoes:
                        outbox.put(replace(heartbeat, echo=True))
                for message in request.opens:
                    sequence = wire.open_from_pb(message)
                    self.opens.append(sequence)
                    self.opened(sequence)
                for event in events(request):
                    self.hear(event)
            outbox.close()

        reader = asyncio.create_task(read())
        try:
            async for batch in outbox.batches():
                yield batch
        finally:
            self.num_open_streams -= 1
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def opened(self, sequence: OpenSequence) -> None:
        """For subclasses."""


class FakeTarget(FakePeer, target_pb2_grpc.TargetServiceServicer):
    """Commits what `script` says, text by text, as soon as a sequence is opened."""

    def __init__(self, model: ModelInfo = TARGET_MODEL) -> None:
        super().__init__(model)
        self.files = FILES
        self.script: Sequence[str | Verdict] = ()
        self.proposals: list[Proposal] = []

    def _add(self, server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        return target_pb2.TargetServiceGetModelResponse(model=wire.model_to_pb(self.model))

    async def GetTokenizer(self, request: Any, context: Any) -> Any:  # noqa: N802
        return target_pb2.GetTokenizerResponse(files=self.files)

    async def Verify(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        async for batch in self._talk(request_iterator, wire.target_events):
            yield wire.verify_response(batch)

    def hear(self, event: Any) -> None:
        super().hear(event)
        if isinstance(event, Proposal):
            self.proposals.append(event)

    def opened(self, sequence: OpenSequence) -> None:
        self.say(*verdicts(sequence, self.script))


class FakeDraft(FakePeer, draft_pb2_grpc.DraftServiceServicer):
    """Remembers commits."""

    def __init__(self, model: ModelInfo = DRAFT_MODEL) -> None:
        super().__init__(model)
        self.commits: list[Commit] = []

    def _add(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        return draft_pb2.DraftServiceGetModelResponse(model=wire.model_to_pb(self.model))

    async def Propose(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        async for batch in self._talk(request_iterator, wire.draft_events):
            yield wire.propose_response(batch)

    def hear(self, event: Any) -> None:
        super().hear(event)
        if isinstance(event, Commit):
            self.commits.append(event)

    def propose(self, sequence_id: int, serial: int, start: int, text: str) -> None:
        ids = TOKENIZER.encode(text)
        self.say(Proposal(sequence_id, ChainId(0, serial), start, start, ids))


def verdicts(
    sequence: OpenSequence, script: Sequence[str | Verdict], committed_len: int | None = None
) -> list[Verdict]:
    """Verdicts that commit these texts in turn; a `Verdict` gives all but ids and lengths."""
    length = len(sequence.token_ids) if committed_len is None else committed_len
    made = []
    for part in script:
        if isinstance(part, str):
            part = Verdict(0, 0, 0, 0, TOKENIZER.encode(part))
        verdict = replace(
            part,
            sequence_id=sequence.sequence_id,
            committed_len=length,
            lookahead=sequence.lookahead,
        )
        made.append(verdict)
        length += len(verdict.token_ids)
    return made


def ending(text: str, reason: FinishReason = FinishReason.LENGTH, **fields: Any) -> Verdict:
    """The last verdict of a script."""
    return Verdict(0, 0, 0, 0, TOKENIZER.encode(text), finish_reason=reason, **fields)


@dataclass
class World:
    """A gateway between fakes."""

    relay: Relay
    client: AsyncClient
    target: FakeTarget
    draft: FakeDraft
    address: str
    config: GatewayConfig
    targets: Sequence[FakeTarget] = ()
    drafts: Sequence[FakeDraft] = ()

    async def stream(self, prompt: Any = "ab", **options: Any) -> list[Any]:
        return [event async for event in self.client.stream(prompt, **options)]

    def text(self, events: Iterable[Any]) -> str:
        return "".join(getattr(event, "text", "") for event in events)


@contextlib.asynccontextmanager
async def world(
    *,
    target: FakeTarget | None = None,
    draft: FakeDraft | None = None,
    drafted: bool = False,
    other_targets: Sequence[FakeTarget] = (),
    other_drafts: Sequence[FakeDraft] = (),
    draft_address: str = "",
    spans: GatewaySpans | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """A gateway with connected targets; with `drafted` also with connected drafts."""
    target, draft = target or FakeTarget(), draft or FakeDraft()
    targets, drafts = [target, *other_targets], [draft, *other_drafts]
    for peer in (*targets, *(drafts if drafted else ())):
        await peer.start()
    if drafted:
        draft_address = ",".join(d.address for d in drafts)
    target_address = ",".join(t.address for t in targets)
    config = GatewayConfig(target=target_address, draft=draft_address, **settings)
    relay = Relay(config)
    relay.start()
    server = grpc.aio.server()
    add_to_server(GatewayServicer(config, relay, spans), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(10):
            await relay.wait_for_target()
        if drafted or other_targets:
            await until(lambda: "CONNECTING" not in states(relay), "the peers' connections")
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            yield World(relay, client, target, draft, f"127.0.0.1:{port}", config, targets, drafts)
    finally:
        await relay.stop()
        await server.stop(None)
        for peer in (*targets, *drafts):
            await peer.stop()


def in_world(test: Callable[[World], Awaitable[None]], **settings: Any) -> None:
    """Run a test in a gateway between fakes."""

    async def main() -> None:
        async with world(**settings) as w:
            await test(w)

    asyncio.run(main())


def states(relay: Relay) -> list[str]:
    """The names of the peers' states, targets first."""
    return [peer.state.name for peer in relay.status()]


def alive(num_running: int = 1) -> EngineStatus:
    """An engine's word."""
    return EngineStatus(num_running=num_running)
