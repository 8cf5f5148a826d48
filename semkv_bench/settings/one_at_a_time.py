"""The keys, or the values, of one layer at a time: what each of them costs in quality by itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from semkv_bench.grid.cost import SIDES
from semkv_bench.quantizers.base import Quantizer, pair_label
from semkv_bench.quantizers.keep import Layers
from semkv_bench.settings.allocation import Uniform
from semkv_bench.settings.setting import Coded, Setting

__all__ = ["OneAtATime", "alone"]


def alone(label: str, layer: int, side: str, levels: int) -> str:
    """Name of the setting that codes ``keys`` or ``values`` of one layer by the method ``label``.

    >>> alone("affine", 3, "keys", 5)
    'affine@keys.3-L5'
    """
    return f"{label}@{side}.{layer}-L{levels}"


@dataclass(frozen=True)
class OneAtATime:
    """Beside the grid, one setting for each of ``coded`` (of ``layers`` layers), side and level count.

    That side of that layer is coded, all else of the cache stays in 16 bits.
    """

    layers: int
    coded: Sequence[int]
    levels: Sequence[int]

    def settings(self, keys: Quantizer, values: Quantizer) -> list[Setting]:
        """By layer, then by side, then by levels: rows that are coded alike stand together."""
        label = pair_label(keys, values)
        made = []
        for layer in self.coded:
            only = Layers(skip_first=layer, skip_last=self.layers - layer - 1)
            for side, quantizer in zip(SIDES, (keys, values), strict=True):
                one = replace(quantizer, layers=only)
                for count in self.levels:
                    name = alone(label, layer, side, count)
                    coded = {side: Coded(one, Uniform(count))}
                    made.append(Setting(name, "uniform", name.rpartition("-L")[0], **coded))
        return made
