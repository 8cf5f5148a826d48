"""What the machine offers: memory that a sweep may use, and a description for the record."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from semkv_bench import __version__
from semkv_bench.kernels import KERNELS_VARIABLE, backend

__all__ = ["describe", "effective", "memory_total", "requested"]

_PACKAGES = ("torch", "transformers", "triton", "datasets", "numpy", "scipy", "tokenizers")


def memory_total(device: torch.device) -> int:
    """Bytes of memory of ``device``: the GPU's, or the machine's within the limit of its control group.

    The total and not what is free at the moment, so that a rerun splits the settings in the same way.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return min(psutil.virtual_memory().total, _cgroup_limit())


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, processor and device, for ``environment.json``."""
    return {
        "semkv_bench": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory_total(torch.device("cpu")) / 2**30, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda,
        "kernels": backend(device),
    }


def requested(source: Any) -> dict[str, Any]:
    """How a model was asked to run; ``source`` is the model group's object."""
    device_map = source.device_map
    return {
        "dtype": source.dtype,
        "attention": source.attention,
        "device_map": dict(device_map) if isinstance(device_map, Mapping) else device_map,
        "kernels": os.environ.get(KERNELS_VARIABLE) or "auto",
    }


def effective(model: Any, device: torch.device) -> dict[str, Any]:
    """How a loaded model runs: the same keys; ``device`` takes the token ids, ``device_map`` names modules."""
    placed = getattr(model, "hf_device_map", None) or {"": device}
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "device_map": {module: _device_name(place) for module, place in placed.items()},
        "kernels": backend(device),
    }


def _device_name(place: Any) -> str:
    return f"cuda:{place}" if isinstance(place, int) else str(place)


def _cgroup_limit() -> float:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(name).read_text())
        except (OSError, ValueError):
            continue
    return float("inf")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
