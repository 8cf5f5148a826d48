"""Prompts that are read in one batch: what they are by themselves, up to the noise of batching."""

import pytest
import torch

from semkv_bench.engine import engine as running
from semkv_bench.engine.engine import Engine
from semkv_bench.engine.options import EngineOptions
from semkv_bench.engine.outcome import Request
from semkv_bench.engine.transformers import TransformersSession
from semkv_bench.protocols import Prefill
from semkv_bench.quantizers import Affine
from semkv_bench.settings.allocation import TwoLevel
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL, Coded, Setting
from semkv_bench.tasks import Example

SETTINGS = [FULL, *uniform_settings(Affine(), Affine(), [16, 4])]
_MIX = Coded(Affine(), TwoLevel(6, 3, 0.25))


def _ids(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def _request(length: int, document: str = "") -> Request:
    return Request(_ids(length), [5, 6, 7], 6, frozenset({2}), document=document)


@pytest.mark.parametrize("chunk", [None, 16])
def test_prompts_of_about_one_length_are_what_they_are_alone(tiny, chunk):
    requests = [_request(length) for length in (40, 36, 20, 40, 21)]
    together, alone = Engine(tiny, EngineOptions(prefill_chunk=chunk)), Engine(tiny)
    read = together.read_together(requests, SETTINGS)
    assert [prefilled.together for prefilled in read] == [3, 3, 2, 3, 2]
    for request, prefilled in zip(requests, read, strict=True):
        expected = alone.answer(request, SETTINGS)
        assert prefilled.ids == expected.prefilled.ids
        torch.testing.assert_close(prefilled.hidden, expected.prefilled.hidden, rtol=1e-3, atol=1e-4)
        for mine, own in zip(
            prefilled.cache.attending.values(), expected.prefilled.cache.attending.values(), strict=True
        ):
            torch.testing.assert_close(mine.stored(), own.stored(), rtol=1e-3, atol=1e-4)
        got = together.answer(request, SETTINGS, prefilled=prefilled)
        for outcome, other in zip(got.turns[0], expected.turns[0], strict=True):
            assert outcome.tokens == other.tokens
            assert outcome.kl == pytest.approx(other.kl, rel=0.01, abs=1e-5)


def test_what_is_to_be_read_by_itself_is(tiny_llama, monkeypatch):
    engine, one = Engine(tiny_llama), Setting("mix", "mixed", "affine", keys=_MIX, values=_MIX)
    pair = [_request(40), _request(39)]
    assert engine.read_together(pair, [FULL, one]) == [None, None]
    assert engine.read_together(pair[:1], SETTINGS) == [None]
    same = [_request(40, "d"), _request(39, "d"), _request(38), _request(37, "e")]
    assert [each is None for each in engine.read_together(same, SETTINGS)] == [True, True, False, False]
    # Where nothing may be filled up, prompts of one length are still read together.
    monkeypatch.setattr(running, "takes_padded_prompts", lambda loaded: False)
    lengths = [_request(40), _request(39), _request(40, "f")]
    read = Engine(tiny_llama).read_together(lengths, SETTINGS)
    assert [each is None for each in read] == [False, True, False]


def test_without_memory_for_several_prompts_each_is_read_by_itself(tiny_llama, monkeypatch):
    def scarce(*args):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(running, "prefill_together", scarce)
    assert Engine(tiny_llama).read_together([_request(40), _request(39)], SETTINGS) == [None, None]


def test_a_session_answers_in_order_and_its_noise_is_that_of_reading_together_too(tiny_llama, monkeypatch):
    examples = [Example("t", str(i), 0, _ids(length), ("x",), 6) for i, length in enumerate((40, 20, 39, 38))]
    one, several = (TransformersSession(tiny_llama, EngineOptions(prompts=count)) for count in (1, 4))
    alone, read = [False, False, True, False], []
    expected = list(one.answers(examples, SETTINGS, Prefill(), alone))
    whole = running.prefill
    monkeypatch.setattr(running, "prefill", lambda *args: read.append(args[1]) or whole(*args))
    got = list(several.answers(examples, SETTINGS, Prefill(), alone))
    assert several.together == 4 and several.notes()["prompts_read_together"] == 3
    # The example of another length, and the one that shows the noise.
    assert [len(ids) for ids in read] == [19, 38]
    for mine, other in zip(got, expected, strict=True):
        assert [o.tokens for o in mine.turns[0]] == [o.tokens for o in other.turns[0]]
    assert got[2].alone is not None and "prompts_read_together" not in one.notes()
