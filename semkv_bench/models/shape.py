"""What the cache of a model looks like, from its configuration alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semkv_bench.grid.cost import LayerShape, SideShape

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

__all__ = ["ModelShape", "full_attention_layers"]


def full_attention_layers(config: "PreTrainedConfig") -> tuple[int, ...]:
    """Indices of the layers whose cache grows with the prompt and is quantized."""
    from semkv_bench.models.layers import cache_layers

    return tuple(i for i, layer in enumerate(cache_layers(config)) if layer.stores_all)


@dataclass(frozen=True)
class ModelShape:
    """What the cache of a model looks like, read from its configuration without its weights."""

    layers: int
    quantized_layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    max_positions: int | None

    @property
    def cache(self) -> tuple[LayerShape | None, ...]:
        """The cache of every layer; None for one that has none of its own."""
        side = SideShape(self.kv_heads, self.head_dim)
        return tuple(LayerShape(side, side, coded=i in self.quantized_layers) for i in range(self.layers))

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Shape of a transformers configuration (text part)."""
        # The cache of transformers tells; nobody waits for it who has a shape already.
        from semkv_bench.models.layers import cache_layers, max_positions

        text = config.get_text_config(decoder=True)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            layers=len(cache_layers(config)),
            quantized_layers=full_attention_layers(config),
            kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=head_dim,
            max_positions=max_positions(config),
        )
