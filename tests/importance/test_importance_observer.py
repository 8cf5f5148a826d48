"""Observation leaves the model and the prefill as they are, whatever happens; names, seeds, chunks, memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from semkv_bench.engine.engine import Engine
from semkv_bench.engine.options import EngineOptions
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.importance import attention, choices, logits, metric, observe
from semkv_bench.models.load import LoadedModel

ALL = [
    "attention_received",
    "attention_window",
    "hidden_drift",
    "hidden_norm",
    "key_norm",
    "logit_entropy",
    "random",
    "recency",
    "surprisal",
    "value_norm",
]
PER_HEAD = {
    "cake",
    "expected_attention",
    "fastgen",
    "h2o",
    "h2o_mean",
    "keydiff",
    "knorm",
    "kvzip",
    "lagkv",
    "leverage",
    "r_kv",
    "random_head",
    "snapkv",
    "streaming",
    "tova",
    "window_entropy",
    "window_variance",
}
PER_LAYER = {"attention_received", "attention_window", "hidden_norm", "key_norm", "value_norm"}


def state(loaded):
    """Everything that observation changes for a while."""
    modules = list(loaded.model.modules())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
    return hooks, loaded.model.config._attn_implementation, [m.forward for m in modules]


def cached(loaded, ids, chunk):
    """Keys and values of a prefill."""
    engine = Engine(loaded, EngineOptions(prefill_chunk=chunk))
    return [side.clone() for layer in engine.prefill(ids).cache.layers for side in layer.stored()]


def test_metrics_of_whole_layers():
    assert [name for name in choices() if not metric(name).per_head] == sorted([*ALL, "hidden_max"])


def test_shapes(tiny, prompt, scored):
    for name, scores in scored(tiny, ALL, prompt).items():
        rows = len(tiny.shape.quantized_layers) if name in PER_LAYER else 1
        assert scores.shape == (rows, 60) and scores.dtype == torch.float32, name


@pytest.mark.parametrize("chunk", [None, 7])
def test_the_cache_is_bit_equal_to_an_unobserved_one(tiny, prompt, chunk):
    before = state(tiny)
    plain = cached(tiny, prompt, chunk)
    with observe(tiny, ALL, tokens=60):
        assert state(tiny) != before
        observed = cached(tiny, prompt, chunk)
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    assert state(tiny) == before


@pytest.mark.parametrize("chunk", [1, 7, 59])
def test_scores_do_not_depend_on_chunks(tiny, prompt, scored, chunk):
    # In bfloat16 a difference in the last bit may become one in the ninth.
    whole, cut = (scored(tiny, ALL, prompt, chunk=c, logits_dtype=torch.float32) for c in (None, chunk))
    for name in ALL:
        torch.testing.assert_close(cut[name], whole[name], rtol=2e-4, atol=2e-4, msg=name)
        # Ranks too, but for tokens that rounding alone tells apart (Gemma 3 makes all keys the same size).
        order = whole[name].argsort(-1)
        steps = cut[name].gather(-1, order).diff(dim=-1)
        assert (steps >= -2e-5 * whole[name].abs().amax(-1, keepdim=True)).all(), name


def test_only_announced_tokens_are_scored(tiny, prompt, scored):
    exact = {"logits_dtype": torch.float32}
    some = scored(tiny, ALL, prompt, chunk=20, tokens=45, **exact)
    alone = scored(tiny, ALL, prompt[:45], **exact)
    for name in ALL:
        torch.testing.assert_close(some[name], alone[name], rtol=2e-4, atol=2e-4, msg=name)


def test_one_metric_alone_scores_as_among_all(tiny_llama, prompt, scored):
    together = scored(tiny_llama, ALL, prompt)
    for name in ALL:
        assert torch.equal(scored(tiny_llama, [name], prompt)[name], together[name]), name


def test_a_prompt_may_be_followed_in_parts(tiny_llama, prompt, scored):
    observer = observe(tiny_llama, ALL, tokens=60)
    engine = Engine(tiny_llama)
    engine.prompt.reserve(1, 60)
    before = state(tiny_llama)
    for part in torch.tensor([prompt]).split(30, dim=1):
        with observer, torch.no_grad():
            tiny_llama.model.base_model(
                input_ids=part, use_cache=True, **{tiny_llama.cache_keyword: engine.prompt}
            )
        assert state(tiny_llama) == before
    whole = scored(tiny_llama, ALL, prompt, chunk=30)
    torch.testing.assert_close(observer.scores(), whole)


def test_a_bfloat16_model(copied, prompt, scored):
    copied.model.to(torch.bfloat16)
    for name, scores in scored(copied, ALL, prompt, chunk=25).items():
        assert scores.dtype == torch.float32 and scores.isfinite().all(), name


class Broken(Exception):
    pass


def test_everything_is_restored_after_an_exception(tiny, prompt):
    def fail(*_):
        raise Broken

    before = state(tiny)
    with pytest.raises(Broken), observe(tiny, ALL, tokens=60):
        raise Broken
    assert state(tiny) == before
    hook = tiny.model.get_decoder().layers[1].mlp.register_forward_pre_hook(fail)
    try:
        with pytest.raises(Broken), observe(tiny, ALL, tokens=60):
            Engine(tiny).prefill(prompt)
    finally:
        hook.remove()
    assert state(tiny) == before
    assert cached(tiny, prompt, None)


@pytest.mark.slow
def test_an_attention_that_cannot_be_observed_is_refused_and_nothing_stays(copied):
    copied.model.set_attn_implementation("flex_attention")
    before = state(copied)
    with (
        pytest.raises(UsageError, match=r"model\.attention=sdpa or eager, not flex_attention"),
        observe(copied, ALL, tokens=5),
    ):
        pass
    assert state(copied) == before


def test_unknown_names_list_the_choices(tiny_llama):
    with pytest.raises(UsageError) as error:
        observe(tiny_llama, ["key_norm", "keynorm"], tokens=5)
    assert "'keynorm'" in str(error.value) and ", ".join(choices()) in str(error.value)
    assert {*ALL, *PER_HEAD, "hidden_max"} == set(choices())


def test_labels():
    assert metric("attention_window").window == 32
    assert metric("attention_window-64").window == 64
    for label in ("attention_window-64", "attention_window", "surprisal"):
        assert metric(label).label == label
    for label in ("attention_window-0", "attention_window-", "attention_window-x", "key_norm-3", "random-"):
        with pytest.raises(UsageError, match=label.partition("-")[0]):
            metric(label)


def test_random_repeats_by_seed_and_differs_across_seeds_and_prompts(tiny_llama, prompt, scored):
    def draw(ids, seed):
        torch.manual_seed(0 if seed else 1)  # the global generator plays no part
        return scored(tiny_llama, ["random"], ids, seed=seed)["random"]

    first = draw(prompt, 0)
    assert torch.equal(first, draw(prompt, 0))
    other_prompt = [*prompt[:-1], prompt[-1] - 1]
    for other in (draw(prompt, 1), draw(other_prompt, 0)):
        assert (first != other).float().mean() > 0.9
    assert first.min() >= 0 and first.max() < 1


def test_recency_is_the_position(tiny_llama, prompt, scored):
    assert scored(tiny_llama, ["recency"], prompt, chunk=11)["recency"][0].tolist() == list(range(60))


def test_misuse_is_told(tiny_llama, prompt):
    base, ids = tiny_llama.model.base_model, torch.tensor([prompt])
    observer = observe(tiny_llama, ["key_norm"], tokens=61)
    with observer:
        Engine(tiny_llama).prefill(prompt)
    with pytest.raises(ValueError, match="61 tokens were announced, 60 were seen"):
        observer.scores()
    with pytest.raises(ValueError, match="the cache holds 0 tokens, but 60 were observed"), observer:
        Engine(tiny_llama).prefill(prompt)
    with pytest.raises(ValueError, match="batch of 2"), observe(tiny_llama, ["key_norm"], tokens=5):
        base(input_ids=ids.expand(2, -1))
    with pytest.raises(UsageError, match="at least one"):
        observe(tiny_llama, ["key_norm"], tokens=0)


def test_states_that_are_not_finite_are_named(copied, prompt):
    with torch.no_grad():
        copied.model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with observe(copied, ["recency", "key_norm"], tokens=60) as observer:
        Engine(copied).prefill(prompt)
    with pytest.raises(SemkvError, match="key_norm is NaN or infinite"):
        observer.scores()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that was made, views and tensors without memory left out.

    The first look at a model's cache shape builds the model anew on the device ``meta``, which holds nothing.
    """

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple) else (result,)
        for returned, tensor in zip(function._schema.returns, made, strict=False):
            made_here = isinstance(tensor, torch.Tensor) and returned.alias_info is None
            if made_here and tensor.device.type != "meta":
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.fixture(scope="module")
def wide():
    """A model of many words: [tokens, vocabulary] is large, and so is [heads, tokens, tokens]."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=1500,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    return LoadedModel(LlamaForCausalLM(config).eval(), None, label="wide", revision=None)


def largest(loaded, tokens, names):
    """Largest tensor made during an observed prefill and its scores; with no names, an unobserved one."""
    ids = (torch.arange(tokens) % 1500).tolist()
    with Largest() as mode:
        if names:
            with observe(loaded, names, tokens=tokens) as observer:
                Engine(loaded).prefill(ids)
            observer.scores()
        else:
            Engine(loaded).prefill(ids)
    return mode.elements


@pytest.mark.parametrize("name", ALL)
def test_temporaries_stay_below_those_of_the_prefill(wide, name, monkeypatch):
    monkeypatch.setitem(attention._BLOCK_BYTES, "cpu", 64 << 10)
    monkeypatch.setattr(logits, "_TILE_TOKENS", 32)
    monkeypatch.setattr(logits, "_TILE_WORDS", 250)
    prefill = largest(wide, 800, None)
    observed = largest(wide, 800, [name])
    # 800 x 1500 logits and 4 x 800 x 800 weights are far above.
    assert prefill <= observed <= 1.05 * max(prefill, 800 * 4 * attention._LEAST_QUERIES)
    assert largest(wide, 400, [name]) * 1.9 < observed < largest(wide, 400, [name]) * 2.1
