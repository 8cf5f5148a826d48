"""The sweep's inner loop: one prefill per example, all settings of its cache as rows of one batch."""

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from semkv_bench.allocation import SHARED, Allocation, top_tokens
from semkv_bench.cache import RowCache
from semkv_bench.device import memory_total
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.importance import observe, shared
from semkv_bench.models import LoadedModel, ModelShape
from semkv_bench.quantizers import NonFiniteError
from semkv_bench.settings import Coded, Setting

__all__ = ["Engine", "EngineOptions", "Outcome", "Request", "row_bytes"]


@dataclass(frozen=True)
class EngineOptions:
    """How settings are batched and tokens chosen.

    memory_fraction: share of the device's memory that rows of caches may fill.
    max_rows: at most so many settings in one batch; None leaves it to the memory.
    teacher_tokens: tokens of the reference answer that KL and agreement are measured on.
    temperature: 0 is greedy; above, all settings of an example draw with the same random numbers.
    prefill_chunk: prompt tokens per forward call; None feeds the prompt whole.
    noise_examples: examples on which ``full`` is also decoded alone, to show what batching by itself changes.
    """

    memory_fraction: float = 0.5
    max_rows: int | None = None
    teacher_tokens: int = 32
    temperature: float = 0.0
    prefill_chunk: int | None = None
    noise_examples: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.memory_fraction <= 1:
            raise UsageError(f"engine.memory_fraction={self.memory_fraction} must be above 0 and at most 1")
        for name, value, least in (
            ("max_rows", self.max_rows, 1),
            ("teacher_tokens", self.teacher_tokens, 1),
            ("prefill_chunk", self.prefill_chunk, 1),
            ("noise_examples", self.noise_examples, 0),
        ):
            if value is not None and value < least:
                raise UsageError(f"engine.{name}={value} must be at least {least}")
        if not self.temperature >= 0 or math.isinf(self.temperature):
            raise UsageError(f"engine.temperature={self.temperature} must be 0 (greedy) or a positive number")


@dataclass(frozen=True)
class Request:
    """One prompt to answer under every setting.

    input_ids: the whole prompt; reference_ids: the reference answer, forced on the model to measure KL.
    """

    input_ids: Sequence[int]
    reference_ids: Sequence[int]
    max_new_tokens: int
    stop_ids: frozenset[int]
    min_new_tokens: int = 0
    seed: int = 0


@dataclass
class Outcome:
    """What one setting answered. ``tokens`` leaves out the stop token; ``ended`` says that there was one.

    kl: mean KL(full || setting) of the next-token distributions, in nats, over the forced reference answer;
    kl_first the same for its first token; top1_agreement: share of those tokens where both rank the
    same token first. reads: how often attention was handed quantized layers.
    """

    setting: Setting
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    kl: float | None = None
    kl_first: float | None = None
    top1_agreement: float | None = None
    reads: int = 0
    batch_rows: int = 0


class Engine:
    """Runs requests on one loaded model; buffers are kept from one request to the next."""

    def __init__(self, loaded: LoadedModel, options: EngineOptions = EngineOptions()):
        self.loaded = loaded
        self.options = options
        self.prompt = RowCache(loaded.model.config)
        self.rows = RowCache(loaded.model.config)
        self._row_limit = options.max_rows
        self._reference: Tensor | None = None
        self._skipped = 0
        self._scores: dict[str, Tensor] = {}
        self._shared: dict[str, Tensor] = {}

    @torch.inference_mode()
    def run(self, request: Request, settings: Sequence[Setting]) -> list[Outcome]:
        """Answer ``request`` under every setting; the first must be ``full``, which the others are measured against.

        Raises:
            SemkvError: the model produced NaN, or memory does not hold a single row.
        """
        metrics = sorted(set().union(*(setting.metrics for setting in settings)))
        self.prefill(request.input_ids[:-1], metrics, request.seed)
        self._reference = None
        outcomes: list[Outcome] = []
        # Rows of one batch hold the same number of tokens, so pruned settings form batches of their own.
        for _, alike in itertools.groupby(settings, key=self._stored_tokens):
            outcomes.extend(self._run_in_groups(request, list(alike)))
        return outcomes

    @torch.inference_mode()
    def run_alone(self, request: Request, setting: Setting) -> Outcome:
        """Answer the request that was just run once more under one setting, in a batch of its own.

        Its KL and agreement are against ``full`` in the batch: for ``full`` itself, the noise that batching adds.
        """
        return self._run_group(request, [setting])[0]

    @torch.inference_mode()
    def prefill(self, input_ids: Sequence[int], metrics: Sequence[str] = (), seed: int = 0) -> None:
        """Fill the prompt cache with keys and values of ``input_ids`` in the model's own precision.

        metrics: labels of the importance metrics that are taken on the way; seed: of the random one.
        """
        self.prompt.reserve(1, len(input_ids))
        ids = torch.tensor([list(input_ids)], device=self.loaded.device)
        with ExitStack() as stack:
            observer = None
            if metrics:
                observer = stack.enter_context(
                    observe(self.loaded, metrics, tokens=len(input_ids), seed=seed)
                )
            for chunk in ids.split(self.options.prefill_chunk or len(input_ids), dim=1):
                self._forward(self.loaded.model.base_model, chunk, self.prompt)
        self._scores = {} if observer is None else observer.scores()
        self._shared = {label: shared(scores) for label, scores in self._scores.items()}

    @torch.inference_mode()
    def fill(self, settings: Sequence[Setting], seed: int, room: int) -> None:
        """Give every setting a row that holds the prompt's cache as that setting would return it.

        room: tokens that will follow. All settings must keep the same number of tokens.
        """
        tokens = self._stored_tokens(settings[0])
        self.rows.reserve(len(settings), tokens + room)
        quantized = {layer: place for place, layer in enumerate(self.loaded.shape.quantized_layers)}
        for index, (source, target) in enumerate(zip(self.prompt.layers, self.rows.layers, strict=True)):
            stored = source.stored()
            views = target.take(tokens, like=stored)
            target.coded = index in quantized
            ranked = partial(self._importance, place=quantized.get(index, 0))
            for side, (states, view) in enumerate(zip(stored, views, strict=True)):
                try:
                    if settings[0].prune is not None:
                        _keep_side(states[0], view, settings, ranked)
                    else:
                        coded = [(s.keys, s.values)[side] if target.coded else None for s in settings]
                        _fill_side(states[0], view, coded, ranked, _coder_seed(seed, index, side))
                except NonFiniteError as error:
                    raise NonFiniteError(f"layer {index}, {('keys', 'values')[side]}: {error}") from error

    def _importance(self, allocation: Allocation, place: int) -> Tensor | None:
        """Importance [tokens] that ``allocation`` ranks by in the quantized layer number ``place``."""
        if allocation.metric is None:
            return None
        if allocation.scope == SHARED:
            return self._shared[allocation.metric]
        scores = self._scores[allocation.metric]
        return scores[place if len(scores) > 1 else 0]

    def _stored_tokens(self, setting: Setting) -> int:
        """Tokens that the setting keeps of the prompt at hand."""
        tokens = self.prompt.get_seq_length()
        return tokens if setting.prune is None else setting.prune.kept(tokens)

    def _run_in_groups(self, request: Request, settings: list[Setting]) -> list[Outcome]:
        """Split settings that could be one batch into batches that fit the memory."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(settings):
            group = settings[len(outcomes) : len(outcomes) + self._rows_that_fit(request)]
            try:
                done = self._run_group(request, group)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                if group[0].kind == "full":
                    self._reference = None
                self._halve(len(group))
                continue
            outcomes.extend(done)
        return outcomes

    def _run_group(self, request: Request, group: Sequence[Setting]) -> list[Outcome]:
        forced = list(request.reference_ids[: self.options.teacher_tokens])
        self.fill(group, request.seed, room=max(request.max_new_tokens, len(forced)) + 1)
        stored = self.rows.get_seq_length()
        ids = torch.tensor([[request.input_ids[-1], *forced[:-1]]], device=self.loaded.device)
        # Pruned rows hold fewer tokens than the prompt, but what follows keeps its position.
        self._skipped = len(request.input_ids) - 1 - stored
        logits = self._step(ids.expand(len(group), -1)).float()
        log_probs = torch.log_softmax(logits, dim=-1)  # [rows, forced, vocabulary]
        if self._reference is None:
            self._reference = log_probs[0].clone()
        outcomes = [Outcome(setting, batch_rows=len(group)) for setting in group]
        if forced:
            _compare(outcomes, log_probs, self._reference)
        self.rows.rewind(stored + 1)
        self._decode(request, outcomes, logits[:, 0])
        return outcomes

    def _decode(self, request: Request, outcomes: list[Outcome], logits: Tensor) -> None:
        active = list(outcomes)
        choose = _chooser(request, self.options.temperature)
        for step in range(request.max_new_tokens):
            chosen = choose(logits, step).tolist()
            for outcome, token in zip(active, chosen, strict=True):
                outcome.ended = token in request.stop_ids
                if not outcome.ended:
                    outcome.tokens.append(token)
            done = step + 1 == request.max_new_tokens
            leaving = [row for row, outcome in enumerate(active) if outcome.ended or done]
            for row in leaving:
                active[row].reads = self.rows.reads
            order = self.rows.drop(leaving)
            active = [active[row] for row in order]
            if not active:
                return
            ids = torch.tensor([[chosen[row]] for row in order], device=self.loaded.device)
            logits = self._step(ids)[:, -1].float()

    def _step(self, ids: Tensor) -> Tensor:
        """Logits [rows, new, vocabulary] of the next tokens ids [rows, new] of every row."""
        positions = {}
        if self._skipped:
            start = self.rows.get_seq_length() + self._skipped
            positions["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        return self._forward(self.loaded.model, ids, self.rows, **positions).logits

    def _forward(self, module: Any, ids: Tensor, cache: RowCache, **kwargs: Any) -> Any:
        return module(input_ids=ids, use_cache=True, **{self.loaded.cache_keyword: cache}, **kwargs)

    def _rows_that_fit(self, request: Request) -> int:
        room = max(request.max_new_tokens, self.options.teacher_tokens) + 1
        capacity = len(request.input_ids) + room
        per_row = row_bytes(self.loaded.shape, capacity, self.loaded.dtype.itemsize)
        # The forced answer's logits and their logarithms, in float32.
        per_row += (
            2 * 4 * self.options.teacher_tokens * self.loaded.model.get_output_embeddings().weight.shape[0]
        )
        budget = self.options.memory_fraction * memory_total(self.loaded.device)
        fit = max(1, int(budget // per_row))
        return min(fit, self._row_limit or fit)

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


def _fill_side(
    states: Tensor,
    view: Tensor,
    coded: Sequence[Coded | None],
    ranked: Callable[[Allocation], Tensor | None],
    seed: int,
) -> None:
    """states [heads, tokens, head_dim] into view [rows, heads, tokens, head_dim], as each row's coding returns it."""
    start = 0
    for quantizer, run in itertools.groupby(coded, key=lambda side: None if side is None else side.quantizer):
        sides = list(run)
        target = view[start : start + len(sides)]
        start += len(sides)
        if quantizer is None:
            target.copy_(states.expand_as(target))
            continue
        levels = [side.allocation.levels(states.shape[1], ranked(side.allocation)) for side in sides]
        widest = max(len(row) for row in levels)
        stacked = torch.stack([row.expand(widest) for row in levels]).to(states.device)
        quantizer.coder(states.shape[2], seed, states.device).quantize_dequantize(states, stacked, out=target)


def _keep_side(
    states: Tensor, view: Tensor, settings: Sequence[Setting], ranked: Callable[[Allocation], Tensor | None]
) -> None:
    """The kept tokens of states [heads, tokens, head_dim], in their order, into view [rows, heads, kept, head_dim]."""
    for row, setting in zip(view, settings, strict=True):
        kept = top_tokens(ranked(setting.prune), setting.prune.keep)
        row.copy_(states[:, kept.to(states.device)])


def _compare(outcomes: Sequence[Outcome], log_probs: Tensor, reference: Tensor) -> None:
    """Fill in KL and agreement against ``reference`` [forced, vocabulary], row by row."""
    best = reference.argmax(-1)
    for outcome, row in zip(outcomes, log_probs, strict=True):
        kl = (
            torch.nn.functional.kl_div(row, reference, log_target=True, reduction="none").sum(-1).clamp_min(0)
        )
        outcome.kl, outcome.kl_first = kl.mean().item(), kl[0].item()
        outcome.top1_agreement = (row.argmax(-1) == best).float().mean().item()
        if not math.isfinite(outcome.kl):
            raise SemkvError(f"the model gave NaN or infinite logits under setting {outcome.setting.name}")


def _chooser(request: Request, temperature: float) -> Callable[[Tensor, int], Tensor]:
    """Picks the next token of every row from logits [rows, vocabulary].

    Sampling adds Gumbel noise that all rows share, so that settings differ by their logits and not by luck.
    """
    # A stream for every prompt: examples of one seed must not share their luck.
    drawn_by = hashlib.sha256(repr((request.seed, list(request.input_ids))).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(drawn_by[:7], "big"))
    stops = sorted(request.stop_ids)

    def choose(logits: Tensor, step: int) -> Tensor:
        if step < request.min_new_tokens and stops:
            logits = logits.index_fill(-1, torch.tensor(stops, device=logits.device), -math.inf)
        if temperature:
            uniform = torch.rand(logits.shape[-1], generator=generator).clamp_min(1e-20)
            logits = logits / temperature - (-uniform.log()).log().to(logits.device)
        return logits.argmax(-1)

    return choose


def _coder_seed(seed: int, layer: int, side: int) -> int:
    return ((seed * 1_000 + layer) * 2 + side) % 2**63


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
