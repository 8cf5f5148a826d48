"""Methods with windows and channel groups in all protocols: a row is the same alone and among others."""

import pytest
from requested import some_request

from semkv_bench.engine.engine import Engine
from semkv_bench.engine.options import EngineOptions
from semkv_bench.protocols.rule import CodingRule
from semkv_bench.quantizers import Affine, Keep, Method
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

SMALL = Method(
    "small_kivi",
    {"group": {"axis": "channel", "tokens": 4}, "keep": {"sinks": 2, "block": 8}},
    {"group": {"axis": "token", "channels": 8}, "keep": {"sinks": 2, "recent": 6}},
)
WINDOWED = Affine(keep=Keep(sinks=2, recent=6))
SETTINGS = [
    FULL,
    *uniform_settings(SMALL.keys, SMALL.values, [16, 2]),
    *uniform_settings(WINDOWED, WINDOWED, [2]),
    *uniform_settings(Affine(), Affine(), [3]),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("parts", "turns"), [("prompt", 1), ("both", 1), ("generated", 1), ("both", 2)])
def test_answers_hang_on_no_other_row(tiny_llama, parts, turns):
    free = some_request(turns=turns, new=14)
    rule = CodingRule(parts, 4)
    # The first row to say this token ends early.
    early = Engine(tiny_llama).answer(free, SETTINGS, rule).turns[0][1].tokens[3]
    request = some_request(turns=turns, new=14, stop={early})
    together = Engine(tiny_llama).answer(request, SETTINGS, rule).turns
    alone = Engine(tiny_llama, EngineOptions(max_rows=1)).answer(request, SETTINGS, rule).turns
    for turn, single in zip(together, alone, strict=True):
        assert [outcome.tokens for outcome in turn] == [outcome.tokens for outcome in single]
        assert [outcome.stored for outcome in turn] == [outcome.stored for outcome in single]
        for outcome, other in zip(turn, single, strict=True):
            if other.kl is None:
                assert outcome.kl is None
            else:
                assert outcome.kl == pytest.approx(other.kl, rel=0.02, abs=1e-5)


def test_what_a_row_holds_is_what_the_rule_plans(tiny_llama):
    rule, request = CodingRule("both", 4), some_request(new=14, reference_ids=[])
    (outcomes,) = Engine(tiny_llama).answer(request, SETTINGS, rule).turns
    for outcome in outcomes[1:]:
        keys, values = rule.stored(outcome.setting, 39, [14])
        held = {part.side: part.tokens for part in outcome.stored.sides}
        assert (held["keys"].coded_tokens, held["values"].coded_tokens) == (
            keys.coded_tokens,
            values.coded_tokens,
        )
