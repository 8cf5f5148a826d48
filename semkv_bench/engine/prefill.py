"""The prompt's one pass through the model, in the model's own precision."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from semkv_bench.engine.rows import RowCache
from semkv_bench.importance import observe
from semkv_bench.models.load import LoadedModel
from semkv_bench.protocols.rule import Ranks

__all__ = ["Prefilled", "prefill"]


@dataclass(frozen=True)
class Prefilled:
    """A prompt that the model has seen.

    cache: of one row; ids: the prompt's tokens; scores: of the tokens by a metric's label; unseen: of the tokens before
    the question, which the metric did not see; hidden: final hidden state [hidden] of the last token.
    """

    cache: RowCache
    ids: tuple[int, ...]
    hidden: Tensor
    scores: dict[str, Tensor] = field(default_factory=dict)
    unseen: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> Ranks:
        """The tokens' importance, ranked once for all settings, layers and batches."""
        return Ranks(self.scores.__getitem__)


@torch.inference_mode()
def prefill(
    loaded: LoadedModel,
    ids: Sequence[int],
    metrics: Sequence[str] = (),
    seed: int = 0,
    chunk: int | None = None,
    cache: RowCache | None = None,
    unseen: Sequence[str] = (),
    context: int | None = None,
) -> Prefilled:
    """Fill a cache with the keys and values of ``ids``.

    metrics: labels of the importance metrics that are taken on the way; seed: of the random one; chunk: tokens per
    forward call, None for all at once; cache: whose buffers are used again, None for a new one; unseen: metrics that
    are taken of the first ``context`` tokens alone.
    """
    cache = RowCache(loaded.model.config) if cache is None else cache
    cache.reserve(1, len(ids))
    batch = torch.tensor([list(ids)], device=loaded.device)
    with ExitStack() as stack:
        observers = []
        for labels, tokens in ((metrics, len(ids)), (unseen, min(context or len(ids), len(ids)))):
            observer = observe(loaded, labels, tokens=tokens, seed=seed) if labels else None
            observers.append(observer and stack.enter_context(observer))
        for begin in range(0, len(ids), chunk or len(ids)):
            part = batch[:, begin : begin + (chunk or len(ids))]
            given = {"input_ids": part, "use_cache": True, loaded.cache_keyword: cache}
            if begin and loaded.later_calls.positions:
                given["position_ids"] = torch.arange(begin, begin + part.shape[1], device=part.device)[None]
            output = loaded.decoder(**given)
    scores = ({} if observer is None else observer.scores() for observer in observers)
    return Prefilled(cache, tuple(ids), output.last_hidden_state[0, -1], *scores)
