"""Can rows of different lengths be fed to a model together? Tried out once, since no configuration tells it all."""

from inspect import signature

import torch

from semkv_bench.engine.attention import hides_places, row_attention
from semkv_bench.engine.rows import RowCache, row_mask
from semkv_bench.models.load import LoadedModel
from semkv_bench.models.rotary import length_dependent

__all__ = ["takes_padded_prompts", "takes_uneven_rows"]

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
    return all(_alike(row[-1], one[0, -1]) for row, one in zip(together, alone, strict=True))


@torch.inference_mode()
def takes_padded_prompts(loaded: LoadedModel) -> bool:
    """Does a prompt that is filled up behind its end, beside a longer one, come out as it does by itself?

    False for recurrent states, which take in whatever is fed, for positions that hang on the longest prompt, and where
    tokens look ahead.
    """
    cache = RowCache(loaded.model.config)
    if cache.recurrent or length_dependent(loaded.model.config):
        return False
    first, second, third, last = _IDS
    cache.reserve(2, len(_IDS))
    try:
        together = _hidden(loaded, [[first, second, third, last], [first, second, last, 0]], cache)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return False
    longer, shorter = (
        _hidden(loaded, [ids])[0, -1] for ids in ([first, second, third, last], [first, second, last])
    )
    return _alike(together[0, 3], longer) and _alike(together[1, 2], shorter)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())


def _hidden(
    loaded: LoadedModel, ids: list[list[int]], cache: RowCache | None = None, **where: object
) -> torch.Tensor:
    given = {} if cache is None else {loaded.cache_keyword: cache}
    ids = torch.tensor(ids, device=loaded.device)
    return loaded.decoder(input_ids=ids, use_cache=cache is not None, **given, **where).last_hidden_state
