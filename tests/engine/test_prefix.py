"""Prompts about one document: what they begin with is read once, and nothing else changes."""

import pytest
import torch

from semkv_bench.engine import engine as running
from semkv_bench.engine.engine import Engine, Request
from semkv_bench.errors import SemkvError
from semkv_bench.quantizers import Affine
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

SETTINGS = [FULL, *uniform_settings(Affine(), Affine(), [16, 5, 2])]
NOISE = 1e-5  # of a float32 prefill in two parts, relative to the largest value


def _ids(length: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _request(document: list[int], question: int, length: int, name: str = "d") -> Request:
    ids = [*document, *_ids(length, 100 + question)]
    return Request(
        input_ids=ids,
        reference_ids=[5, 6, 7],
        max_new_tokens=8,
        stop_ids=frozenset([2]),
        document=name,
    )


# The second prompt needs larger buffers, the third a shorter beginning than the second, the last is the third again.
QUESTIONS = [(200, 1, 20), (200, 2, 80), (150, 3, 30), (150, 3, 30)]


def test_answers_and_the_coded_prompt_are_those_of_a_prompt_read_whole(tiny):
    engine, document = Engine(tiny), _ids(200, 0)
    reused = 0
    for shared, question, length in QUESTIONS:
        request = _request(document[:shared], question, length)
        found = engine.answer(request, SETTINGS)
        alone = Engine(tiny)
        whole = alone.answer(request, SETTINGS)
        for layer, other in zip(
            engine.prompt.attending.values(), alone.prompt.attending.values(), strict=True
        ):
            for side, expected in zip(layer.stored(), other.stored(), strict=True):
                assert side.shape == expected.shape
                assert (side - expected).abs().max() <= NOISE * expected.abs().max()
        for one, other in zip(found.turns[0], whole.turns[0], strict=True):
            assert one.setting == other.setting
            assert (one.context, one.reads, one.stored) == (other.context, other.reads, other.stored)
            if one.setting.name in ("full", "L16"):  # coarse codes may turn over at a rounding
                assert one.tokens == other.tokens
                assert one.kl == pytest.approx(other.kl, rel=0.05, abs=1e-4)
        assert alone.prompts_read.reused == 0
        reused = engine.prompts_read.reused
    fed = sum(shared + length - 1 for shared, _, length in QUESTIONS)
    assert reused == 200 + 150 + 178  # the last token before the answer is fed each time
    assert engine.prompts_read.fed == fed - reused


def test_only_prompts_of_the_same_document_go_on_from_one_another(tiny):
    engine, document = Engine(tiny), _ids(60, 0)
    for number, name in enumerate(("a", "b", "", "")):
        engine.answer(_request(document, number, 10, name), SETTINGS)
    assert engine.prompts_read.reused == 0
    engine.answer(_request(_ids(60, 5), 0, 10, ""), SETTINGS)
    assert engine.prompts_read.reused == 0


def test_a_metric_that_follows_the_prompt_sees_all_of_it(tiny_llama):
    engine, document = Engine(tiny_llama), _ids(60, 0)
    for number in range(2):
        request = _request(document, number, 10)
        scores = engine.prefill(request.input_ids[:-1], ["key_norm"], document="d").scores["key_norm"]
        expected = Engine(tiny_llama).prefill(request.input_ids[:-1], ["key_norm"]).scores["key_norm"]
        assert torch.equal(scores, expected)
    assert engine.prompts_read.reused == 0


def test_a_prompt_that_was_cut_short_leaves_nothing_to_go_on_from(tiny_llama, monkeypatch):
    engine, document = Engine(tiny_llama), _ids(60, 0)
    engine.answer(_request(document, 0, 10), SETTINGS)

    def fail(*args):
        raise SemkvError("no")

    with monkeypatch.context() as patched:
        patched.setattr(running, "prefill", fail)
        with pytest.raises(SemkvError):
            engine.answer(_request(document, 1, 10), SETTINGS)
    engine.answer(_request(document, 2, 10), SETTINGS)
    assert engine.prompts_read.reused == 0
    engine.answer(_request(document, 3, 10), SETTINGS)
    assert engine.prompts_read.reused == 60
