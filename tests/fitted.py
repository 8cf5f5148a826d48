"""Methods that are fitted to a model, fitted to random values for tests of what they do with others."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from semkv_bench.models.rotary import Rotary
from semkv_bench.quantizers import Quantizer
from semkv_bench.quantizers.calibration import write
from semkv_bench.quantizers.parts import Place


def rotary(head_dim: int) -> Rotary:
    """Llama's rotary embedding."""
    frequencies = 1e4 ** (-torch.arange(0, head_dim, 2).double() / head_dim)

    def tables(positions):
        angles = (positions[:, None] * frequencies).float()
        return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

    return Rotary(tables)


def fitted(
    quantizer: Quantizer, head_dim: int, heads: int = 2, seed: int = 1, spread: float = 1.0
) -> Quantizer:
    """The quantizer as it is, or of a method with parts that know the model, these fitted to normal values."""
    if not (quantizer.calibrated or quantizer.positional):
        return quantizer
    x = torch.randn(heads, 600, head_dim, generator=torch.Generator().manual_seed(seed)) * spread
    return quantizer.bound(Place(0, quantizer.side, rotary(head_dim)), quantizer.fit(x, torch.rand_like(x)))


@cache
def with_file(quantizer: Quantizer, head_dim: int, heads: int) -> Quantizer:
    """The same with a calibration of the only layer of a model; as it is, where it needs none."""
    if not quantizer.calibrated:
        return quantizer
    x = torch.randn(heads, 600, head_dim, generator=torch.Generator().manual_seed(1))
    state = quantizer.fit(x, torch.rand_like(x))
    path = Path(mkdtemp()) / f"{quantizer.name}.safetensors"
    write(path, {}, {f"0/{quantizer.side}/{name}": tensor for name, tensor in state.items()})
    return replace(quantizer, calibration=str(path))
