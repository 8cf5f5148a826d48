"""What each layer of a model keeps of the tokens it has seen, told by the cache that transformers would make for it."""

from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.configuration_utils import PreTrainedConfig

from semkv_bench.errors import UsageError

__all__ = ["CacheLayer", "cache_layers", "max_positions"]

_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "max_target_positions",
    "seq_length",
)


@dataclass(frozen=True)
class CacheLayer:
    """One decoder layer. ``kind`` is transformers' name of it, by which a model tells masks apart.

    stores_all: keys and values of every token; window: else those of so many tokens, None where it stores none.
    states: convolution or recurrent states of one size, whatever the number of tokens: how many of a kind.
    """

    kind: str
    stores_all: bool = False
    window: int | None = None
    states: int = 0

    @property
    def attends(self) -> bool:
        """Has it keys and values of its own?"""
        return self.stores_all or self.window is not None


def max_positions(config: PreTrainedConfig) -> int | None:
    """Tokens that the model has positions for, under any of the names that configurations give it."""
    text = config.get_text_config(decoder=True)
    found = [getattr(text, name, None) for name in _POSITIONS]
    return next((value for value in found if isinstance(value, int) and 0 < value < 2**31), None)


def cache_layers(config: PreTrainedConfig) -> tuple[CacheLayer, ...]:
    """What every decoder layer keeps. A window that no context of the model outgrows counts as all tokens.

    Raises:
        UsageError: a layer keeps something that is neither keys and values nor a state of fixed size.
    """
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"transformers makes no cache for models of kind {config.model_type} ({reason})"
        ) from error
    kinds, positions = _kinds(config, len(layers)), max_positions(config)
    return tuple(_described(layer, kind, positions) for layer, kind in zip(layers, kinds, strict=True))


def _kinds(config: PreTrainedConfig, count: int) -> list[str]:
    named = getattr(config.get_text_config(decoder=True), "layer_types", None)
    return [""] * count if named is None else list(named)


def _described(layer: Any, kind: str, positions: int | None) -> CacheLayer:
    window = getattr(layer, "sliding_window", None)
    kind = kind or ("full_attention" if window is None else "sliding_attention")
    wide = window is not None and positions is not None and window >= positions
    states = getattr(layer, "number_of_states", 0)
    # Exactly these: a class derived from them may keep more.
    if type(layer) in (DynamicLayer, LinearAttentionAndFullAttentionLayer):
        return CacheLayer(kind, stores_all=True, states=states)
    if type(layer) in (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer):
        return CacheLayer(kind, stores_all=wide, window=None if wide else window, states=states)
    if type(layer) in (LinearAttentionLayer, DummyLayer):
        return CacheLayer(kind, states=states)
    raise UsageError(
        f"layers of kind {kind} ({type(layer).__name__} in transformers) keep more than keys and values of every "
        "token or a state of fixed size; such a cache cannot be swept"
    )
