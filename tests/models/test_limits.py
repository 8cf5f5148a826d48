"""Positions of a model: what a plan lets through runs to the last of them, and one token more is refused."""

import json

import pytest
from architectures import tiny_config, tiny_model
from byte_tokenizers import byte_tokenizer

from semkv_bench.config.compose import compose_config
from semkv_bench.engine.engine import Engine
from semkv_bench.engine.outcome import request_of
from semkv_bench.errors import UsageError
from semkv_bench.models.load import LoadedModel
from semkv_bench.plan.plan import make_plan, most_tokens
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

PROMPT, REFERENCE, ANSWER = 50, 30, 4
# The prompt's last token is fed with the forced ones, of which the last is never fed.
NEEDED = PROMPT + REFERENCE


def _plan(kind, positions, folder):
    config = tiny_config(kind, max_position_embeddings=positions, vocab_size=400)
    config.save_pretrained(folder)
    byte_tokenizer(["<s>", "</s>"], None, adds_bos=False).save_pretrained(folder)
    asked = folder / "asked.jsonl"
    asked.write_text(json.dumps({"prompt": "p" * PROMPT, "answer": "r" * (REFERENCE - 1)}))
    options = ["model=custom", f"model.path={folder}", "task=jsonl", f"task.path={asked}", "task.chat=false"]
    return make_plan(
        compose_config("sweep", [*options, f"max_new_tokens={ANSWER}", "grid.levels=[3]", "seeds=[0]"])
    )


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("kind", "unused"), [("gpt2", 0), ("opt", 0), ("llama", 0), ("camembert", 1)])
def test_forced_tokens_count_against_the_positions(kind, unused, tmp_path):
    with pytest.raises(UsageError, match=f"needs {NEEDED} positions, the model has {NEEDED - 1}"):
        _plan(kind, unused + NEEDED - 1, tmp_path)
    plan = _plan(kind, unused + NEEDED, tmp_path)
    (example,) = plan.examples
    assert (len(example.input_ids), len(example.target_ids)) == (PROMPT, REFERENCE)
    assert most_tokens(example) == PROMPT + ANSWER and most_tokens(example, forced=REFERENCE) == NEEDED
    model = tiny_model(kind, max_position_embeddings=unused + NEEDED, vocab_size=400)
    settings = (FULL, uniform_settings(Affine(), Affine(), [3])[-1])
    outcomes = Engine(LoadedModel(model, None, kind, None)).run(request_of(example), settings)
    assert outcomes[1].kl > 0 and len(outcomes[1].tokens) <= ANSWER
