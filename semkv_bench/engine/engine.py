"""The sweep's inner loop: one prefill per example, all settings of its cache as rows of one batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from semkv_bench.engine.batching import (
    Batches,
    NoRoomError,
    Sizes,
    alike,
    batches,
    in_batches,
    is_out_of_memory,
    row_bytes,
    unpacked_model,
)
from semkv_bench.engine.decode import Decoding, decode
from semkv_bench.engine.options import PACKED, ROWS, EngineOptions
from semkv_bench.engine.outcome import Outcome, Request, Turn
from semkv_bench.engine.packed_rows import PackedRows
from semkv_bench.engine.prefill import Prefilled, prefill, prefill_together
from semkv_bench.engine.rows import RowCache
from semkv_bench.engine.through import read_through
from semkv_bench.engine.uneven import takes_padded_prompts, takes_uneven_rows
from semkv_bench.errors import SemkvError
from semkv_bench.importance import metric
from semkv_bench.models.architecture import begins_anew, length_dependent, read_whole
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
    """The last prompt whose keys and values are at hand, and how many tokens of all prompts were fed and reused.

    together: prompts that were read in one batch with others.
    """

    ids: tuple[int, ...] = ()
    document: str = ""
    fed: int = 0
    reused: int = 0
    together: int = 0

    def with_prompt(self, ids: Sequence[int], document: str, kept: int) -> "PromptsRead":
        """After a prompt of which the first ``kept`` tokens were at hand."""
        return replace(
            self, ids=tuple(ids), document=document, fed=self.fed + len(ids) - kept, reused=self.reused + kept
        )


class Engine:
    """Runs requests on one loaded model; buffers are kept from one request to the next."""

    def __init__(self, loaded: LoadedModel, options: EngineOptions = EngineOptions()):
        self.loaded = loaded
        self.options = options
        self.prompt = RowCache(loaded.model.config)
        self.rows = RowCache(loaded.model.config)
        self.stores: set[str] = set()
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
        prefilled: Prefilled | None = None,
    ) -> Answered:
        """Answer all turns of ``request`` under every setting.

        The first setting must be ``full``, which the others are measured against. rule: which tokens become
        coded, and when. own_history: later turns see a row's own answers, or else the reference answers. prefilled:
        the prompt, where it was read already (``read_together``).

        Raises:
            SemkvError: the model produced NaN, or memory does not hold a single row.
        """
        how = self._how(rule, own_history)
        if prefilled is None:
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

        by_setting = self._in_batches(settings, request, how, run)
        return Answered([list(turn) for turn in zip(*by_setting, strict=True)], prefilled, references)

    def _in_batches(
        self,
        settings: Sequence[Setting],
        request: Request,
        how: Decoding,
        run: Callable[[Sequence[Setting]], list[list[Outcome]]],
    ) -> list[list[Outcome]]:
        planned = self.batches(settings, request, how)
        try:
            self._store_in(planned.store)
            return in_batches(settings, planned.groups, run, self._forget_rows)
        except NoRoomError:
            packed = self.batches(settings, request, how, memory=0)
            if packed.store == planned.store:
                raise
        # Outside of the handler, whose traceback holds the batch's tensors.
        self._store_in(packed.store)
        return in_batches(settings, packed.groups, run, self._forget_rows)

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

        planned = self.batches(settings, request, self._how(PREFILL, True), store=ROWS)
        self._store_in(ROWS)
        by_setting = in_batches(settings, planned.groups, run, self._forget_rows)
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
        how, prefilled = self._how(rule, own_history), answered.prefilled
        if prefilled.together > 1:
            # What reading prompts together changes is part of the noise.
            prefilled = self.prefill(request.input_ids[:-1], seed=request.seed)
        self._store_in(self.batches([setting], request, how).store)
        return self._decode(prefilled, request, how, answered.references, [setting])[0]

    def read_together(
        self, requests: Sequence[Request], settings: Sequence[Setting]
    ) -> list[Prefilled | None]:
        """The prompts of requests of about one length, read in one batch; None for one that is to be read by itself.

        So are all where a setting's metrics follow the prefill or the model keeps states, and those that begin as the
        one before or after them does.
        """
        found: list[Prefilled | None] = [None] * len(requests)
        if len(requests) < 2 or self.prompt.recurrent or any(any(each.scored.values()) for each in settings):
            return found
        documents = [self._read.document, *(request.document for request in requests), ""]
        single = [
            place
            for place, request in enumerate(requests)
            if not (request.document and request.document in (documents[place], documents[place + 2]))
        ]
        lengths = [len(requests[place].input_ids) - 1 for place in single]
        for bucket in alike(lengths, self._padded):
            if len(bucket) > 1 and min(lengths[number] for number in bucket):
                places = [single[number] for number in bucket]
                read = self._read_together([requests[place].input_ids[:-1] for place in places])
                for place, prefilled in zip(places, read, strict=True):
                    found[place] = prefilled
        return found

    def _read_together(self, prompts: Sequence[Sequence[int]]) -> Sequence[Prefilled | None]:
        longest = max(map(len, prompts))
        chunk = self.options.chunk_of(longest, self.loaded.device.type, lambda: self._undivided)
        try:
            read = prefill_together(self.loaded, prompts, chunk)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            self._read = replace(
                self._read,
                fed=self._read.fed + sum(map(len, prompts)),
                together=self._read.together + len(prompts),
            )
            return read
        # Outside of the handler, whose traceback holds the batch's tensors.
        self._forget_rows()
        return [None] * len(prompts)

    @cached_property
    def _padded(self) -> bool:
        # Angles that hang on the length would be those of the longest prompt.
        return not length_dependent(self.loaded.model.config) and takes_padded_prompts(self.loaded)

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

    def batches(
        self,
        settings: Sequence[Setting],
        request: Request,
        how: Decoding,
        store: str | None = None,
        memory: int | None = None,
    ) -> Batches:
        """How the settings of a request are split and stored; ``store`` and ``memory`` instead of what is known."""
        options = self.options if store is None else replace(self.options, store=store)
        sizes = self._sizes if memory is None else replace(self._sizes, memory=memory)
        return batches(options, settings, sizes, request.turns, how)

    @cached_property
    def _sizes(self) -> Sizes:
        model, loaded = self.loaded.model, self.loaded
        return Sizes(
            shape=loaded.shape,
            vocabulary=model.get_output_embeddings().weight.shape[0],
            itemsize=loaded.dtype.itemsize,
            weights=sum(parameter.nbytes for parameter in model.parameters()),
            memory=memory_total(loaded.device),
            packs=unpacked_model(model.config) is None,
        )

    def _store_in(self, store: str) -> None:
        """Let rows be held so from now on."""
        self.stores.add(store)
        if isinstance(self.rows, PackedRows) != (store == PACKED):
            self._forget_rows(store)

    def _forget_rows(self, store: str | None = None) -> None:
        packed = isinstance(self.rows, PackedRows) if store is None else store == PACKED
        self.rows = (PackedRows if packed else RowCache)(self.loaded.model.config)
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
