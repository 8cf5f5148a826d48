"""KV-cache quantizers, one a file: encode, decode, storage arithmetic."""

from semkv_bench.quantizers.affine import Affine
from semkv_bench.quantizers.base import Coder, Encoded, NonFiniteError, Quantizer
from semkv_bench.quantizers.turboquant import TurboQuant
from semkv_bench.quantizers.turboquant_prod import TurboQuantProd
from semkv_bench.quantizers.turboquant_split import TurboQuantSplit

__all__ = [
    "Affine",
    "Coder",
    "Encoded",
    "NonFiniteError",
    "Quantizer",
    "TurboQuant",
    "TurboQuantProd",
    "TurboQuantSplit",
]
