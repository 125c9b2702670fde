"""Draws from a model: batched over sequences, on the same paged ragged engine as the target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.engine.adjustments import Adjustments, RowEdit, adjust_, end_ids_of
from common.engine.batch import Span, pack
from common.engine.block_manager import BlockManager
from common.engine.noise import Domain, GumbelNoise, Noise, NoiseKeys
from common.engine.paged_model import LanguageModel
from common.engine.sampling import (
    RowParams,
    log_probs_,
    sparsify,
    unusable_rows,
    widened,
)
from common.errors import InvalidRequestError
from common.types import (
    Commit,
    EngineStatus,
    IntArray,
    OpenSequence,
    Proposal,
    Rule,
    SamplingParams,
    SparseDist,
)
from draft_service.sequence import DraftSequence


@dataclass(eq=False)
class _Entry:
    seq: DraftSequence
    adjustments: Adjustments | None  # of its logits; follows `seq.tokens`, chain included
    cache_scope: str
    fork_of: int
    num_cached: int = 0  # tokens whose keys and values are in the cache; 0: it holds no blocks
    broken: bool = False  # the model yielded no numbers; undrafted from then on


class ModelDrafter:
    """One token a step for every sequence below its lookahead; when memory is short, oldest first.

    A sequence for which there is no memory is not drafted until something changes. What it read
    of committed tokens stays in the prefix cache for others that begin alike.
    """

    def __init__(
        self,
        model: LanguageModel,
        blocks: BlockManager,
        *,
        eos_token_ids: tuple[int, ...] = (),
        max_rows: int = 512,
        support: int = 32,
        noise: Noise | None = None,
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._eos = eos_token_ids
        self._max_rows = max_rows
        self._support = support
        self._noise = noise or GumbelNoise()
        self._entries: dict[int, _Entry] = {}  # in order of opening
        self._starved = False  # the last plan found no room; cleared by any event

    def open(self, s: OpenSequence) -> None:
        """See `Drafter`."""
        self._check(s.token_ids)
        if len(s.token_ids) >= self._model.context_len:
            raise InvalidRequestError(
                f"has {len(s.token_ids)} tokens, the draft's context is {self._model.context_len}",
                field="input",
            )
        params = _within(s.sampling, self._model.vocab_size)
        ends = end_ids_of(params, (t for t in self._eos if t < self._model.vocab_size))
        adjustments = Adjustments.of(params, s.token_ids, s.num_prompt, ends)
        seq = DraftSequence.of(s)
        self._entries[s.sequence_id] = _Entry(seq, adjustments, s.cache_scope, s.fork_of)
        self._starved = False

    def commit(self, c: Commit) -> None:
        """See `Drafter`."""
        self._check(c.token_ids)
        entry = self._entries[c.sequence_id]
        held = entry.seq.commit(c)
        if entry.adjustments is not None:
            entry.adjustments.truncate(held)
            entry.adjustments.append(entry.seq.tokens[held:])
        entry.num_cached = min(entry.num_cached, held)
        if c.sequence_id in self._blocks:
            self._blocks.truncate(c.sequence_id, entry.num_cached)
            self._register(entry)
        self._starved = False

    def close(self, sid: int) -> None:
        """See `Drafter`."""
        self._set_back(self._entries.pop(sid))
        self._starved = False

    def step(self) -> list[Proposal]:
        """See `Drafter`."""
        plan = self._plan()
        if not plan:
            self._starved = True
            return []
        if copies := self._blocks.take_copies():
            self._model.copy_blocks(copies)
        output = self._model.forward(pack(plan, self._blocks, self._model.device))
        drawing = []
        for span in plan:
            entry = self._entries[span.sid]
            entry.num_cached += len(span.token_ids)
            self._register(entry)
            if span.num_logits:
                drawing.append(entry)
        return self._draw(drawing, output.logits) if drawing else []

    def has_work(self) -> bool:
        """See `Drafter`."""
        return not self._starved and any(self._wants(entry) for entry in self._entries.values())

    def num_unread(self, sid: int) -> int:
        """See `Drafter`."""
        entry = self._entries[sid]
        return max(0, entry.seq.num_committed - entry.num_cached)

    def status(self) -> EngineStatus:
        """See `Drafter`."""
        return EngineStatus(
            num_running=len(self._entries),
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free,
            num_cached_blocks=self._blocks.num_cached,
        )

    def _check(self, token_ids: tuple[int, ...]) -> None:
        if not all(t < self._model.vocab_size for t in token_ids):
            raise InvalidRequestError(
                f"a token id is outside the draft's vocabulary of {self._model.vocab_size}",
                field="token_ids",
            )

    def _wants(self, entry: _Entry) -> bool:
        limit = min(self._model.context_len, self._blocks.capacity)
        return entry.seq.num_wanted > 0 and len(entry.seq.tokens) < limit and not entry.broken

    def _plan(self) -> list[Span]:
        """Rows that bring every wanting sequence up to its next token, oldest first."""
        budget, plan = self._max_rows, []
        for entry in list(self._entries.values()):
            seq = entry.seq
            if not budget or not self._wants(entry) or self._should_wait(entry):
                continue
            if seq.sid not in self._blocks:
                entry.num_cached = self._blocks.open(seq.sid, seq.tokens, entry.cache_scope)
            num = min(len(seq.tokens) - entry.num_cached, budget)
            if not self._make_room(entry, entry.num_cached + num):
                break  # all that is left is older, or planned already
            rows = seq.tokens[entry.num_cached : entry.num_cached + num]
            complete = entry.num_cached + num == len(seq.tokens)
            plan.append(Span(seq.sid, entry.num_cached, rows, int(complete)))
            budget -= num
        return plan

    def _make_room(self, entry: _Entry, num_slots: int) -> bool:
        """Reserve slots, taking them from the newest sequences if it must."""
        newer = list(self._entries.values())
        while not self._blocks.reserve(entry.seq.sid, num_slots):
            victim = newer.pop()
            if victim is entry:
                return False
            self._set_back(victim)
        return True

    def _should_wait(self, entry: _Entry) -> bool:
        """Whether another sequence is about to read the same prompt."""
        parent = self._entries.get(entry.fork_of)
        if parent is None or entry.num_cached or not self._wants(parent):
            return False
        return self.num_unread(entry.fork_of) > 0 and parent.seq.sid < entry.seq.sid

    def _set_back(self, entry: _Entry) -> None:
        """Take all its blocks."""
        entry.num_cached = 0
        if entry.seq.sid in self._blocks:
            self._blocks.free(entry.seq.sid)

    def _register(self, entry: _Entry) -> None:
        """What is committed and in the cache may be shared; tokens of a chain may not."""
        seq = entry.seq
        self._blocks.register(seq.sid, seq.tokens[: seq.num_committed])

    def _draw(self, drawing: list[_Entry], logits: Tensor) -> list[Proposal]:
        """One token for each sequence. logits [N, V]"""
        x = widened(logits)
        adjust_(x, _edits(drawing))
        params = [e.seq.params for e in drawing]
        log_q = log_probs_(x, RowParams.of(params, np.ones(len(params), np.int64)))
        unusable = unusable_rows(log_q)  # sampling may leave nothing of what was finite
        for entry, broken in zip(drawing, unusable.tolist(), strict=True):
            entry.broken = broken
        usable = np.flatnonzero(~unusable)
        drawing, params = [drawing[i] for i in usable], [params[i] for i in usable]
        log_q = log_q[torch.from_numpy(usable)]
        keys = NoiseKeys(
            np.array([p.seed for p in params], np.uint64),
            np.array([len(e.seq.tokens) for e in drawing], np.int64),
        )
        tokens = np.zeros(len(params), np.int64)
        dists: dict[int, SparseDist] = {}

        def rows_under(rule: Rule) -> IntArray:
            return np.flatnonzero([p.rule is rule for p in params])

        if (greedy := rows_under(Rule.GREEDY)).size:
            tokens[greedy] = self._noise.likeliest(log_q[torch.from_numpy(greedy)]).cpu().numpy()
        if (coupled := rows_under(Rule.COUPLED)).size:
            chosen = log_q[torch.from_numpy(coupled)]
            tokens[coupled] = self._noise.choose(keys[coupled], Domain.TOKEN, chosen).cpu().numpy()
        if (rejection := rows_under(Rule.REJECTION)).size:
            qs = sparsify(log_q[torch.from_numpy(rejection)], self._support)
            dists = dict(zip(rejection.tolist(), qs, strict=True))
            tokens[rejection] = self._sample(dists, keys[rejection], log_q.shape[1])
        for entry, token in zip(drawing, tokens.tolist(), strict=True):
            if entry.adjustments is not None:
                entry.adjustments.append((token,))
        return [
            entry.seq.extend([int(tokens[i])], (dists[i],) if i in dists else ())
            for i, entry in enumerate(drawing)
        ]

    def _sample(self, dists: dict[int, SparseDist], keys: NoiseKeys, vocab_size: int) -> IntArray:
        """A token from each q as it will be sent."""
        log_w = torch.full((len(dists), vocab_size), -torch.inf, dtype=torch.float64)
        for row, dist in zip(log_w, dists.values(), strict=True):
            row[torch.from_numpy(dist.token_ids)] = torch.from_numpy(dist.probs).log()
        tokens: IntArray = self._noise.choose(keys, Domain.DRAFT, log_w).numpy()
        return tokens


def _edits(drawing: list[_Entry]) -> dict[int, RowEdit]:
    """What the text of each row makes of its logits."""
    texts = [(i, e.adjustments) for i, e in enumerate(drawing)]
    edits = {i: adjustments.edit() for i, adjustments in texts if adjustments is not None}
    return {i: edit for i, edit in edits.items() if edit is not None}


def _within(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Without the ids that this model lacks: it can't draw them anyway."""
    return replace(
        params,
        logit_bias=tuple((t, bias) for t, bias in params.logit_bias if t < vocab_size),
        stop_token_ids=tuple(t for t in params.stop_token_ids if t < vocab_size),
    )
