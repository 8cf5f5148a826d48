"""Seeded random orthogonal matrices."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from semkv_bench.checks import choice
from semkv_bench.errors import UsageError
from semkv_bench.lazy import scipy, torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["check_rotation", "gaussian_matrix", "random_rotation"]

_KINDS = ("qr", "hadamard", "auto")


def check_rotation(kind: str, head_dim: int) -> None:
    """Raise UsageError if there is no rotation of this kind for ``head_dim`` values."""
    choice("rotation", kind, _KINDS)
    if kind == "hadamard" and not _is_power_of_two(head_dim):
        raise UsageError(
            f"rotation=hadamard needs a head_dim that is a power of two (32, 64, 128, 256), not {head_dim}; "
            "use rotation=qr"
        )


@lru_cache(maxsize=256)
def random_rotation(kind: str, head_dim: int, seed: int) -> Tensor:
    """Orthogonal float64 [head_dim, head_dim]; a row vector x is rotated by ``x @ rotation.T``.

    ``qr`` is uniform over all rotations; ``hadamard`` is the Hadamard matrix with random column signs;
    ``auto`` is ``hadamard`` where head_dim is a power of two and ``qr`` elsewhere.
    """
    check_rotation(kind, head_dim)
    generator = np.random.default_rng([seed, head_dim])
    if kind == "hadamard" or (kind == "auto" and _is_power_of_two(head_dim)):
        signs = generator.choice([-1.0, 1.0], size=head_dim)
        return torch.from_numpy(scipy.linalg.hadamard(head_dim) * signs / np.sqrt(head_dim))
    orthogonal, triangular = np.linalg.qr(generator.standard_normal((head_dim, head_dim)))
    # Without the sign correction QR depends on the factorisation's convention and is not uniform.
    return torch.from_numpy(orthogonal * np.sign(np.diag(triangular)))


@lru_cache(maxsize=256)
def gaussian_matrix(head_dim: int, seed: int) -> Tensor:
    """Standard normal float64 [head_dim, head_dim], independent of the rotation of the same seed."""
    return torch.from_numpy(np.random.default_rng([seed, head_dim, 1]).standard_normal((head_dim, head_dim)))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
