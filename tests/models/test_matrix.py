"""Every kind of architecture: plan, storage, rows against a plain oracle, the packed cache; or the plan's refusal."""

from inspect import signature

import pytest
import torch
from architectures import tiny_config, tiny_model
from byte_tokenizers import byte_tokenizer
from oracle import converse, counts_itself, divergence
from transformers import DynamicCache

from semkv_bench import SemKVCache
from semkv_bench.config.compose import compose_config
from semkv_bench.engine.engine import Engine, Request, Turn
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.models.load import LoadedModel
from semkv_bench.plan.plan import make_plan
from semkv_bench.protocols.rule import PREFILL, CodingRule
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

# fmt: off
SWEPT = (
    "afmoe", "apertus", "arcee", "bailing_hybrid", "bamba", "beam", "big_bird", "biogpt", "bitnet", "bloom",
    "camembert", "codegen", "cohere", "cohere2", "cohere2_moe", "ctrl", "deepseek_v2", "deepseek_v3",
    "diffllama", "doge", "ernie4_5", "exaone4", "falcon", "falcon_h1", "flint", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "glm", "glm4_moe", "gpt2", "gpt_bigcode",
    "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "helium",
    "hunyuan_v1_dense", "jamba", "jetmoe", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4", "llama4_text",
    "longcat_flash", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "mistral", "mixtral",
    "modernbert-decoder", "nanochat", "nemotron", "nemotron_h", "olmo2", "olmo3", "olmo_hybrid", "olmoe",
    "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next",
    "seed_oss", "smollm3", "stablelm", "starcoder2", "trocr", "xglm", "zamba", "zamba2",
)
# fmt: on
CHANGED: dict[str, tuple[str, dict[str, int]]] = {}
REFUSED = {
    "axk2": "indexed_attention",
    "bart": "encoder-decoder",
    "bert": "encoder",
    "blt": "makes no cache",
    "cpmant": "tokens of its own",
    "deepseek_v4": "compressed_attention",
    "deepseek_v32": "indexed_attention",
    "distilbert": "no causal language model",
    "falcon_mamba": "linear_attention",
    "gpt2-short": "positions",
    "llama-small": "embedding",
    "mamba": "linear_attention",
    "minimax": "cache",
    "mllama": "of a text alone",
    "openai-gpt": "no key-value cache",
    "phimoe": "sliding_attention",
    "reformer": "no key-value cache",
    "recurrent_gemma": "linear_attention, sliding_attention",
    "roformer": "encoder",
    "rwkv": "no key-value cache",
    "t5": "encoder-decoder",
    "xlm": "encoder",
    "xlstm": "cache",
}
REFUSED_CHANGES = {
    "bert": {"is_decoder": False},
    "gpt2-short": {"max_position_embeddings": 240},
    "llama-small": {"vocab_size": 40},
    "roformer": {"is_decoder": False},
}
LEVELS, NEW, BLOCK = 3, 6, 2
THREE = uniform_settings(Affine(), Affine(), [LEVELS])[-1]


def named_config(name):
    kind, changes = CHANGED.get(name, (name, REFUSED_CHANGES.get(name, {})))
    return tiny_config(kind.removesuffix("-short").removesuffix("-small"), **changes)


@pytest.fixture(scope="session")
def sweep_config():
    """A sweep of one short example; its model is set by each test."""
    options = ["task.length=260", "subset=[niah_noise]", "per_task=1", "seeds=[0]", "max_new_tokens=4"]
    return compose_config("sweep", ["model=custom", "model.path=nowhere", "grid.levels=[3]", *options])


def plan_of(config, sweep_config, folder):
    config.save_pretrained(folder)
    byte_tokenizer(["<s>", "</s>"], None, adds_bos=False).save_pretrained(folder)
    chosen = sweep_config.copy()
    chosen.model.path = str(folder)
    return make_plan(chosen)


def some_ids(count, seed):
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


TURNS, FORCED = [some_ids(44, 1), some_ids(7, 2)], [some_ids(4, 3), some_ids(4, 4)]


def rows_equal_the_oracle(loaded, rule, expected, stop=None):
    """All settings as rows of one batch against the single sequences of the oracle, FULL's first.

    With a ``stop`` that one of them meets earlier than the other, rows are of different lengths in the next turn.
    """
    stops = frozenset() if stop is None else {stop}
    turns = len(expected[0])
    later = tuple(Turn(TURNS[i], FORCED[i], NEW, stops) for i in range(1, turns))
    request = Request(TURNS[0], FORCED[0], NEW, stops, follow_ups=later)
    answered = Engine(loaded).answer(request, (FULL, THREE), rule).turns
    for turn, outcomes in enumerate(answered):
        for outcome, sequence in zip(outcomes, expected, strict=True):
            tokens, log_probs = sequence[turn]
            kl = divergence(expected[0][turn][1], log_probs)
            assert outcome.tokens == tokens, f"{rule}, turn {turn}, {outcome.setting.name}"
            assert outcome.kl == pytest.approx(kl, rel=0.02, abs=1e-5), f"{rule}, turn {turn}"


def packed_answers_equal_the_oracle(model, expected):
    keyword = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    ids = torch.tensor([TURNS[0]])

    def answer(cache):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, eos_token_id=None,
            pad_token_id=0, **{keyword: cache},
        )  # fmt: skip
        return out[0, ids.shape[1] :].tolist()

    try:
        tokens = answer(SemKVCache(model.config, THREE))
    except SemkvError as error:
        # Attention that is not called by transformers' interface cannot be asked once more for the last token.
        assert "cache.prefill(model" in str(error)
        cache = SemKVCache(model.config, THREE)
        cache.prefill(model, ids)
        tokens = answer(cache)
    assert tokens == expected


# One of each kind of cache, position and head; the others are like one of them.
OFTEN = {
    "bamba",
    "bloom",
    "deepseek_v3",
    "falcon",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gpt2",
    "gpt_oss",
    "jamba",
    "lfm2",
    "llama4_text",
    "mistral",
    "modernbert-decoder",
    "opt",
    "qwen3_next",
    "trocr",
}


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SWEPT]
)
def test_an_architecture_is_swept_as_the_oracle_says(name, sweep_config, tmp_path):
    plan = plan_of(named_config(name), sweep_config, tmp_path)
    kind, changes = CHANGED.get(name, (name, {}))
    model = tiny_model(kind, **changes)
    cache = DynamicCache(config=model.config)
    keyword = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    with torch.no_grad():
        model(input_ids=torch.tensor([TURNS[0]]), use_cache=True, **{keyword: cache})
    sides = [getattr(layer, side, None) for layer in cache.layers for side in ("keys", "values")]
    stored = sum(side.numel() for side in sides if side is not None)
    assert plan.shape.values(len(TURNS[0])) == pytest.approx(stored, rel=0.01)
    loaded = LoadedModel(model, None, name, None)
    prefill = [converse(model, TURNS[:1], FORCED[:1], NEW, levels, None) for levels in (None, LEVELS)]
    rows_equal_the_oracle(loaded, PREFILL, prefill)
    # A conversation whose answers are coded in blocks while they are generated, and whole between the turns.
    stop = prefill[0][0][0][NEW // 2]
    conversation = [converse(model, TURNS, FORCED, NEW, levels, BLOCK, stop) for levels in (None, LEVELS)]
    rows_equal_the_oracle(loaded, CodingRule("both", BLOCK), conversation, stop)
    if any(
        getattr(layer, "number_of_states", 0) and hasattr(layer, "get_mask_sizes") for layer in cache.layers
    ):
        with pytest.raises(UsageError, match="states beside"):
            SemKVCache(model.config, THREE)
    else:
        expected = prefill[1][0][0]
        if counts_itself(model):
            # ``generate`` gives positions from 0 on to every model, these too.
            ((expected, _),) = converse(model, TURNS[:1], FORCED[:1], NEW, LEVELS, None, positions=True)
        packed_answers_equal_the_oracle(model, expected)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_is_refused_by_the_plan_in_one_line(name, sweep_config, tmp_path):
    with pytest.raises(UsageError) as raised:
        plan_of(named_config(name), sweep_config, tmp_path)
    assert REFUSED[name] in str(raised.value) and "\n" not in str(raised.value)
