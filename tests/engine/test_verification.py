"""Decoding from where a row agrees with the forced answer gives what decoding every token gives."""

import pytest
import torch
from requested import GRID, some_request
from thinned import of_models

from semkv_bench.engine import decode as decoding
from semkv_bench.engine.engine import Engine
from semkv_bench.engine.forced import Said, verified
from semkv_bench.engine.options import EngineOptions
from semkv_bench.engine.outcome import Turn
from semkv_bench.protocols.rule import PREFILL, CodingRule
from semkv_bench.settings.setting import FULL

SETTINGS = [FULL, *GRID]


def _stepwise(monkeypatch):
    """Keep nothing of the forced pass but the choice behind the question."""
    whole = decoding.verified
    monkeypatch.setattr(
        decoding, "verified", lambda logits, forced, turn, *more: whole(logits[:, :1], [], turn, *more)
    )


RULES = {"prefill": PREFILL, "both": CodingRule("both", 4), "generated": CodingRule("generated", 3)}
CASES = [
    (rule, temperature, shortest)
    for rule in RULES
    for temperature, shortest in ((0.0, 0), (0.7, 4), (0.0, 5), (1.0, 0))
]
OFTEN = ("both", 0.0, 0), ("prefill", 0.7, 4)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("tiny", "rule", "temperature", "shortest"), of_models(CASES, *OFTEN), indirect=["tiny"]
)
def test_what_is_kept_is_what_stepwise_decoding_gives(tiny, monkeypatch, rule, temperature, shortest):
    kept, rule, changes = 0, RULES[rule], {"min_new_tokens": shortest}
    options = EngineOptions(temperature=temperature)
    for seed in range(2):
        free = Engine(tiny, options).converse(some_request(new=9, seed=seed, turns=2), SETTINGS, rule)[0]
        # The reference is what full says, or begins as another row does; a stop token is among it.
        for own, stop in ((free[0].tokens, {free[0].tokens[6]}), (free[2].tokens[:4], set())):
            request = some_request(new=9, seed=seed, turns=2, reference_ids=own, stop=stop, **changes)
            fast = Engine(tiny, options).converse(request, SETTINGS, rule)
            kept += fast[0][0].tokens[:3] == own[:3]
            with monkeypatch.context() as patch:
                _stepwise(patch)
                slow = Engine(tiny, options).converse(request, SETTINGS, rule)
            for quick, step in zip(fast, slow, strict=True):
                for one, other in zip(quick, step, strict=True):
                    assert (one.tokens, one.ended) == (other.tokens, other.ended), one.setting.name
                    assert one.reads == other.reads
                    assert one.kl == pytest.approx(other.kl, rel=1e-3, abs=1e-6)
                    assert (one.coded_share, one.stored) == (other.coded_share, other.stored)
    assert kept


def test_rows_that_agree_are_not_decoded(tiny_llama, monkeypatch):
    calls = []
    whole = decoding.feed
    monkeypatch.setattr(decoding, "feed", lambda *given, **more: calls.append(1) or whole(*given, **more))
    said = Engine(tiny_llama).run(some_request(new=6), [FULL])[0].tokens
    for reference, expected in ((said, 1), (said[:3], 3), ([], 6)):
        calls.clear()
        answer = Engine(tiny_llama).run(some_request(new=6, reference_ids=reference), [FULL])[0]
        assert answer.tokens == said and len(calls) == expected


def test_verification_by_hand():
    turn = Turn([1], [4, 5, 6], max_new_tokens=4, stop_ids=frozenset({9}))
    choices = [[4, 5, 6, 7], [4, 5, 8, 7], [3, 5, 6, 7], [4, 9, 6, 7], [4, 5, 6, 9]]
    logits = torch.nn.functional.one_hot(torch.tensor(choices), 10).float()

    def greedy(logits, steps):
        return logits.argmax(-1)

    assert verified(logits, [4, 5, 6], turn, greedy) == [
        Said([4, 5, 6, 7], 3, None),
        Said([4, 5, 8], 2, 8),
        Said([3], 0, 3),
        Said([4], 1, None, ended=True),
        Said([4, 5, 6], 3, None, ended=True),
    ]
    # Where the model cannot hide the places behind shorter rows, all keep as many as the first to differ.
    even = verified(logits[:2], [4, 5, 6], turn, greedy, uneven=False)
    assert even == [Said([4, 5, 6], 2, 6), Said([4, 5, 8], 2, 8)]
