"""Does a metric of a user's own keep what the sweep relies on? Asked before the first prefill, on random values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from semkv_bench.config.own import fingerprints
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.importance.base import Metric
from semkv_bench.importance.choice import metric
from semkv_bench.importance.hidden import HiddenMetric
from semkv_bench.importance.key_value import CacheMetric
from semkv_bench.importance.logits import LogitMetric
from semkv_bench.importance.model_free import ControlMetric
from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["probe_own_metrics"]

_TOKENS, _HEADS = 24, 2


def probe_own_metrics(labels: Iterable[str], head_dim: int) -> None:
    """Score a few random tokens by each metric that is not the package's own, where its family tells what it gets.

    Raises UsageError, one line that names what is wrong, if it changes what it is given, does not give one finite
    score a token, scores the same tokens differently when asked again or in parts, or hangs on the seed unsaid.
    """
    for label in sorted(set(labels)):
        found = metric(label)
        own = fingerprints([found]) and not found.per_head
        given = _random_values(found, head_dim) if own else None
        if given is None:
            continue
        try:
            _check(found, given)
        except SemkvError:
            raise
        except Exception as error:
            raise _wrong(found, f"fails on plain random values: {type(error).__name__}: {error}") from error


def _random_values(found: Metric, head_dim: int) -> tuple[Tensor, ...] | None:
    """What the ``score`` of its family gets; None of another family."""
    draw = torch.Generator().manual_seed(5)
    shapes = {
        CacheMetric: (_HEADS, _TOKENS, head_dim),
        HiddenMetric: (_TOKENS, head_dim),
        LogitMetric: (_TOKENS,),
    }
    if isinstance(found, ControlMetric):
        return (torch.randint(0, 50, (_TOKENS,), generator=draw),)
    shape = next((shape for family, shape in shapes.items() if isinstance(found, family)), None)
    return shape and tuple(torch.rand(shape, generator=draw) for _ in range(2))


def _check(found: Metric, given: tuple[Tensor, ...]) -> None:
    seeds = [(0,), (1,)] if isinstance(found, ControlMetric) else [()]
    before = [values.clone() for values in given]
    scores = found.score(*given, *seeds[0])
    if not all(map(torch.equal, given, before)):
        raise _wrong(found, "changes the values that it is given; work on a copy")
    if tuple(scores.shape) != (_TOKENS,):
        raise _wrong(
            found, f"gives scores of shape {list(scores.shape)} for {_TOKENS} tokens, which take one each"
        )
    if not bool(scores.isfinite().all()):
        raise _wrong(found, "gives NaN or infinity for plain random values")
    if not torch.allclose(found.score(*given, *seeds[0]), scores):
        raise _wrong(found, "scores the same tokens differently when asked again; draw from the seed alone")
    if not found.seeded and not torch.allclose(found.score(*given, *seeds[-1]), scores):
        raise _wrong(found, "gives other scores for another seed; say so by `seeded = True`")
    if isinstance(found, CacheMetric):
        parts = [found.score(*(values[:, part] for values in given)) for part in (slice(9), slice(9, None))]
        if not torch.allclose(torch.cat(parts), scores, rtol=1e-4, atol=1e-5):
            raise _wrong(found, "scores a token differently where the prompt is fed in parts")


def _wrong(found: Metric, what: str) -> UsageError:
    return UsageError(f"importance metric {found.name} ({type(found).__name__}) {what}")
