"""Drives a target engine and a drafter in one thread, by a script of arrivals.

What travels between the two is delayed by the script: at which target step a piece of a
chain arrives, before the step or while its forward pass runs, and how many steps late a
commit reaches the draft. What belongs to one sequence keeps its order, as streams do.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

import torch

from common.engine.batch import Output, RaggedBatch
from common.engine.paged_model import LanguageModel
from common.types import ChainId, CloseSequence, Commit, OpenSequence, Proposal, Verdict
from draft_service.drafters import Drafter
from target_service.engine import TargetEngine

BEFORE, DURING = 0, 1


class HookedModel:
    """A model that lets something happen while its forward pass runs."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.vocab_size, self.context_len = model.vocab_size, model.context_len
        self.device: torch.device = model.device
        self.during: Callable[[], None] = lambda: None

    def forward(self, batch: RaggedBatch) -> Output:
        output = self._model.forward(batch)
        self.during()
        return output

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._model.copy_blocks(copies)


@dataclass
class Script:
    """What happens when; every list is used up in order, then its last entry repeats.

    piece_delays: half steps until a piece arrives: 0 before the next step, 1 during it, 2
    before the one after, ... draft_steps: steps of the drafter before each target step.
    commit_delays: target steps until a commit reaches the draft. split: whether a proposal
    is cut into pieces of one token.
    """

    piece_delays: list[int] = field(default_factory=lambda: [0])
    draft_steps: list[int] = field(default_factory=lambda: [1])
    commit_delays: list[int] = field(default_factory=lambda: [0])
    split: bool = False
    restart_at: int | None = None  # target step before which the draft is replaced
    replace_at: int | None = None  # target step before which the target is


def _forever(values: list[int]) -> Iterator[int]:
    return chain(values, repeat(values[-1]))


class Driver:
    """Runs sequences to their end; `counts` tells what happened to draft tokens."""

    def __init__(
        self,
        target: TargetEngine,
        hooked: HookedModel,
        make_drafter: Callable[[], Drafter] | None,
        script: Script,
        make_target: Callable[[], TargetEngine] | None = None,
    ) -> None:
        self.target, self.script = target, script
        self.make_target = make_target
        self.make_drafter = make_drafter
        self.drafter = make_drafter() if make_drafter else None
        self.counts: Counter[str] = Counter()
        self.texts: dict[int, list[int]] = {}
        self.verdicts: dict[int, list[Verdict]] = {}
        self._opens: dict[int, OpenSequence] = {}
        self._drafted: set[int] = set()
        self._epoch = 1
        self._half = 0  # time in half steps: even before a pass, odd during it
        self._pieces: dict[int, list[Proposal]] = defaultdict(list)  # by time of arrival
        self._latest: dict[int, int] = {}  # arrival of a sequence's last piece
        self._commits: deque[tuple[int, Commit]] = deque()
        self._piece_delays = _forever(script.piece_delays)
        self._draft_steps = _forever(script.draft_steps)
        self._commit_delays = _forever(script.commit_delays)
        hooked.during = self._during

    def run(self, opens: Iterable[OpenSequence], max_steps: int = 10_000) -> dict[int, list[int]]:
        """Output tokens of every sequence."""
        for o in opens:
            self.open(o)
        for _ in range(max_steps):
            if not self._opens:
                return self.texts
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    @property
    def num_open(self) -> int:
        """Sequences that are not at their end."""
        return len(self._opens)

    def open(self, o: OpenSequence) -> None:
        self._opens[o.sequence_id] = o
        self.texts[o.sequence_id] = []
        self.verdicts[o.sequence_id] = []
        self.target.submit(o)
        if self.drafter and o.lookahead:
            self.drafter.open(o)
            self._drafted.add(o.sequence_id)

    def step(self) -> list[Verdict]:
        """One target step and what the draft does before it."""
        step = self._half // 2
        if step == self.script.replace_at:
            self._replace()
        if self.drafter:
            if step == self.script.restart_at:
                self._restart()
            while self._commits and self._commits[0][0] <= step:
                commit = self._commits.popleft()[1]
                if commit.sequence_id in self._drafted:
                    self.drafter.commit(commit)
            for _ in range(next(self._draft_steps)):
                for proposal in self.drafter.step():
                    self._send(proposal)
        self._arrive()
        result = self.target.step()
        self._half = 2 * step + 2
        for verdict in result.verdicts:
            self._hear(verdict)
        return list(result.verdicts)

    def _during(self) -> None:
        self._half += 1
        self._arrive()

    def _send(self, proposal: Proposal) -> None:
        for piece in _split(proposal) if self.script.split else [proposal]:
            stamped = replace(piece, chain_id=ChainId(self._epoch, piece.chain_id.serial))
            sid = piece.sequence_id
            due = max(self._half + next(self._piece_delays), self._latest.get(sid, 0))
            self._latest[sid] = due
            self._pieces[due].append(stamped)
            self.counts["drafted"] += len(piece.token_ids)

    def _arrive(self) -> None:
        for piece in self._pieces.pop(self._half, ()):
            self.target.submit(piece)

    def _hear(self, v: Verdict) -> None:
        assert v.error is None, v.error
        sid = v.sequence_id
        self.texts[sid] += v.token_ids
        self.verdicts[sid].append(v)
        self.counts["tested"] += v.num_tested
        self.counts["accepted"] += v.num_accepted
        self.counts["recovered"] += v.num_tested > v.num_accepted
        self.counts["stale"] += v.num_stale
        self.counts["steps"] += 1
        if v.ended:
            del self._opens[sid]
        if sid in self._drafted and self.drafter:
            if v.ended:
                self.drafter.close(sid)
                self._drafted.remove(sid)
            else:
                commit = Commit(sid, v.committed_len, v.token_ids, v.lookahead)
                self._commits.append((self._half // 2 + next(self._commit_delays), commit))

    def close(self, sid: int) -> None:
        """The client is gone."""
        if self._opens.pop(sid, None) is None:
            return
        self.target.submit(CloseSequence(sid))
        if sid in self._drafted and self.drafter:
            self.drafter.close(sid)
            self._drafted.remove(sid)

    def _replace(self) -> None:
        """The target dies; another one goes on from the committed tokens, the draft anew."""
        assert self.make_target
        self.target = self.make_target()
        self._pieces.clear()
        for o in self._opens.values():
            committed = (*o.token_ids, *self.texts[o.sequence_id])
            self.target.submit(replace(o, token_ids=committed, resumed=True))
        if self.drafter:
            self._restart()

    def _restart(self) -> None:
        """The draft dies with all it knew; a new one is told the committed tokens."""
        assert self.make_drafter
        self.drafter = self.make_drafter()
        self._epoch += 1
        self._commits.clear()
        self._drafted.clear()
        for sid, o in self._opens.items():
            if o.lookahead:
                self.drafter.open(replace(o, token_ids=(*o.token_ids, *self.texts[sid])))
                self._drafted.add(sid)


def _split(p: Proposal) -> list[Proposal]:
    return [
        replace(p, start=p.start + i, token_ids=(t,), distributions=p.distributions[i : i + 1])
        for i, t in enumerate(p.token_ids)
    ]
