"""A model whose configuration switches caches off: ``generate`` would add the whole text to a cache at every step."""

import pytest
import torch
from architectures import tiny_model
from oracle import converse

from semkv_bench import SemKVCache
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings

LEVELS, NEW = 3, 6
THREE = uniform_settings(Affine(), Affine(), [LEVELS])[-1]
SWITCH = "model.config.use_cache = model.generation_config.use_cache = True"


def test_mpt_is_refused_until_its_switches_are_set_and_then_answers_as_the_oracle():
    model = tiny_model("mpt", use_cache=False)
    ids = torch.randint(3, 250, (1, 44), generator=torch.Generator().manual_seed(1))
    with pytest.raises(UsageError, match=r"model\.config\.use_cache is False") as raised:
        SemKVCache(model.config, THREE)
    assert SWITCH in str(raised.value) and "\n" not in str(raised.value)
    model.config.use_cache = True
    with pytest.raises(UsageError, match=r"model\.generation_config\.use_cache is False"):
        SemKVCache(model.config, THREE).prefill(model, ids)
    model.generation_config.use_cache = True

    def answer(cache):
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, eos_token_id=None, cache=cache
        )
        return out[0, ids.shape[1] :].tolist()

    # Its attention does not use transformers' interface, so the prompt goes in by prefill.
    with pytest.raises(SemkvError, match=r"cache\.prefill"):
        answer(SemKVCache(model.config, THREE))
    cache = SemKVCache(model.config, THREE)
    cache.prefill(model, ids)
    expected, full = (
        converse(model, ids.tolist(), [[5]], NEW, levels, None)[0][0] for levels in (LEVELS, None)
    )
    assert answer(cache) == expected != full
