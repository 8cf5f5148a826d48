"""Exact paired tests on counts: runaway generations, and examples that got worse or better."""

from __future__ import annotations

import numpy as np
from scipy.stats import binomtest

__all__ = ["exact_mcnemar", "paired_counts"]

_TIE = 1e-12


def exact_mcnemar(worse: int, better: int) -> float:
    """Two-sided exact McNemar p-value of ``worse`` against ``better`` discordant pairs (1.0 for none).

    200 items of which 8 got worse and 1 better give 0.0390625.
    """
    return 1.0 if worse + better == 0 else float(binomtest(worse, worse + better, 0.5).pvalue)


def paired_counts(setting: np.ndarray, reference: np.ndarray) -> tuple[int, int]:
    """Clusters [N] in which the setting's value is below, and above, the reference's; NaN pairs are left out.

    A cluster with several seeds or turns counts once, by its mean, so that seeds make no evidence.
    """
    difference = setting - reference
    return int((difference < -_TIE).sum()), int((difference > _TIE).sum())
