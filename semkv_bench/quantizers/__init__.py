"""KV-cache quantizers, one a file: encode, decode, storage arithmetic."""

from typing import TYPE_CHECKING

from semkv_bench.lazy import on_demand

if TYPE_CHECKING:
    from semkv_bench.quantizers.affine import Affine
    from semkv_bench.quantizers.base import Coder, Encoded, NonFiniteError, Quantizer
    from semkv_bench.quantizers.calibrated import Centre, Permute, Predict, Thresholds, Unrope
    from semkv_bench.quantizers.clustered import Coupled, NonUniform
    from semkv_bench.quantizers.codes import PolarCode, Uniform, VectorCode
    from semkv_bench.quantizers.exact import Budget, Channels, LowRank, Mix, Outliers, Pivots
    from semkv_bench.quantizers.formats import (
        Absmax,
        Anchored,
        Float,
        GgmlAsymmetric,
        GgmlSymmetric,
        HiddenZero,
        Iq4Nl,
        LloydMax,
    )
    from semkv_bench.quantizers.granularity import PER_TOKEN, TOGETHER, Granularity
    from semkv_bench.quantizers.groups import Group
    from semkv_bench.quantizers.keep import Keep, Layers
    from semkv_bench.quantizers.method import Method
    from semkv_bench.quantizers.pair import Pair, read_quantizer
    from semkv_bench.quantizers.side import Side
    from semkv_bench.quantizers.transforms import Balance, Hadamard, Normalise, Polar, Shift, Smooth, UnitNorm
    from semkv_bench.quantizers.turboquant import TurboQuant
    from semkv_bench.quantizers.turboquant_prod import TurboQuantProd
    from semkv_bench.quantizers.turboquant_split import TurboQuantSplit

__all__ = [
    "PER_TOKEN",
    "TOGETHER",
    "Absmax",
    "Affine",
    "Anchored",
    "Balance",
    "Budget",
    "Centre",
    "Channels",
    "Coder",
    "Coupled",
    "Encoded",
    "Float",
    "GgmlAsymmetric",
    "GgmlSymmetric",
    "Granularity",
    "Group",
    "Hadamard",
    "HiddenZero",
    "Iq4Nl",
    "Keep",
    "Layers",
    "LloydMax",
    "LowRank",
    "Method",
    "Mix",
    "NonFiniteError",
    "NonUniform",
    "Normalise",
    "Outliers",
    "Pair",
    "Permute",
    "Pivots",
    "Polar",
    "PolarCode",
    "Predict",
    "Quantizer",
    "Shift",
    "Side",
    "Smooth",
    "Thresholds",
    "TurboQuant",
    "TurboQuantProd",
    "TurboQuantSplit",
    "Uniform",
    "UnitNorm",
    "Unrope",
    "VectorCode",
    "read_quantizer",
]

__getattr__ = on_demand(__name__)
