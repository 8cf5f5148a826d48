"""``SemKVCache``: a drop-in for transformers' ``DynamicCache`` that stores packed codes."""

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig

from semkv_bench.errors import UsageError
from semkv_bench.kernels import PackedLayout
from semkv_bench.kernels.numerics import finite_together
from semkv_bench.models.architecture import decoder_of
from semkv_bench.models.layers import cache_layers
from semkv_bench.models.shape import ModelShape
from semkv_bench.packed.coding import check_packable
from semkv_bench.packed.last_token import feed_last_again, stop
from semkv_bench.packed.layer import CacheState, PackedLayer
from semkv_bench.packed.ranking import Layouts, Ranking
from semkv_bench.protocols.rule import CodingRule
from semkv_bench.quantizers.packing import Packed
from semkv_bench.settings.setting import Setting

__all__ = ["CacheBytes", "SemKVCache"]

_ATTENTION = ("dequantize", "packed")
_LAYOUT_BLOCKS = (16, 32, 64, 128, 256)  # tokens that codes are packed together by
_LAYOUT_BLOCK = 64


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of the buffers that a cache holds between forward calls.

    codes: packed words; metadata: scales, zeros, norms; layout: which token has which levels, where
    blocks start; open: tokens in the model's own type; sliding: layers that are not quantized, and recurrent states.
    """

    codes: int
    metadata: int
    layout: int
    open: int
    sliding: int

    @property
    def packed(self) -> int:
        """What packed tokens take."""
        return self.codes + self.metadata + self.layout

    @property
    def total(self) -> int:
        """All of it."""
        return self.packed + self.open + self.sliding


class SemKVCache(Cache):
    """A cache whose full-attention layers hold packed codes and an open block in the model's own type.

    ``model.generate(**inputs, cache=SemKVCache(model.config, setting))``. The prompt attends at
    full precision; all its tokens but the last are coded once, and the last already sees that, as in a
    sweep. Where ``key_norm`` or ``value_norm`` rank tokens over all layers together, no layer can be coded
    before the call is over: until then the cache is as large as in full, and the last token goes through
    the model twice (see ``refeed``). Left padding is not stored. Sliding layers stay as they are.

    config: the model's own; attention reads its layer types and is reached through it.
    setting: uniform or two-level; see ``semkv_bench.settings.setting``.
    seed: of rotations, and of ``random`` importance.
    prompt_ids: the prompt's token ids [tokens] or [rows, tokens], as the model is fed them; ``prefill`` knows them.
        With them ``random`` draws what a sweep of the same seed draws for the prompt; without them a cache sees no
        ids and draws by seed and length.
    parts: ``prompt``: what follows the prompt stays open. ``both``: it is coded too, in blocks of ``block``
        tokens, each once, as soon as a token beyond the block arrives. ``generated``: these blocks alone
        are coded. See ``semkv_bench.protocols.rule``; ``end_turn`` codes an incomplete block.
    attention: ``dequantize`` gives the model one layer's keys and values in full at a time; ``packed``
        lets single new tokens attend over the codes themselves, whose values then are float32 and not rounded to
        the model's type: of methods that the kernel knows codes lie as it reads them, at a price of its own.
    prompt_tokens: length of the prompt, if it comes in several calls; without it the first call is the prompt.
    importance: scores of the prompt's tokens but the last by metric label, [packed layers, tokens] or
        [1, tokens], for metrics that a cache alone cannot know; of several rows, a list of such mappings.

    Raises:
        UsageError: the setting cannot be packed or ranked, or an argument is out of range.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        setting: Setting,
        *,
        seed: int = 0,
        parts: str = "prompt",
        block: int = 64,
        attention: str = "dequantize",
        prompt_tokens: int | None = None,
        prompt_ids: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
        importance: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    ):
        rule = CodingRule(parts, block)
        _check(setting, config, attention, prompt_tokens)
        text = config.get_text_config(decoder=True)
        _check_use_cache(text, "model.config")
        layers = DynamicCache(config=config).layers
        kinds = cache_layers(config)
        packed = [i for i, kind in enumerate(kinds) if kind.stores_all]
        if not packed:
            raise UsageError("the model has no full-attention layer, so there is nothing to pack")
        if any(kinds[i].states for i in packed):
            raise UsageError("attention layers that keep states beside their tokens cannot be packed")
        rows = [importance] if isinstance(importance, Mapping) else importance
        self.setting = setting
        self.plan = CacheState(
            config=weakref.ref(text),
            setting=setting,
            ranking=Ranking(setting, len(packed), seed, rows, rule, _rows_of(prompt_ids)),
            layouts=Layouts(block if block in _LAYOUT_BLOCKS else _LAYOUT_BLOCK),
            seed=seed,
            rule=rule,
            attention=attention,
            prompt_tokens=prompt_tokens,
            depth=len(layers),
        )
        for index in packed:
            layers[index] = PackedLayer(self.plan, index)
        if self.plan.ranking.spans_layers and any(kind.states for kind in kinds):
            raise UsageError(
                f"{setting.name} ranks tokens over all layers, for which a prompt's last token goes through the "
                "model twice; recurrent states cannot be rewound: use scope=layer"
            )
        super().__init__(layers=layers)
        self._refeed = None
        self._arm()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add one layer's states; see ``transformers.Cache``."""
        self._settle_loan()
        if layer_idx == self.plan.layers[0].index:
            self.plan.new_call()
            self._code_due()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.no_grad()
    def prefill(self, model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> None:
        """Feed a prompt [rows, tokens] but for its last token, and code it; ``generate`` takes it from there.

        ``cache.prefill(model, **inputs)``, then ``model.generate(**inputs, cache=cache)``: the order
        of a sweep, whatever the setting. Padding must be on the left.
        """
        if self.get_seq_length():
            raise UsageError("prefill needs an empty cache; call reset() first")
        _check_use_cache(getattr(model, "generation_config", None), "model.generation_config")
        ids = input_ids[:, :-1]
        if not ids.shape[1]:
            return
        inputs = {"input_ids": ids}
        self.plan.ranking.prompts = _rows_of(input_ids)
        self.plan.padding = [0] * len(ids)
        if attention_mask is not None and not bool(attention_mask.all()):
            mask = attention_mask[:, :-1]
            # generate() counts positions so; a plain forward call would count padding, too.
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, :-1]
            inputs |= {"attention_mask": mask, "position_ids": positions}
            self.plan.padding = (attention_mask.long().argmax(-1)).clamp(max=ids.shape[1]).tolist()
        named = signature(type(model).forward).parameters
        keyword = "cache" if "cache" in named else "past_key_values"
        self._disarm()
        try:
            with finite_together():
                decoder_of(model)(use_cache=True, **inputs, **{keyword: self})
        finally:
            self.plan.padding = None
        self._code_due()

    @torch.no_grad()
    def end_turn(self) -> None:
        """Code all that is still open, an incomplete block too: what happens between turns of a conversation.

        With ``parts="prompt"`` nothing is.
        """
        self._settle_loan()
        self._code_due()
        self._code(turn_over=True)

    def reset(self) -> None:
        """Forget everything, the prompt's ids too; the next call brings a prompt."""
        self._disarm()
        self.plan.ranking.prompts = None
        super().reset()
        self._arm()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SemKVCache":
        """A cache of its own, for example to go on from one prompt in several ways."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        parts = {name: part for name, part in vars(self).items() if name != "_refeed"}
        vars(copied).update(copy.deepcopy(parts, memo), _refeed=None)
        if not copied.get_seq_length():
            copied._arm()
        return copied

    @property
    def nbytes(self) -> CacheBytes:
        """Bytes of all buffers by part, what rows or layers share counted once.

        Codebooks, rotations and the workspace for one layer are not part of the cache.
        """
        vectors, layouts = _distinct(self._pieces())
        ours = self.plan.layers
        others = [layer for layer in self.layers if not isinstance(layer, PackedLayer)]
        codes = sum(packed.code_nbytes for packed in vectors)
        return CacheBytes(
            codes=codes,
            metadata=sum(packed.nbytes for packed in vectors) - codes,
            layout=sum(layout.nbytes for layout in layouts),
            open=sum(side.plain_nbytes for layer in ours for side in layer.sides),
            sliding=sum(tensor.untyped_storage().nbytes() for layer in others for tensor in _tensors(layer)),
        )

    @property
    def workspace_nbytes(self) -> int:
        """Bytes of the one layer in full that the cache hands to attention, kept for reuse."""
        return sum(buffer.nbytes for buffer in self.plan.workspace.values())

    def effective_bits(self) -> float:
        """Measured bits per value of what is coded: codes, metadata and layout of keys and values.

        A side that the setting leaves uncoded counts with its own type. Raises UsageError while nothing is coded.
        """
        vectors, layouts = _distinct(self._pieces())
        if not vectors:
            raise UsageError("nothing is coded yet")
        size = sum(part.nbytes for part in (*vectors, *layouts))
        values, seen = 0, set()
        for side, other in ((s, o) for layer in self.plan.layers for s, o in _pairs(layer.sides)):
            _, heads, _, head_dim = side.buffer.shape
            for packed in (
                packed for pieces in (other if side.coder is None else side).rows for packed in pieces
            ):
                count = heads * head_dim * packed.tokens
                if side.coder is None:
                    values, size = values + count, size + count * side.buffer.itemsize
                elif id(packed) not in seen:
                    values += count
                    seen.add(id(packed))
        return 8 * size / values

    def _arm(self) -> None:
        if self.plan.ranking.spans_layers and self.plan.rule.codes_prompt:
            self._refeed = feed_last_again(self, _awaits_code, SemKVCache._code_due)

    def _disarm(self) -> None:
        if self._refeed is not None:
            stop(self, self._refeed)
            self._refeed = None

    def _code_due(self) -> None:
        """Code what waited for the end of a forward call: a prompt ranked over all layers, complete blocks."""
        if self.plan.layers[0].due:
            with torch.no_grad(), finite_together():
                for layer in self.plan.layers:
                    layer.code_prompt()
        self._code()

    def _code(self, turn_over: bool = False) -> None:
        """Code, stretch by stretch, what must be coded before another token comes."""
        if not (self.plan.rule.codes_tail and self.plan.layers[0].is_initialized):
            return
        due = [layer.pieces(turn_over) for layer in self.plan.layers]
        # A shared ranking reads the open tokens of all layers, so it is made before the first one is coded.
        with torch.no_grad(), finite_together():
            for stretch in zip_longest(*(side for pieces in due for side in pieces)):
                for number, layer in enumerate(self.plan.layers):
                    if any(pieces := stretch[2 * number : 2 * number + 2]):
                        layer.code(pieces)

    def _settle_loan(self) -> None:
        if self.plan.loan is not None:
            loan, self.plan.loan = self.plan.loan, None
            loan.check()

    def _pieces(self) -> Iterable[Packed]:
        for layer in self.plan.layers:
            for side in layer.sides:
                for pieces in side.rows:
                    yield from pieces


def _awaits_code(cache: SemKVCache) -> bool:
    return cache.plan.padding is None and all(layer.due for layer in cache.plan.layers)


def _tensors(layer: Any) -> Iterable[Tensor]:
    """What a layer of transformers' own holds."""
    for name in ("keys", "values", "conv_states", "recurrent_states"):
        held = getattr(layer, name, None)
        yield from (
            each for each in (held.values() if isinstance(held, dict) else [held]) if each is not None
        )


def _pairs(sides):
    return [(sides[0], sides[1]), (sides[1], sides[0])] if sides else []


def _distinct(pieces: Iterable[Packed]) -> tuple[list[Packed], list[PackedLayout]]:
    vectors = list({id(packed): packed for packed in pieces}.values())
    layouts = list({id(layout): layout for packed in vectors for layout in packed.layouts}.values())
    return vectors, layouts


def _rows_of(ids: Tensor | Sequence[int] | Sequence[Sequence[int]] | None) -> list[list[int]] | None:
    """Token ids by row; UsageError if they are not whole numbers [tokens] or [rows, tokens]."""
    if ids is None:
        return None
    try:
        rows = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        rows = None
    whole = rows is not None and not (
        rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool
    )
    if not whole or rows.dim() not in (1, 2) or not rows.numel():
        raise UsageError(
            "prompt_ids must be the prompt's token ids, [tokens] or [rows, tokens] of equal length"
        )
    return (rows[None] if rows.dim() == 1 else rows).tolist()


def _check_use_cache(config: Any, name: str) -> None:
    """Raise UsageError where ``generate`` would hand a cache all tokens of the text again at every step."""
    if getattr(config, "use_cache", None) is False:
        raise UsageError(
            f"{name}.use_cache is False, so generate() would add the whole text to the cache again at every step; "
            "set model.config.use_cache = model.generation_config.use_cache = True"
        )


def _check(setting: Setting, config: PreTrainedConfig, attention: str, prompt_tokens: int | None) -> None:
    if attention not in _ATTENTION:
        raise UsageError(f"attention={attention!r} is not known; use {' or '.join(_ATTENTION)}")
    if prompt_tokens is not None and prompt_tokens < 1:
        raise UsageError(f"prompt_tokens={prompt_tokens} must be at least 1")
    if setting.prune is not None:
        raise UsageError(f"SemKVCache stores every token; {setting.name} deletes some")
    sides = [side for side in (setting.keys, setting.values) if side is not None]
    if not sides:
        raise UsageError(f"setting {setting.name} codes nothing; use transformers' DynamicCache")
    for side in sides:
        check_packable(side.quantizer, max(count for count, _ in side.allocation.parts(2)))
    setting.check_in(ModelShape.of(config).cache)
