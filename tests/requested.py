"""Requests and settings that the tests of the protocols share."""

import torch

from semkv_bench.engine.engine import Request, Turn
from semkv_bench.quantizers import Affine, TurboQuant
from semkv_bench.settings.sets import TwoLevelMixes, uniform_settings

GRID = uniform_settings(Affine(), Affine(), [16, 5, 3, 2])
MIXED = TwoLevelMixes(6, 2, 0.25, ["key_norm", "value_norm", "recency"], ["shared", "layer"]).settings(
    TurboQuant(), TurboQuant()
)


def some_ids(length, seed=0):
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def some_request(length=40, new=12, seed=0, stop=(), turns=1, **changes) -> Request:
    later = tuple(
        Turn(some_ids(9 + 4 * turn, 100 + turn), [5 + turn, 6, 7], new, frozenset(stop))
        for turn in range(1, turns)
    )
    values = {"reference_ids": [5, 6, 7], "max_new_tokens": new, "stop_ids": frozenset(stop), **changes}
    return Request(input_ids=some_ids(length, seed), follow_ups=later, **values)


def greedy(loaded, cache, ids, new):
    out = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        max_new_tokens=new,
        **{loaded.cache_keyword: cache},
    )
    return out[0, ids.shape[1] :].tolist()
