"""Keys that others do not span first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.checks import whole
from semkv_bench.errors import UsageError
from semkv_bench.importance.heads import HeadCacheMetric, HeadCacheRecorder
from semkv_bench.lazy import torch
from semkv_bench.models.rotary import rotary_of

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Leverage"]

_SKETCH = 48
_RIDGE = 1e-2


class PlainKeyRecorder(HeadCacheRecorder):
    """Hands on keys as they are before the rotary embedding."""

    def __init__(self, prompt, metrics):
        super().__init__(prompt, metrics)
        self._rotary = rotary_of(prompt.loaded, metrics[0].label, "choose another score")

    def scored(self, metric: Leverage, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """See ``HeadCacheRecorder``."""
        plain = self._rotary[layer].undo(keys, torch.arange(keys.shape[1]))
        return super().scored(metric, layer, plain, values)


@dataclass(frozen=True)
class Leverage(HeadCacheMetric):
    """Leverage of a token's key among its head's keys before the rotary embedding (arXiv 2507.08143).

    ``x G^-1 x`` of keys less their mean, with ``G = X^T X + 0.01``, of a random sketch of ``sketch`` channels as in
    Compactor; standardized over the layer. ``leverage-0`` takes the keys themselves and no chance.
    """

    name = "leverage"
    recorder = PlainKeyRecorder
    seeded = True
    unturned = True
    sketch: int = _SKETCH

    def __post_init__(self) -> None:
        whole(f"{self.name}'s sketch", self.sketch, 0)

    @property
    def label(self) -> str:
        """See ``Metric``."""
        return self.name if self.sketch == _SKETCH else f"{self.name}-{self.sketch}"

    @classmethod
    def with_option(cls, option: str) -> Leverage:
        """See ``Metric``; the option is the number of channels of the sketch."""
        if not option.isdecimal():
            raise UsageError(f"importance metric {cls.name}-{option}: write the sketch as in {cls.name}-48")
        return cls(int(option))

    @property
    def least_tokens(self) -> int:
        """See ``Metric``."""
        return 2

    def score(self, keys: Tensor, values: Tensor, seed: int) -> Tensor:
        """See ``HeadCacheMetric``; keys before the rotary embedding."""
        x = keys - keys.mean(1, keepdim=True)
        if self.sketch:
            chance = torch.Generator().manual_seed(seed)
            size = (len(keys), keys.shape[-1], self.sketch)
            x = x @ (torch.randn(size, generator=chance) * self.sketch**-0.5).to(x)
        # Keys that lie almost in a plane leave the product close to singular.
        x = x.double()
        gram = x.transpose(1, 2) @ x + _RIDGE * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        scores = (x * torch.linalg.solve(gram, x.transpose(1, 2)).transpose(1, 2)).sum(-1).clamp_min(0)
        return ((scores - scores.mean()) / scores.std().clamp_min(1e-6)).float()
