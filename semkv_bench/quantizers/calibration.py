"""Files of what methods are fitted to a model by: tensors of every layer and side, and where they are from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from semkv_bench.errors import MissingError
from semkv_bench.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["CALIBRATIONS", "Calibration", "headers", "read", "write"]

CALIBRATIONS = Path("results/calibrations")
_ABOUT = "semkv_bench"


@dataclass(frozen=True, eq=False)
class Calibration:
    """A calibration that was read.

    about: what it is of: ``method``; ``model`` (its name and what its weights are known by); ``fits``, a hash of the
    method's options by side; ``text`` (source and SHA-256), ``sequences`` and ``length`` of what was read.
    """

    path: Path
    about: Mapping[str, Any]
    sha256: str
    tensors: Mapping[str, Tensor]

    def state(self, layer: int, side: str) -> dict[str, Tensor]:
        """What was fitted for one side of one layer. Raises MissingError where there is nothing."""
        start = f"{layer}/{side}/"
        found = {name[len(start) :]: t for name, t in self.tensors.items() if name.startswith(start)}
        if not found:
            raise MissingError(f"the calibration {self.path} has nothing of the {side} of layer {layer}")
        return found


def write(path: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a calibration, all or nothing; tensors by ``LAYER/SIDE/PART:NAME``."""
    from safetensors.torch import save  # needs torch

    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(plain, {_ABOUT: json.dumps(about, sort_keys=True)}))


def read(path: str | Path) -> Calibration:
    """The calibration ``path``. Raises MissingError for a file that is not there or is none."""
    path = Path(path).expanduser()
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise MissingError(f"the calibration {path} cannot be read: {error.strerror}") from error


@lru_cache(maxsize=32)
def _read(path: Path, changed: int) -> Calibration:
    about = _about(path)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Calibration(path, about, digest, tensors)


def headers(folder: Path = CALIBRATIONS) -> dict[Path, Mapping[str, Any]]:
    """What every calibration in ``folder`` is of; files that are none are passed over."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found[path] = _about(path)
        except MissingError:
            continue
    return found


def _about(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, "pt") as file:
            return json.loads((file.metadata() or {})[_ABOUT])
    except (KeyError, ValueError, SafetensorError) as error:
        raise MissingError(
            f"{path} is no calibration; semkv-bench calibrate model=... quantizer=... writes one"
        ) from error
