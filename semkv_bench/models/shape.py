"""What the cache of a model looks like, without its weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import SIDES, LayerShape, SideShape

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

__all__ = ["ModelShape", "full_attention_layers"]

LATENT = ("latent", "rotary key")


def full_attention_layers(config: "PreTrainedConfig") -> tuple[int, ...]:
    """Indices of the layers that store every token, by their kind alone."""
    from semkv_bench.models.layers import cache_layers

    return tuple(i for i, layer in enumerate(cache_layers(config)) if layer.stores_all)


@dataclass(frozen=True)
class ModelShape:
    """What the cache of a model looks like.

    cache: layer by layer, None where a layer has no keys and values of its own; sides: what transformers keeps as
    keys and as values, which latent attention uses for other things; state_values: of recurrent and convolution
    layers, of one size whatever the number of tokens, and never coded.
    """

    cache: tuple[LayerShape | None, ...]
    max_positions: int | None
    sides: tuple[str, str] = SIDES
    state_values: int = 0

    @classmethod
    def of(cls, config: "PreTrainedConfig") -> "ModelShape":
        """Shape for a transformers configuration, seen by one forward call without weights.

        Raises UsageError where the model cannot be called so, or keeps something else than keys and values.
        """
        return _shape_of(_Keyed(type(config), config.to_json_string(use_diff=False), config))

    @classmethod
    def alike(
        cls, layers: int, kv_heads: int, head_dim: int, max_positions: int | None = None
    ) -> "ModelShape":
        """All layers in full attention, all heads of the same size."""
        side = SideShape(kv_heads, head_dim)
        return cls((LayerShape(side, side),) * layers, max_positions)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ModelShape":
        """From what ``to_json`` gave."""
        layers = [
            None
            if layer is None
            else LayerShape(
                *(SideShape(**layer[side]) for side in SIDES), window=layer["window"], coded=layer["coded"]
            )
            for layer in content["cache"]
        ]
        return cls(tuple(layers), content["max_positions"], tuple(content["sides"]), content["state_values"])

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "cache": [layer and asdict(layer) for layer in self.cache]}

    @property
    def layers(self) -> int:
        """All layers, with and without a cache."""
        return len(self.cache)

    @property
    def quantized_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose cache grows with every token and is quantized."""
        return tuple(i for i, layer in enumerate(self.cache) if layer is not None and layer.coded)

    @property
    def kv_heads(self) -> int:
        """Heads of the keys in the first quantized layer."""
        return self._first.keys.heads

    @property
    def head_dim(self) -> int:
        """Values a head of the keys in the first quantized layer."""
        return self._first.keys.head_dim

    @property
    def _first(self) -> LayerShape:
        held = sorted(filter(None, self.cache), key=lambda layer: not layer.coded)
        return held[0] if held else LayerShape(SideShape(0, 0), SideShape(0, 0))

    def values(self, tokens: int, windows: bool = True) -> int:
        """Keys and values that the layers hold of ``tokens`` tokens; without ``windows``, all tokens in every layer."""
        return sum(
            (layer.keys.values + layer.values.values) * int(layer.held(tokens) if windows else tokens)
            for layer in self.cache
            if layer is not None
        )

    @property
    def described(self) -> str:
        """What is stored and coded where it is not simply keys and values of all layers; else nothing."""
        told = []
        if self.sides != SIDES:
            keys, values = self._first.keys, self._first.values
            told.append(
                f"latent attention: the keys are the {self.sides[0]} ({keys.heads} x {keys.head_dim}), "
                f"the values the {self.sides[1]} ({values.heads} x {values.head_dim})"
            )
        coded, held = len(self.quantized_layers), sum(layer is not None for layer in self.cache)
        if coded < self.layers:
            none = self.layers - held
            others = [f"{held - coded} hold a window in 16 bits"] * (held > coded)
            others += [f"{none} have no keys and values of their own"] * (none > 0)
            told.append(f"{coded} of {self.layers} layers are coded; {', '.join(others)}")
        return "; ".join(told)


@dataclass(frozen=True)
class _Keyed:
    """A configuration that is equal to another one of the same content."""

    kind: type
    content: str
    config: "PreTrainedConfig"

    def __hash__(self) -> int:
        return hash((self.kind, self.content))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and (self.kind, self.content) == (other.kind, other.content)


@cache
def _shape_of(keyed: _Keyed) -> ModelShape:
    # Transformers tells; nobody waits for it who has a shape already.
    from semkv_bench.models.layers import cache_layers, max_positions
    from semkv_bench.models.probe import first_position, probe_layers

    config = keyed.config
    layers: list[LayerShape | None] = []
    states = 0
    kinds = cache_layers(config)
    if not any(stored.attends for stored in kinds):
        return ModelShape((None,) * len(kinds), max_positions(config))
    for stored, probed in zip(kinds, probe_layers(config), strict=True):
        states += probed.state_values
        if stored.attends and probed.keys is None:
            raise UsageError(
                f"{config.model_type}: a layer of kind {stored.kind} keeps no keys and values of a text alone "
                "(attention to an image, say); such a cache cannot be swept"
            )
        sized = probed.keys is not None and stored.attends
        # The token that attends is part of its window, and none of the past.
        held = None if stored.window is None else stored.window - 1
        layers.append(LayerShape(probed.keys, probed.values, held, stored.stores_all) if sized else None)
    rank = getattr(config.get_text_config(decoder=True), "kv_lora_rank", None)
    latent = any(layer is not None and layer.keys == SideShape(1, rank) for layer in layers if rank)
    positions = max_positions(config)
    if positions is not None:
        positions -= first_position(config)
    return ModelShape(tuple(layers), positions, LATENT if latent else SIDES, states)
