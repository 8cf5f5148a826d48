"""The sweep's inner loop: one prefill per example, all settings of its cache as rows of one batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from semkv_bench.engine.batching import in_batches, is_out_of_memory, row_bytes, row_cost, rows_that_fit
from semkv_bench.engine.decode import Decoding, decode
from semkv_bench.engine.options import EngineOptions
from semkv_bench.engine.outcome import Outcome, Request, Turn
from semkv_bench.engine.prefill import Prefilled, prefill
from semkv_bench.engine.rows import RowCache
from semkv_bench.engine.through import read_through
from semkv_bench.engine.uneven import takes_uneven_rows
from semkv_bench.errors import SemkvError
from semkv_bench.importance import metric
from semkv_bench.models.architecture import begins_anew, read_whole
from semkv_bench.models.device import memory_total
from semkv_bench.models.load import LoadedModel
from semkv_bench.protocols.rule import PREFILL, CodingRule
from semkv_bench.settings.setting import FULL, Setting

__all__ = ["Engine", "Outcome", "Request", "Turn", "row_bytes"]

_SMALLEST_CHUNK = 64


@dataclass(frozen=True)
class Answered:
    """Outcomes by turn, then by setting; and what it takes to run the same request once more."""

    turns: list[list[Outcome]]
    prefilled: Prefilled
    references: dict[int, Tensor]


@dataclass(frozen=True)
class PromptsRead:
    """The last prompt whose keys and values are at hand, and how many tokens of all prompts were fed and reused."""

    ids: tuple[int, ...] = ()
    document: str = ""
    fed: int = 0
    reused: int = 0

    def with_prompt(self, ids: Sequence[int], document: str, kept: int) -> "PromptsRead":
        """After a prompt of which the first ``kept`` tokens were at hand."""
        return PromptsRead(tuple(ids), document, self.fed + len(ids) - kept, self.reused + kept)


class Engine:
    """Runs requests on one loaded model; buffers are kept from one request to the next."""

    def __init__(self, loaded: LoadedModel, options: EngineOptions = EngineOptions()):
        self.loaded = loaded
        self.options = options
        self.prompt = RowCache(loaded.model.config)
        self.rows = RowCache(loaded.model.config)
        self._read = PromptsRead()
        # Tried out before attention is intercepted for rows: the trial has none of them.
        _ = loaded.later_calls

    def run(self, request: Request, settings: Sequence[Setting], rule: CodingRule = PREFILL) -> list[Outcome]:
        """Answer a single question under every setting; see ``answer``."""
        return self.converse(request, settings, rule)[0]

    def converse(
        self,
        request: Request,
        settings: Sequence[Setting],
        rule: CodingRule = PREFILL,
        own_history: bool = True,
    ) -> list[list[Outcome]]:
        """Outcomes by turn, then in the order of ``settings``; see ``answer``."""
        return self.answer(request, settings, rule, own_history).turns

    def answer(
        self,
        request: Request,
        settings: Sequence[Setting],
        rule: CodingRule = PREFILL,
        own_history: bool = True,
    ) -> Answered:
        """Answer all turns of ``request`` under every setting.

        The first setting must be ``full``, which the others are measured against. rule: which tokens become
        coded, and when. own_history: later turns see a row's own answers, or else the reference answers.

        Raises:
            SemkvError: the model produced NaN, or memory does not hold a single row.
        """
        how = self._how(rule, own_history)
        seen, unseen = (
            sorted(set().union(*(setting.scored[question] for setting in settings)))
            for question in ("seen", "unseen")
        )
        prefilled = self.prefill(
            request.input_ids[:-1], seen, request.seed, unseen, request.context, request.document
        )
        references: dict[int, Tensor] = {}

        def run(group: Sequence[Setting]) -> list[list[Outcome]]:
            if group[0].kind == "full":
                # What a batch without memory left behind is not this batch's reference.
                references.clear()
            return self._decode(prefilled, request, how, references, group)

        by_setting = in_batches(settings, self._rows_that_fit(request, how), run, self._forget_rows)
        return Answered([list(turn) for turn in zip(*by_setting, strict=True)], prefilled, references)

    def read_through(
        self, request: Request, settings: Sequence[Setting], references: dict[int, Tensor]
    ) -> list[list[Outcome]]:
        """Outcomes of the one turn, in the order of ``settings``; see ``semkv_bench.engine.through``.

        references: log-probabilities of ``full``, which the first call fills in.
        """

        def run(group: Sequence[Setting]) -> list[list[Outcome]]:
            if group[0].kind == "full" and len(settings) > 1:
                references.clear()
            return read_through(self.loaded, request, group, self.rows, references)

        fit = self._rows_that_fit(request, self._how(PREFILL, True))
        by_setting = in_batches(settings, fit, run, self._forget_rows)
        return [list(turn) for turn in zip(*by_setting, strict=True)]

    def answer_alone(
        self,
        request: Request,
        answered: Answered,
        setting: Setting = FULL,
        rule: CodingRule = PREFILL,
        own_history: bool = True,
    ) -> list[Outcome]:
        """The answers of one setting in a batch of its own, to a request that was ``answered``; one outcome a turn.

        Their KL and agreement are against ``full`` in the batch: for ``full`` itself, the noise that batching adds.
        """
        how = self._how(rule, own_history)
        return self._decode(answered.prefilled, request, how, answered.references, [setting])[0]

    def prefill(
        self,
        input_ids: Sequence[int],
        metrics: Sequence[str] = (),
        seed: int = 0,
        unseen: Sequence[str] = (),
        context: int | None = None,
        document: str = "",
    ) -> Prefilled:
        """See ``semkv_bench.engine.prefill``; where memory gives out, in chunks of half as many tokens.

        Where the prompt before was about the same ``document``, what both begin with is not fed again.
        """
        chunk = self.options.chunk_of(len(input_ids), self.loaded.device.type, lambda: self._undivided)
        kept = self._kept(input_ids, document, (*metrics, *unseen))
        # What is cut short leaves nothing to go on from.
        self._read = replace(self._read, ids=(), document="")
        while True:
            try:
                found = prefill(
                    self.loaded, input_ids, metrics, seed, chunk, self.prompt, unseen, context, kept
                )
                self._read = self._read.with_prompt(input_ids, document, kept)
                return found
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if chunk <= _SMALLEST_CHUNK or self._undivided:
                    raise SemkvError(
                        f"out of memory while the model reads {len(input_ids)} tokens: shorten the prompts "
                        "(max_prompt_tokens=...)"
                    ) from error
            chunk = max(_SMALLEST_CHUNK, min(chunk, len(input_ids)) // 2)
            self._forget_rows()

    @property
    def prompts_read(self) -> "PromptsRead":
        """What was fed of the prompts so far, and what was not fed again."""
        return self._read

    def _kept(self, ids: Sequence[int], document: str, metrics: Sequence[str]) -> int:
        """Tokens of the prompt before that ``ids`` begin with and that need not be fed again; one is always fed."""
        if not document or document != self._read.document or self._undivided:
            return 0
        if self.prompt.recurrent or not all(metric(label).replays for label in metrics):
            return 0
        pairs = zip(ids[:-1], self._read.ids, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids) - 1, len(self._read.ids)))

    @cached_property
    def _undivided(self) -> str | None:
        """Why the model's prompts cannot be read in parts; None: they can."""
        label = self.loaded.label
        if not self.loaded.later_calls.parts:
            return begins_anew(label)
        return read_whole(self.loaded.model.config, label)

    def _decode(
        self,
        prefilled: Prefilled,
        request: Request,
        how: Decoding,
        references: dict[int, Tensor],
        settings: Sequence[Setting],
    ) -> list[list[Outcome]]:
        return decode(self.loaded, prefilled, request, settings, how, self.rows, references)

    def _how(self, rule: CodingRule, own_history: bool) -> Decoding:
        return Decoding(
            rule, own_history, self.options.teacher_tokens, self.options.temperature, self._uneven
        )

    @cached_property
    def _uneven(self) -> bool:
        return takes_uneven_rows(self.loaded)

    def _rows_that_fit(self, request: Request, how: Decoding) -> int:
        loaded = self.loaded
        vocabulary = loaded.model.get_output_embeddings().weight.shape[0]
        per_row = row_cost(loaded.shape, request.turns, how, vocabulary, loaded.dtype.itemsize)
        weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
        fit = rows_that_fit(self.options, per_row, memory_total(loaded.device), weights)
        # Answers of a conversation differ in length, and with them the rows of the next turn.
        return fit if how.uneven or not request.follow_ups else 1

    def _forget_rows(self) -> None:
        self.rows = RowCache(self.loaded.model.config)
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
