"""Feeding the rows of a batch: tokens in, logits out, by as few forward calls as give what single steps would."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from semkv_bench.engine.coding import RowCoder
from semkv_bench.engine.row_layer import Row
from semkv_bench.engine.rows import RowCache, row_mask
from semkv_bench.models.load import LoadedModel

__all__ = ["feed", "feed_singly"]


def feed(
    loaded: LoadedModel, coding: RowCoder, tokens: Sequence[Sequence[int]], keep: int | None
) -> Tensor | None:
    """Feed every row its tokens, which may differ in number.

    Returns logits [rows, keep, vocabulary] of the last ``keep`` places of the longest; None for None.
    """
    rows = coding.rows
    longest, starts = max(map(len, tokens)), rows.lengths
    if rows.recurrent and longest > 1:
        return _feed_states(loaded, coding, tokens, keep)
    # Shorter ones are filled up behind; what is fed there is forgotten before anything sees it.
    ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in tokens], device=loaded.device)
    where = _places(loaded, rows, longest)
    coding.announce(tokens)
    given = {"input_ids": ids, "use_cache": True, loaded.cache_keyword: rows, **where}
    if keep is None:
        loaded.decoder(**given)
        logits = None
    else:
        # Some models take the number in silence and give them all.
        logits = loaded.model(logits_to_keep=keep, **given).logits[:, -keep:]
    if any(len(ids) < longest for ids in tokens):
        rows.rewind([start + len(ids) for start, ids in zip(starts, tokens, strict=True)])
    return logits


def _feed_states(
    loaded: LoadedModel, coding: RowCoder, tokens: Sequence[Sequence[int]], keep: int | None
) -> Tensor | None:
    """As ``feed``, a call a token: several models begin with an empty state in a call of more than one token."""
    steps = [[[token] for token in step] for step in zip(*tokens, strict=True)]
    first = len(steps) if keep is None else len(steps) - keep
    logits = [feed(loaded, coding, step, None if place < first else 1) for place, step in enumerate(steps)]
    return None if keep is None else torch.cat(logits[first:], dim=1)


def feed_singly(
    loaded: LoadedModel,
    coding: RowCoder,
    ids: Sequence[int],
    hear: Callable[[Tensor, Sequence[Row]], None] | None = None,
) -> None:
    """Feed all rows the same tokens, in as few calls as give what one token at a time would give.

    hear: gets the logits [rows, tokens, vocabulary] of every call, and the rows.
    """
    left = list(ids)
    while left:
        coding.close()
        limits = [coding.fits(row) for row in range(len(coding.rows.rows))]
        count = min([len(left), *(limit for limit in limits if limit is not None)])
        logits = feed(
            loaded, coding, [left[:count]] * len(coding.rows.rows), keep=None if hear is None else count
        )
        if hear is not None:
            hear(logits, coding.rows.rows)
        left = left[count:]


def _places(loaded: LoadedModel, rows: RowCache, new: int) -> dict[str, Any]:
    """Positions and mask of ``new`` tokens a row, where they are not what transformers would think."""
    starts = rows.lengths
    even = min(starts) == max(starts)
    shifts = [row.shift for row in rows.rows]
    if even and not loaded.later_calls.positions and not any(shifts):
        return {}
    places = torch.tensor(starts, device=loaded.device)[:, None] + torch.arange(new, device=loaded.device)
    positions = places - torch.tensor(shifts, device=loaded.device)[:, None]
    if even:
        return {"position_ids": positions}
    mask = row_mask(loaded.model.config, places, max(starts) + new)
    return {"position_ids": positions, "attention_mask": mask}
