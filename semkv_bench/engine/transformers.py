"""The engine that simulates: a transformers model in this process, all settings as rows of one batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from semkv_bench.engine.backend import Answers, Backend, Session
from semkv_bench.engine.batching import unpacked_model, unpacked_setting
from semkv_bench.engine.engine import Engine
from semkv_bench.engine.options import AUTO, PACKED, ROWS, EngineOptions
from semkv_bench.engine.outcome import Outcome, Request, request_of
from semkv_bench.errors import UsageError
from semkv_bench.importance import metric
from semkv_bench.importance.probe import probe_own_metrics
from semkv_bench.kernels import backend
from semkv_bench.kernels.numerics import Saturation
from semkv_bench.models.architecture import read_whole, supported_attention
from semkv_bench.models.device import describe, effective, requested
from semkv_bench.models.load import LoadedModel
from semkv_bench.models.rotary import check_rotary
from semkv_bench.protocols import Protocol
from semkv_bench.quantizers.probe import probe_own
from semkv_bench.settings.setting import FULL, Setting
from semkv_bench.tasks import Example

__all__ = ["TransformersBackend", "TransformersSession"]


@dataclass(frozen=True)
class TransformersBackend(EngineOptions, Backend):
    """One full-precision prefill an example; every setting is simulated on it. Its keys are ``EngineOptions``."""

    name: ClassVar[str] = "transformers"
    simulates: ClassVar[bool] = True
    # Where rows are and how they are split changes no result by more than rounding.
    free: ClassVar[tuple[str, ...]] = ("memory_fraction", "max_rows", "store", "prompts", "prefill_chunk")

    def check(self, source: Any, settings: Sequence[Setting], protocol: Protocol) -> None:
        """See ``Backend``: vectors that a quantizer cannot code, layers that cannot be coded or pruned."""
        shape = self.shape(source)
        source.check_packages()
        for setting in settings:
            setting.check_in(shape.cache)
        for head_dim in sorted(
            {layer.keys.head_dim for layer in shape.cache if layer is not None and layer.coded}
        ):
            sides = [
                side for setting in settings for side in (setting.keys, setting.values) if side is not None
            ]
            probe_own((side.quantizer for side in sides), head_dim)
            probe_own_metrics((label for setting in settings for label in setting.metrics), head_dim)
        if self.store == PACKED:
            self._check_packs(source, settings, protocol)
        if self.prefill_chunk not in (None, AUTO):
            if protocol.one_pass:
                raise UsageError(
                    f"protocol={protocol.name} reads question and answer in one pass; leave engine.prefill_chunk out"
                )
            if (why := read_whole(source.config(), source.name)) is not None:
                raise UsageError(why)
        if not shape.quantized_layers:
            raise UsageError(f"{source.name} has no full-attention layer to quantize")
        pruned = any(setting.prune for setting in settings)
        used = supported_attention(source.config(), source.attention)
        reading = any(setting.read for setting in settings)
        hiding = "pruning" if pruned else "read=blocks"
        if (pruned or reading) and used not in ("sdpa", "eager"):
            raise UsageError(
                f"{hiding} hides tokens by a mask, which model.attention={used} does not take; use sdpa or "
                "eager"
            )
        if any(setting.prune and setting.prune.per_head for setting in settings):
            heads = {layer.keys.heads for layer in shape.cache if layer is not None and layer.coded}
            if len(heads) > 1:
                raise UsageError(
                    f"{source.name} has layers of {', '.join(map(str, sorted(heads)))} key-value heads; "
                    "allocation=evict needs the same number in all; use allocation=prune"
                )
        for label in sorted(set().union(*(setting.metrics for setting in settings))):
            if metric(label).unturned:
                check_rotary(source.config(), source.name, label, "choose another score")
        for setting in settings:
            if setting.prune and setting.prune.per_head:
                setting.prune.check_shape(len(shape.quantized_layers), shape.kv_heads)
            if setting.prune and setting.prune.renumbered:
                check_rotary(source.config(), source.name, setting.name, "use allocation.positions=true")
        if len(shape.quantized_layers) < shape.layers and (pruned or reading):
            raise UsageError(
                f"{hiding} needs full attention in all layers, which {source.name} has in "
                f"{len(shape.quantized_layers)} of {shape.layers}"
            )

    def _check_packs(self, source: Any, settings: Sequence[Setting], protocol: Protocol) -> None:
        """Refuse what rows cannot hold as codes."""
        if protocol.one_pass:
            raise UsageError(
                f"protocol={protocol.name} codes what each row sees by itself, and no prompt that rows share; use "
                "engine.store=rows"
            )
        if reason := unpacked_model(source.config()):
            raise UsageError(
                f"engine.store=packed cannot hold rows of {source.name}: {reason}; use engine.store=rows"
            )
        for setting in settings:
            if reason := unpacked_setting(setting):
                raise UsageError(
                    f"engine.store=packed cannot hold {setting.name}: {reason}; leave it out, or use engine.store=rows"
                )

    def open(self, source: Any) -> "TransformersSession":
        """See ``Backend``."""
        return TransformersSession(source.load(), self, requested(source))


class TransformersSession(Session):
    """A loaded model."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions = EngineOptions(),
        requested: Mapping[str, Any] | None = None,
    ):
        self.loaded = loaded
        self._requested = dict(requested or {})
        self._saturated_before = Saturation.count()
        self.label, self.revision = loaded.label, loaded.revision
        self.engine = Engine(loaded, options)
        self.together = options.prompts

    def describe(self) -> dict[str, Any]:
        """See ``Session``."""
        loaded = self.loaded
        return {
            **describe(loaded.device),
            "requested": self._requested,
            "effective": effective(loaded.model, loaded.device),
        }

    def notes(self) -> dict[str, Any]:
        """See ``Session``: metadata that float16 could not hold, prompt tokens not fed again, rows held as codes."""
        stores = {"stores": sorted(self.engine.stores)} if self.engine.stores - {ROWS} else {}
        return {**self._saturated(), **self._prompts_read(), **stores}

    def _prompts_read(self) -> dict[str, Any]:
        read = self.engine.prompts_read
        reused = {"prompt_tokens_fed": read.fed, "prompt_tokens_reused": read.reused} if read.reused else {}
        return {**reused, **({"prompts_read_together": read.together} if read.together else {})}

    def _saturated(self) -> dict[str, Any]:
        if backend(self.loaded.device) == "triton":
            # The kernels saturate as the reference does, and do not tell.
            return {"saturated_metadata": None}
        count = Saturation.count() - self._saturated_before
        words = (
            f"{count} scales, zeros or norms were beyond float16 and stored as 65504; what they belong to comes back "
            "distorted, as from any cache with float16 metadata"
        )
        return {"saturated_metadata": count, **({"warning": words} if count else {})}

    def answers(
        self,
        examples: Sequence[Example],
        settings: Sequence[Setting],
        protocol: Protocol,
        alone: Sequence[bool],
    ) -> Iterator[Answers]:
        """See ``Session``."""
        rule, own = protocol.rule, protocol.own_history
        requests = [request_of(example, self.loaded.eos_ids) for example in examples]
        if protocol.one_pass:
            for request, once_more in zip(requests, alone, strict=True):
                yield self._read_through(request, settings, once_more)
            return
        read = (
            prefilled
            for begin in range(0, len(requests), self.together)
            for prefilled in self.engine.read_together(requests[begin : begin + self.together], settings)
        )
        for request, prefilled, once_more in zip(requests, read, alone, strict=True):
            answered = self.engine.answer(request, settings, rule, own, prefilled)
            single = None
            if once_more:
                single = self.engine.answer_alone(request, answered, FULL, rule, own)
            yield Answers(
                [[self._read(outcome) for outcome in turn] for turn in answered.turns],
                None if single is None else [self._read(outcome) for outcome in single],
            )

    def _read_through(self, request: Request, settings: Sequence[Setting], once_more: bool) -> Answers:
        references: dict[int, Tensor] = {}
        turns = self.engine.read_through(request, settings, references)
        single = self.engine.read_through(request, [FULL], references)[0] if once_more else None
        return Answers(turns, single)

    def _read(self, outcome: Outcome) -> Outcome:
        text = self.loaded.tokenizer.decode(outcome.tokens, skip_special_tokens=True)
        return replace(outcome, text=text)
