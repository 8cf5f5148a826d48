"""Checkpoints whose weights are quantized already, and the packages that transformers reads each kind with."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from semkv_bench.errors import MissingError

__all__ = ["WEIGHT_FORMATS", "check_weight_format", "missing_packages"]

WEIGHT_FORMATS: Mapping[str, tuple[str, ...]] = {
    "aqlm": ("aqlm",),
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "hqq": ("hqq",),
    "quanto": ("optimum.quanto",),
    "quark": ("quark",),
    "torchao": ("torchao",),
    "vptq": ("vptq",),
}
"""Modules by the ``quant_method`` of a configuration; methods that are not here need nothing but transformers."""

_DISTRIBUTIONS = {"optimum.quanto": "optimum-quanto", "quark": "amd-quark"}


def missing_packages(method: str) -> list[str]:
    """Distributions to install before weights quantized by ``method`` can be read; empty where all is there."""
    missing = [name for name in WEIGHT_FORMATS.get(method, ()) if not _present(name)]
    return [_DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in missing]


def check_weight_format(name: str, *described: Any) -> None:
    """Raise MissingError, with the command that mends it, where a package to read weights with is not here.

    described: a checkpoint's ``quantization_config``, or one given for loading; None, a mapping or an object.
    """
    for each in described:
        method = (
            each.get("quant_method") if isinstance(each, Mapping) else getattr(each, "quant_method", None)
        )
        if isinstance(each, Mapping) and method is None and any(key.startswith("load_in_") for key in each):
            method = "bitsandbytes"
        method = getattr(method, "value", method)
        if method is not None and (missing := missing_packages(str(method))):
            raise MissingError(
                f"{name} has weights quantized by {method}, which {' and '.join(missing)} would read: "
                f"pip install {' '.join(missing)}"
            )


def _present(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
