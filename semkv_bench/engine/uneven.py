"""Can rows of different lengths be fed to a model together? Tried out once, since no configuration tells it."""

from inspect import signature

import torch

from semkv_bench.engine.attention import hides_places, row_attention
from semkv_bench.engine.rows import RowCache, row_mask
from semkv_bench.models.load import LoadedModel

__all__ = ["takes_uneven_rows"]

_TOLERANCE = 0.05  # of the largest hidden value: well above rounding in bfloat16
_IDS = (3, 7, 5, 4)


@torch.inference_mode()
def takes_uneven_rows(loaded: LoadedModel) -> bool:
    """Does the model see in a batch of rows of two lengths, by mask and positions, what it sees in each alone?

    False for recurrent states, for positions that are added as biases to attention or cannot be given, and for kinds of
    attention that take no mask.
    """
    if not hides_places(loaded) or "position_ids" not in signature(loaded.decoder.forward).parameters:
        return False
    cache = RowCache(loaded.model.config)
    if cache.recurrent:
        return False
    first, second, third, last = _IDS
    alone = [_hidden(loaded, [[first, second, third, last]]), _hidden(loaded, [[first, second, last]])]
    cache.reserve(2, len(_IDS))
    places = torch.tensor([[3], [2]], device=loaded.device)
    try:
        with row_attention(loaded, cache):
            _hidden(loaded, [[first, second, third]] * 2, cache)
            cache.rewind([3, 2])
            mask = row_mask(loaded.model.config, places, len(_IDS))
            together = _hidden(loaded, [[last]] * 2, cache, position_ids=places, attention_mask=mask)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return False
    pairs = zip(together, alone, strict=True)
    return all(
        bool((row[-1] - one[0, -1]).abs().max() <= _TOLERANCE * one[0, -1].abs().max()) for row, one in pairs
    )


def _hidden(
    loaded: LoadedModel, ids: list[list[int]], cache: RowCache | None = None, **where: object
) -> torch.Tensor:
    given = {} if cache is None else {loaded.cache_keyword: cache}
    ids = torch.tensor(ids, device=loaded.device)
    return loaded.decoder(input_ids=ids, use_cache=cache is not None, **given, **where).last_hidden_state
