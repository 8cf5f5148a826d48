"""Settings, states and runs that the tests of the packed cache share."""

import torch
from transformers import LlamaConfig

from semkv_bench.config.compose import compose_config
from semkv_bench.engine.engine import Engine, Request
from semkv_bench.plan.settings import planned_settings
from semkv_bench.quantizers import Affine, TurboQuant
from semkv_bench.settings.sets import TwoLevelMixes, uniform_settings
from semkv_bench.settings.setting import FULL

AFFINE, TURBO = Affine(), TurboQuant()


def mixes(metric, scope, high=6, low=2, fraction=0.25, quantizer=TURBO):
    return TwoLevelMixes(high, low, fraction, metric, scope).settings(quantizer, quantizer)


UNIFORM = [
    *uniform_settings(AFFINE, AFFINE, [16, 5, 2]),
    *uniform_settings(TURBO, TURBO, [4, 2]),
    *uniform_settings(AFFINE, TURBO, [3]),
    *uniform_settings(AFFINE, AFFINE, [3], value_levels="full"),
]
MIXED = mixes(["key_norm", "value_norm", "recency"], ["shared", "layer"])
MIXED += mixes("key_norm", "shared", 5, 3, 0.5, AFFINE)
L3 = uniform_settings(AFFINE, AFFINE, [3])[0]
T4 = uniform_settings(TURBO, TURBO, [4])[0]


def of_file(name, levels, *overrides):
    """The uniform setting of a file of ``conf/quantizer``."""
    config = compose_config("sweep", [f"quantizer={name}", f"grid.levels=[{levels}]", *overrides])
    return next(setting for setting in planned_settings(config) if setting.kind != "full")


def some_ids(length, seed=0):
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def greedy(loaded, cache, ids, mask=None, new=8, **options):
    """New tokens of every row; the model's end token is no end, so that all rows are compared in full."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": new, **options}
    out = loaded.model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    return out[:, ids.shape[1] :].tolist()


def swept(loaded, ids, settings, new=8, seed=0):
    request = Request(ids[0].tolist(), [5], new, frozenset(), seed=seed)
    return [outcome.tokens for outcome in Engine(loaded).run(request, [FULL, *settings])[1:]]


def small_config(layers=2, heads=2, head_dim=64):
    return LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        hidden_size=heads * head_dim,
        max_position_embeddings=4096,
    )


def some_states(tokens, rows=1, heads=2, head_dim=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, tokens, head_dim, generator=generator) for _ in "kv"]


def append_to(cache, states):
    return [cache.update(*states, layer) for layer in range(len(cache.layers))][-1]


def open_then_coded(cache, tokens, **shape):
    """A cache of which ``tokens`` tokens are coded and one is open, filled without a model.

    The first call brings the whole prompt, which is one token here, and the rest is generated.
    """
    states = some_states(tokens, **shape)
    for part in (slice(0, 1), slice(1, tokens)):
        append_to(cache, [x[:, :, part] for x in states])
    append_to(cache, [x[:, :, :1] for x in states])
    return states
