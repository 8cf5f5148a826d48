"""The sweep's inner loop: one prefill per example, all settings of its cache as rows of one batch."""

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from semkv_bench.engine.coding import RowCoding
from semkv_bench.engine.options import EngineOptions
from semkv_bench.engine.outcome import Outcome, Request, Turn
from semkv_bench.engine.rows import Row, RowCache, row_mask
from semkv_bench.engine.uneven import takes_uneven_rows
from semkv_bench.errors import SemkvError
from semkv_bench.grid.cost import Stored
from semkv_bench.importance import observe
from semkv_bench.importance.tail import TailNotes
from semkv_bench.models.device import memory_total
from semkv_bench.models.load import LoadedModel
from semkv_bench.models.shape import ModelShape
from semkv_bench.protocols.rule import PREFILL, Blocks
from semkv_bench.settings.setting import Setting

__all__ = ["Engine", "Outcome", "Request", "Turn", "row_bytes"]

_FORCED_BLOCKS = 4


class Engine:
    """Runs requests on one loaded model; buffers are kept from one request to the next."""

    def __init__(self, loaded: LoadedModel, options: EngineOptions = EngineOptions()):
        self.loaded = loaded
        self.options = options
        self.prompt = RowCache(loaded.model.config)
        self.rows = RowCache(loaded.model.config)
        self._row_limit = options.max_rows
        self._prompt_ids: Sequence[int] = ()
        self._scores: dict[str, Tensor] = {}
        self._references: dict[int, Tensor] = {}
        self._coding: RowCoding | None = None

    def run(self, request: Request, settings: Sequence[Setting], rule: Blocks = PREFILL) -> list[Outcome]:
        """Answer a single question under every setting; see ``converse``."""
        return self.converse(request, settings, rule)[0]

    @torch.inference_mode()
    def converse(
        self,
        request: Request,
        settings: Sequence[Setting],
        rule: Blocks = PREFILL,
        own_history: bool = True,
    ) -> list[list[Outcome]]:
        """Answer all turns of ``request`` under every setting; outcomes by turn, then in the order of ``settings``.

        The first setting must be ``full``, which the others are measured against. rule: which tokens become
        coded, and when. own_history: later turns see a row's own answers, or else the reference answers.

        Raises:
            SemkvError: the model produced NaN, or memory does not hold a single row.
        """
        metrics = sorted(set().union(*(setting.metrics for setting in settings)))
        self.prefill(request.input_ids[:-1], metrics, request.seed)
        self._references = {}
        outcomes: list[list[Outcome]] = []
        # Pruned settings keep numbers of tokens of their own, so they form batches of their own.
        for _, alike in itertools.groupby(settings, key=lambda s: s.prune and s.prune.keep):
            outcomes.extend(self._run_in_groups(request, list(alike), rule, own_history))
        return [list(turn) for turn in zip(*outcomes, strict=True)]

    @torch.inference_mode()
    def run_alone(
        self, request: Request, setting: Setting, rule: Blocks = PREFILL, own_history: bool = True
    ) -> list[Outcome]:
        """Answer the request that was just run once more under one setting, in a batch of its own; one outcome a turn.

        Its KL and agreement are against ``full`` in the batch: for ``full`` itself, the noise that batching adds.
        """
        return self._run_group(request, [setting], rule, own_history)[0]

    @torch.inference_mode()
    def prefill(self, input_ids: Sequence[int], metrics: Sequence[str] = (), seed: int = 0) -> None:
        """Fill the prompt cache with keys and values of ``input_ids`` in the model's own precision.

        metrics: labels of the importance metrics that are taken on the way; seed: of the random one.
        """
        self.prompt.reserve(1, len(input_ids))
        self._prompt_ids = list(input_ids)
        ids = torch.tensor([self._prompt_ids], device=self.loaded.device)
        with ExitStack() as stack:
            observer = None
            if metrics:
                observer = stack.enter_context(
                    observe(self.loaded, metrics, tokens=len(input_ids), seed=seed)
                )
            for chunk in ids.split(self.options.prefill_chunk or len(input_ids), dim=1):
                output = self._forward(self.loaded.decoder, chunk, self.prompt)
        self._hidden = output.last_hidden_state[0, -1]
        self._scores = {} if observer is None else observer.scores()

    @torch.inference_mode()
    def fill(self, settings: Sequence[Setting], seed: int, room: int, rule: Blocks = PREFILL) -> None:
        """Give every setting a row that holds the prompt's cache as that setting would return it.

        room: tokens that will follow. All settings must keep the same number of tokens.
        """
        shape = self.loaded.shape
        self._coding = RowCoding(self.rows, settings, rule, shape.quantized_layers, self._prompt_ids, seed)
        self._coding.fill(self.prompt, room, self._scores.__getitem__)

    def _run_in_groups(
        self, request: Request, settings: list[Setting], rule: Blocks, own_history: bool
    ) -> list[list[Outcome]]:
        """Split settings that could be one batch into batches that fit the memory."""
        outcomes: list[list[Outcome]] = []
        while len(outcomes) < len(settings):
            fit = self._rows_that_fit(request, rule, own_history)
            group = settings[len(outcomes) : len(outcomes) + fit]
            try:
                done = self._run_group(request, group, rule, own_history)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                if group[0].kind == "full":
                    self._references = {}
                self._halve(len(group))
                continue
            outcomes.extend(done)
        return outcomes

    def _run_group(
        self, request: Request, group: Sequence[Setting], rule: Blocks, own_history: bool
    ) -> list[list[Outcome]]:
        """One batch: the outcomes of every setting, one a turn."""
        room = self._room(request, rule, own_history)
        self.fill(group, request.seed, room, rule)
        if noted := self._coding.noted:
            length = len(self._prompt_ids)
            notes = TailNotes(self.loaded, noted, len(group), length + room, length - 1, self._hidden)
            self._coding.notes = notes
            with notes.watching():
                return self._take_turns(request, group, own_history)
        return self._take_turns(request, group, own_history)

    def _take_turns(
        self, request: Request, group: Sequence[Setting], own_history: bool
    ) -> list[list[Outcome]]:
        found: list[list[Outcome]] = [[] for _ in group]
        questions = [[request.input_ids[-1]]] * len(group)
        for number, turn in enumerate(request.turns):
            outcomes = [Outcome(setting, batch_rows=len(group), turn=number) for setting in group]
            logits = self._ask(turn, questions, outcomes)
            more = number + 1 < len(request.turns)
            undo = self._coding.mark() if more and not own_history else None
            self._decode(turn, _chooser(request, number, self.options.temperature), outcomes, logits, more)
            for outcome, mine in zip(outcomes, found, strict=True):
                mine.append(outcome)
            if more:
                self.rows.unpark()
                if undo is not None:
                    undo()
                    self._feed_singly(turn.reference_ids)
                self._coding.close(all_open=True)
                following = list(request.turns[number + 1].input_ids)
                questions = [
                    [*_unfed(outcomes[row.index], own_history), *following] for row in self.rows.rows
                ]
        return found

    def _ask(self, turn: Turn, questions: Sequence[list[int]], outcomes: Sequence[Outcome]) -> Tensor:
        """Feed every row its question, and the forced answer after it to measure KL.

        Returns the logits [rows, vocabulary] of the answer's first token; the rows then end with the question.
        """
        rows, rule = self.rows, self._coding.rule
        forced = list(turn.reference_ids[: self._forced_limit(rule)])
        ends = [length + len(ids) for length, ids in zip(rows.lengths, questions, strict=True)]
        for row, end in zip(rows.rows, ends, strict=True):
            outcomes[row.index].context, row.reads = end + row.skipped, 0
        along = self._along(questions, len(forced) - 1)
        shortest = min(map(len, questions))
        widest = max(map(len, questions)) + along
        logits = self._feed([[*ids, *forced[:along]] for ids in questions], keep=widest - shortest + 1)
        starts = [len(ids) - shortest for ids in questions]
        first = torch.stack([logits[row, start] for row, start in enumerate(starts)]).float()
        if forced:
            parts = [logits[row, start : start + along + 1] for row, start in enumerate(starts)]
            comparison = _Comparison(self._references.get(outcomes[0].turn), outcomes, rule)
            comparison.add(torch.stack(parts), rows.rows)
            if along + 1 < len(forced):
                undo = self._coding.mark(ends)
                self._feed_singly(forced[along:-1], comparison.add)
                undo()
            self._references[outcomes[0].turn] = comparison.finish()
        rows.rewind(ends)
        return first

    def _along(self, questions: Sequence[list[int]], tokens: int) -> int:
        """How many of ``tokens`` forced tokens may be fed with the questions and see what single steps would see."""
        rule = self._coding.rule
        if self.rows.recurrent:
            return 0
        opened = [self.rows.opened(row) + len(ids) for row, ids in enumerate(questions)]
        # Where the questions' tokens are ranked by what they were fed with, forced ones must not be among it.
        if any(map(rule.due, opened)) or self._coding.notes is not None:
            return 0
        limits = [rule.fits(count) for count in opened] if rule.codes_tail else []
        return max(0, min([tokens, *limits]))

    def _feed_singly(
        self, ids: Sequence[int], hear: Callable[[Tensor, Sequence[Row]], None] | None = None
    ) -> None:
        """Feed all rows the same tokens, in as few calls as give what one token at a time would give.

        hear: gets the logits [rows, tokens, vocabulary] of every call, and the rows.
        """
        rule, left = self._coding.rule, list(ids)
        while left:
            self._coding.close()
            limits = [rule.fits(self.rows.opened(row)) for row in range(len(self.rows.rows))]
            count = min([len(left), *limits]) if rule.codes_tail else len(left)
            logits = self._feed([left[:count]] * len(self.rows.rows), keep=None if hear is None else count)
            if hear is not None:
                hear(logits, self.rows.rows)
            left = left[count:]

    def _decode(
        self,
        turn: Turn,
        choose: Callable[[Tensor, int], Tensor],
        outcomes: Sequence[Outcome],
        logits: Tensor,
        more: bool,
    ) -> None:
        """Let every row answer. Rows that have ended leave, or wait aside if there are ``more`` turns."""
        for step in range(turn.max_new_tokens):
            chosen = choose(logits, step).tolist()
            leaving = []
            for number, row in enumerate(self.rows.rows):
                outcome, token = outcomes[row.index], chosen[number]
                outcome.ended = token in turn.stop_ids
                if not outcome.ended:
                    outcome.tokens.append(token)
                if outcome.ended or step + 1 == turn.max_new_tokens:
                    leaving.append(number)
                    self._note(outcome, number)
            order = self.rows.park(leaving) if more else self.rows.drop(leaving)
            if not order:
                return
            self._coding.close()
            logits = self._feed([[chosen[row]] for row in order], keep=1)[:, -1].float()

    def _note(self, outcome: Outcome, number: int) -> None:
        """Write down how the cache of row ``number`` was used in the turn that ends."""
        row = self.rows.rows[number]
        outcome.reads = row.reads
        coded = 0 if outcome.setting.kind == "full" else row.coded
        outcome.coded_share = coded / (self.rows.lengths[number] + row.skipped)
        outcome.stored = Stored.of(self.loaded.shape.cache, *self._coding.stored(number))

    def _feed(self, tokens: Sequence[list[int]], keep: int | None) -> Tensor | None:
        """Feed every row its tokens, which may differ in number.

        Returns logits [rows, keep, vocabulary] of the last ``keep`` places of the longest; None for None.
        """
        longest, starts = max(map(len, tokens)), self.rows.lengths
        # Shorter ones are filled up behind; what is fed there is forgotten before anything sees it.
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in tokens], device=self.loaded.device)
        where = self._places(starts, longest)
        self._coding.announce(tokens)
        if keep is None:
            self._forward(self.loaded.decoder, ids, self.rows, **where)
            logits = None
        else:
            logits = self._forward(self.loaded.model, ids, self.rows, logits_to_keep=keep, **where).logits
        if any(len(ids) < longest for ids in tokens):
            self.rows.rewind([start + len(ids) for start, ids in zip(starts, tokens, strict=True)])
        return logits

    def _places(self, starts: Sequence[int], new: int) -> dict[str, Any]:
        """Positions and mask of ``new`` tokens a row, where they are not what transformers would think."""
        rows, even = self.rows.rows, min(starts) == max(starts)
        if even and not any(row.skipped for row in rows):
            return {}
        device = self.loaded.device
        steps = torch.arange(new, device=device)
        first = torch.tensor(starts, device=device)[:, None]
        skipped = torch.tensor([row.skipped for row in rows], device=device)[:, None]
        where = {"position_ids": first + skipped + steps}
        if not even:
            where["attention_mask"] = row_mask(
                self.loaded.model.config, first + steps, max(starts) + new, self.loaded.dtype
            )
        return where

    def _forward(self, module: Any, ids: Tensor, cache: RowCache, **kwargs: Any) -> Any:
        return module(input_ids=ids, use_cache=True, **{self.loaded.cache_keyword: cache}, **kwargs)

    def _forced_limit(self, rule: Blocks) -> int:
        """Tokens of the reference answer that are forced: several blocks of them, where blocks are coded."""
        return max(self.options.teacher_tokens, _FORCED_BLOCKS * rule.block * rule.codes_tail)

    def _room(self, request: Request, rule: Blocks, own_history: bool) -> int:
        """Tokens that a row may have to hold besides the prompt."""
        room, limit = 0, self._forced_limit(rule)
        for turn in request.turns:
            longest = [turn.max_new_tokens, min(limit, len(turn.reference_ids))]
            longest += [] if own_history else [len(turn.reference_ids)]
            room += len(turn.input_ids) * (turn is not request) + max(longest) + 2
        return room

    def _rows_that_fit(self, request: Request, rule: Blocks, own_history: bool) -> int:
        if request.follow_ups and not self._uneven_rows:
            # Answers of different lengths make rows of different lengths.
            return 1
        capacity = len(request.input_ids) + self._room(request, rule, own_history)
        per_row = row_bytes(self.loaded.shape, capacity, self.loaded.dtype.itemsize)
        # The forced answer's logits and their logarithms, in float32.
        at_once = max(self.options.teacher_tokens, rule.block * rule.codes_tail)
        per_row += 2 * 4 * at_once * self.loaded.model.get_output_embeddings().weight.shape[0]
        budget = self.options.memory_fraction * memory_total(self.loaded.device)
        fit = max(1, int(budget // per_row))
        return min(fit, self._row_limit or fit)

    @cached_property
    def _uneven_rows(self) -> bool:
        return takes_uneven_rows(self.loaded)

    def _halve(self, rows: int) -> None:
        if rows == 1:
            raise SemkvError(
                "out of memory with a single cache row: shorten the prompts (max_prompt_tokens=...)"
            )
        self._row_limit = rows // 2
        self.rows = RowCache(self.loaded.model.config)
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()


def row_bytes(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Bytes of one cache row of ``tokens`` tokens, all layers, at ``itemsize`` bytes a value."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * tokens * itemsize


class _Comparison:
    """Gathers KL and agreement of a turn's forced tokens, row by row.

    reference: log-probabilities of ``full`` [forced, vocabulary]; None: of the row among these that is ``full``.
    """

    def __init__(self, reference: Tensor | None, outcomes: Sequence[Outcome], rule: Blocks):
        self._known = reference
        self._outcomes = outcomes
        self._always = rule.codes_prompt
        self._found: list[Tensor] = []
        self._done = 0
        self._kl: list[list[Tensor]] = [[] for _ in outcomes]
        self._same: list[list[Tensor]] = [[] for _ in outcomes]

    def add(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """The next forced tokens: logits [rows, tokens, vocabulary]."""
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        if self._known is None:
            full = next(number for number, row in enumerate(rows) if row.index == 0)
            self._found.append(log_probs[full].clone())
        here = slice(self._done, self._done + log_probs.shape[1])
        reference = self._found[-1] if self._known is None else self._known[here]
        self._done = here.stop
        best = reference.argmax(-1)
        for row, found in zip(rows, log_probs, strict=True):
            if self._always or row.coded:
                kl = torch.nn.functional.kl_div(found, reference, log_target=True, reduction="none")
                self._kl[row.index].append(kl.sum(-1).clamp_min(0))
                self._same[row.index].append((found.argmax(-1) == best).float())

    def finish(self) -> Tensor:
        """Fill in the outcomes; returns the reference."""
        for outcome, kl, same in zip(self._outcomes, self._kl, self._same, strict=True):
            if kl:
                values = torch.cat(kl)
                outcome.kl, outcome.kl_first = values.mean().item(), values[0].item()
                outcome.top1_agreement = torch.cat(same).mean().item()
                if not math.isfinite(outcome.kl):
                    name = outcome.setting.name
                    raise SemkvError(f"the model gave NaN or infinite logits under setting {name}")
        return torch.cat(self._found) if self._known is None else self._known


def _unfed(outcome: Outcome, own_history: bool) -> list[int]:
    """The answer's last token, where it was chosen and never fed: an answer that met its limit."""
    return outcome.tokens[-1:] if own_history and not outcome.ended else []


def _chooser(request: Request, number: int, temperature: float) -> Callable[[Tensor, int], Tensor]:
    """Picks the next token of every row in turn ``number`` from logits [rows, vocabulary].

    Sampling adds Gumbel noise that all rows share, so that settings differ by their logits and not by luck.
    """
    # A stream for every prompt: examples of one seed must not share their luck.
    drawn_by = hashlib.sha256(repr((request.seed, list(request.input_ids))).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(drawn_by[:7], "big") + number)
    turn = request.turns[number]
    stops = sorted(turn.stop_ids)

    def choose(logits: Tensor, step: int) -> Tensor:
        if step < turn.min_new_tokens and stops:
            logits = logits.index_fill(-1, torch.tensor(stops, device=logits.device), -math.inf)
        if temperature:
            uniform = torch.rand(logits.shape[-1], generator=generator).clamp_min(1e-20)
            logits = logits / temperature - (-uniform.log()).log().to(logits.device)
        return logits.argmax(-1)

    return choose


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
