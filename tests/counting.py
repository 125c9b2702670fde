"""A target whose greedy text is known: after token t it says t + 1."""

from __future__ import annotations

from typing import Any

import torch

from common.engine.block_manager import BlockManager
from common.types import (
    ChainId,
    Commit,
    EngineStatus,
    OpenSequence,
    Proposal,
    SamplingParams,
    StepResult,
    Verdict,
)
from draft_service.sequence import DraftSequence
from target_service.engine import TargetEngine
from target_service.goodput import DraftPolicy
from target_service.scheduler import SchedulerConfig
from tests.driver import HookedModel
from tests.models import TableModel

VOCAB, CONTEXT = 80, TableModel.context_len
PROMPT = (1, 2, 3)


def counting_table(without_numbers: tuple[int, ...] = ()) -> torch.Tensor:
    """Logits that peak at the next number; NaN after some tokens. [1, V, V]"""
    table = 9.0 * torch.eye(VOCAB, dtype=torch.float64).roll(1, dims=1)
    table[list(without_numbers)] = torch.nan
    return table[None]


def open_sequence(
    sid: int, token_ids: tuple[int, ...] = PROMPT, *, lookahead: int = 8, **changes: Any
) -> OpenSequence:
    """Greedy; changes are fields of OpenSequence or of SamplingParams."""
    fields = set(OpenSequence.__dataclass_fields__)
    sampling = {k: v for k, v in changes.items() if k not in fields}
    o: dict[str, Any] = {"num_prompt": len(token_ids), "lookahead": lookahead}
    o |= {k: v for k, v in changes.items() if k in fields}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **sampling})
    return OpenSequence(sequence_id=sid, token_ids=token_ids, sampling=params, **o)


def piece(sid: int, start: int, *token_ids: int, serial: int = 0) -> Proposal:
    """A chain of its own that begins at `start`."""
    return Proposal(sid, ChainId(1, serial), start, start, token_ids)


class House:
    """An engine driven by hand; every step is checked for what holds between steps."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        without_numbers: tuple[int, ...] = (),
        eos: tuple[int, ...] = (),
        policy: DraftPolicy | None = None,
        **limits: Any,
    ) -> None:
        self.model = HookedModel(TableModel(counting_table(without_numbers)))
        self.blocks = BlockManager(num_blocks, 4)
        self.engine = TargetEngine(
            self.model,
            self.blocks,
            eos_token_ids=eos,
            config=SchedulerConfig(**limits),
            policy=policy,
        )
        self.text: dict[int, list[int]] = {}
        self.last: dict[int, Verdict] = {}

    def submit(self, *events: Any) -> None:
        """Put events into the inbox."""
        for event in events:
            self.engine.submit(event)

    def step(self) -> StepResult:
        """One step; remembers what came of it."""
        result = self.engine.step()
        for v in result.verdicts:
            self.text.setdefault(v.sequence_id, []).extend(v.token_ids)
            self.last[v.sequence_id] = v
        self.blocks.check_integrity()
        for seq in self.engine.scheduler.running:
            assert len(self.blocks.table(seq.sid)) == -(-seq.num_cached // 4)
            if seq.decoding:
                assert seq.num_cached == len(seq.tokens) - 1
        return result

    def finish(self, max_steps: int = 200) -> None:
        """Step until nothing is left; then every block is free."""
        for _ in range(max_steps):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work()
        assert self.engine.num_live() == 0
        assert self.blocks.num_free == self.blocks.num_blocks


class CountingDrafter:
    """Knows the answer, save for the positions where it is told to be wrong."""

    def __init__(self, wrong_at: frozenset[int] = frozenset()) -> None:
        self._wrong_at = wrong_at
        self._seqs: dict[int, DraftSequence] = {}

    def open(self, s: OpenSequence) -> None:
        self._seqs[s.sequence_id] = DraftSequence.of(s)

    def commit(self, c: Commit) -> None:
        self._seqs[c.sequence_id].commit(c)

    def close(self, sid: int) -> None:
        del self._seqs[sid]

    def has_work(self) -> bool:
        return any(s.num_wanted for s in self._seqs.values())

    def num_unread(self, sid: int) -> int:
        return 0

    def status(self) -> EngineStatus:
        return EngineStatus(num_running=len(self._seqs))

    def step(self) -> list[Proposal]:
        return [s.extend(self._guess(s)) for s in self._seqs.values() if s.num_wanted]

    def _guess(self, s: DraftSequence) -> list[int]:
        first, last = len(s.tokens), s.tokens[-1]
        right = [(last + 1 + i) % VOCAB for i in range(s.num_wanted)]
        return [0 if first + i in self._wrong_at else t for i, t in enumerate(right)]
