"""The prompt's one pass through the model, in the model's own precision."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from semkv_bench.engine.rows import RowCache
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.importance import Observer, metric, observe
from semkv_bench.models.load import LoadedModel
from semkv_bench.protocols.rule import Ranks

__all__ = ["Prefilled", "prefill", "prefill_together"]


@dataclass(frozen=True)
class Prefilled:
    """A prompt that the model has seen.

    cache: of one row; ids: the prompt's tokens; scores: of the tokens by a metric's label; unseen: of the tokens before
    the question, which the metric did not see; hidden: final hidden state [hidden] of the last token; together: prompts
    that were read in one batch.
    """

    cache: RowCache
    ids: tuple[int, ...]
    hidden: Tensor
    scores: dict[str, Tensor] = field(default_factory=dict)
    unseen: dict[str, Tensor] = field(default_factory=dict)
    together: int = 1

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
    kept: int = 0,
) -> Prefilled:
    """Fill a cache with the keys and values of ``ids``.

    metrics: labels of the importance metrics that are taken on the way; seed: of the random one; chunk: tokens per
    forward call, None for all at once; cache: whose buffers are used again, None for a new one; unseen: metrics that
    are taken of the first ``context`` tokens alone; kept: so many of the first tokens are in ``cache`` already and are
    not fed again, fewer than all, and none where a metric follows the prefill.
    """
    cache = RowCache(loaded.model.config) if cache is None else cache
    cache.resume(kept, len(ids))
    batch = torch.tensor([list(ids)], device=loaded.device)
    parts = ((metrics, len(ids)), (unseen, min(context or len(ids), len(ids))))
    observers = [_observer(loaded, labels, tokens, seed) for labels, tokens in parts]
    with ExitStack() as stack:
        for observer in filter(None, observers):
            stack.enter_context(observer)
        for begin in range(kept, len(ids), chunk or len(ids)):
            part = batch[:, begin : begin + (chunk or len(ids))]
            given = {"input_ids": part, "use_cache": True, loaded.cache_keyword: cache}
            if begin and loaded.later_calls.positions:
                given["position_ids"] = torch.arange(begin, begin + part.shape[1], device=part.device)[None]
            output = loaded.decoder(**given)
    scores = (
        ({} if observer is None else observer.scores()) | _replayed(loaded, cache, labels, ids[:tokens])
        for observer, (labels, tokens) in zip(observers, parts, strict=True)
    )
    return Prefilled(cache, tuple(ids), output.last_hidden_state[0, -1], *scores)


@torch.inference_mode()
def prefill_together(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], chunk: int | None = None
) -> list[Prefilled]:
    """Read several prompts in one batch, filled up to the longest behind their last tokens.

    No token looks ahead, so what is fed behind a prompt changes nothing of it, and positions are what they are. The
    prompts share one buffer. chunk: tokens of each per forward call, None for all at once.
    """
    longest, cache = max(map(len, prompts)), RowCache(loaded.model.config)
    cache.reserve(len(prompts), longest)
    filled = [[*ids, *[0] * (longest - len(ids))] for ids in prompts]
    batch, step = torch.tensor(filled, device=loaded.device), chunk or longest
    hidden: dict[int, Tensor] = {}
    for begin in range(0, longest, step):
        part = batch[:, begin : begin + step]
        given = {"input_ids": part, "use_cache": True, loaded.cache_keyword: cache}
        if begin and loaded.later_calls.positions:
            places = torch.arange(begin, begin + part.shape[1], device=part.device)
            given["position_ids"] = places.expand(len(prompts), -1)
        output = loaded.decoder(**given)
        for row, ids in enumerate(prompts):
            if begin < len(ids) <= begin + step:
                hidden[row] = output.last_hidden_state[row, len(ids) - 1 - begin].clone()
    return [
        Prefilled(cache.alone(row, len(ids)), tuple(ids), hidden[row], together=len(prompts))
        for row, ids in enumerate(prompts)
    ]


def _observer(loaded: LoadedModel, labels: Sequence[str], tokens: int, seed: int) -> Observer | None:
    """Of the metrics that follow the prefill."""
    followed = [label for label in labels if not metric(label).replays]
    return observe(loaded, followed, tokens=tokens, seed=seed) if followed else None


def _replayed(
    loaded: LoadedModel, cache: RowCache, labels: Sequence[str], ids: Sequence[int]
) -> dict[str, Tensor]:
    """Scores of the metrics that feed the tokens ``ids``, the first of ``cache``, once more."""
    found: dict[str, Tensor] = {}
    for label in labels:
        replaying = metric(label)
        if not replaying.replays:
            continue
        if cache.recurrent:
            raise UsageError(
                f"{label} feeds the prompt twice, and {loaded.label} keeps states; use another score"
            )
        orders = replaying.orders(loaded.tokenizer, ids)
        # A copy: what is fed behind a part of the prompt would overwrite the rest of it.
        again = cache.beginning(len(ids), max(len(asked) for _, asked in orders))

        def feed(asked: list[int], again: RowCache = again) -> None:
            batch = torch.tensor([asked], device=loaded.device)
            given = {"input_ids": batch, "use_cache": True, loaded.cache_keyword: again}
            if loaded.later_calls.positions:
                given["position_ids"] = torch.arange(len(ids), len(ids) + len(asked), device=batch.device)[
                    None
                ]
            loaded.decoder(**given)
            again.rewind(len(ids))

        found[label] = replaying.replayed(loaded, len(ids), orders, feed)
        if not found[label].isfinite().all():
            raise SemkvError(f"importance metric {label} is NaN or infinite for some token")
    return found
