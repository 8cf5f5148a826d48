"""A setting of an engine that serves: the cache types of keys and values, with their bits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from semkv_bench.errors import UsageError
from semkv_bench.grid.cost import SIDES, LayerShape, Stored, StoredSide, Tokens
from semkv_bench.grid.levels import Storage
from semkv_bench.models.shape import ModelShape
from semkv_bench.settings.setting import Setting

__all__ = ["GGML_BITS", "ServedSetting", "served_setting", "served_shape"]

# Bits a value of ggml's cache types, scales included.
GGML_BITS: Mapping[str, float] = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "iq4_nl": 4.5,
    "nvfp4": 4.5,
    "mxfp4": 4.25,
    "q2_0": 2.25,
}
FULL_TYPES = ("f16", "bf16", "float16", "bfloat16", "half", "fp16")


@dataclass(frozen=True)
class ServedSetting(Setting):
    """One cache type, or one for the keys and one for the values. ``bits`` is what the engine stores a value in,
    but for ``native_layers``, half of them the first and half the last, which stay in 16 bits."""

    key_type: str = ""
    value_type: str = ""
    bits: float = math.nan
    native_layers: int = 0
    url: str | None = None

    def storage(self, head_dim: int) -> Storage:
        """See ``Setting``: an engine's formats have no grid beside their bits."""
        return Storage(self.bits, self.bits, self.bits)

    def holding(self, cache: Sequence[LayerShape | None], sides: Sequence[Tokens], prompt: int) -> Stored:
        """See ``Setting``: all but the native layers hold their tokens coded, a sliding one those of its window."""
        tokens, held = max(side.total for side in sides), []
        for number, layer in enumerate(cache):
            if layer is not None:
                here = int(layer.held(tokens))
                native = min(number, len(cache) - 1 - number) < self.native_layers / 2
                count = Tokens(kept=here) if native else Tokens.of([here])
                held += [StoredSide(name, getattr(layer, name), (number,), count) for name in SIDES]
        return Stored(tuple(held))


def served_shape(shape: ModelShape) -> ModelShape:
    """``shape`` as an engine stores it: layers with a sliding window are coded like the others."""
    return replace(shape, cache=tuple(layer and replace(layer, coded=True) for layer in shape.cache))


def served_setting(
    name: str,
    spelled: str,
    engine: str,
    bits: float | None,
    known: Mapping[str, float],
    *,
    url: str | None = None,
    native_layers: int = 0,
) -> ServedSetting:
    """The setting ``name`` for a type, or ``KEYS/VALUES``; its bits from ``known`` unless given.

    Raises UsageError where its bits are neither known nor given.
    """
    keys, slash, values = spelled.partition("/")
    values = values if slash else keys
    if bits is None:
        unknown = [kind for kind in (keys, values) if kind not in known]
        if name == "full":
            # What the server really stores under this name is asked when it is up.
            bits = 16.0
        elif unknown:
            raise UsageError(
                f"the bits of cache type {unknown[0]} are not known; give them: engine.bits={{{name}: 8}}"
            )
        else:
            bits = (known[keys] + known[values]) / 2
    kind = "full" if name == "full" else "uniform"
    label = None if kind == "full" else engine
    return ServedSetting(
        name,
        kind,
        label,
        key_type=keys,
        value_type=values,
        bits=float(bits),
        native_layers=native_layers,
        url=url,
    )
