"""What a row holds hangs on that row alone: not on other rows, on how it was fed, or on rows that ended."""

from dataclasses import replace

import pytest
import torch
from fitted import rotary, with_file
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import LlamaConfig

from semkv_bench.config.choices import choice_file, choices
from semkv_bench.engine.coding import RowCoder
from semkv_bench.engine.rows import RowCache
from semkv_bench.protocols.rule import CodingRule, Ranks
from semkv_bench.quantizers import Affine, Keep, TurboQuant, TurboQuantSplit
from semkv_bench.settings.sets import TwoLevelMixes, uniform_settings
from semkv_bench.settings.setting import FULL

HEADS, HEAD_DIM, PROMPT, TAIL = 2, 64, 290, 150
RULES = {
    "prefill": CodingRule("prompt"),
    "generation": CodingRule("both", 32),
    "generated": CodingRule("generated", 32),
    "small blocks": CodingRule("both", 5),
}


def of_file(name):
    node = OmegaConf.load(choice_file("quantizer", name))
    if name == "rotatekv":
        node["keys"].transform[1].heads = HEADS
    made = instantiate(node, _convert_="all")
    return tuple(with_file(side, HEAD_DIM, HEADS) for side in (made.of_side("keys"), made.for_values()))


OWN = {
    "affine sinks recent": (Affine(keep=Keep(sinks=4, recent=64)),) * 2,
    "turboquant recent": (TurboQuant(keep=Keep(recent=40)),) * 2,
    "turboquant blocks": (TurboQuant(keep=Keep(sinks=3, block=48)),) * 2,
    "split recent": (TurboQuantSplit(keep=Keep(recent=40)),) * 2,
}
QUANTIZERS = [*choices("sweep")["quantizer"], *OWN]


def settings_of(name):
    keys, values = OWN[name] if name in OWN else of_file(name)
    # A format of one level count has one setting, whatever is asked; another row takes the place of its second.
    coded = uniform_settings(keys, values, [4, 2])
    return [FULL, *coded, *uniform_settings(Affine(), Affine(), [5, 3][: 3 - len(coded)])]


def _states(rows, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, HEADS, tokens, HEAD_DIM, generator=generator)


def _scores(label):
    scores = torch.rand(1, PROMPT, generator=torch.Generator().manual_seed(len(label)))
    # Scores that mark tokens are 0 of all others.
    return scores.where(scores > 0.95, 0) if label.startswith("hidden_max") else scores


def _run(settings, rule, tails, calls, turn=None, leave=None):
    """Rows after their tails [2, rows, ...] came in ``calls``; ``leave``: a row, and the call at which it ends."""
    config = LlamaConfig(num_hidden_layers=1)
    prompt, rows = RowCache(config), RowCache(config)
    prompt.reserve(1, PROMPT)
    prompt.update(*_states(1, PROMPT, 1), 0)
    turned = rotary(HEAD_DIM)
    coding = RowCoder(rows, settings, rule, [0], [1, 2, 3], seed=5, rotary=lambda: {0: turned})
    coding.fill(prompt, TAIL, Ranks(_scores))
    coding._score = lambda label, row, here: _scores(label)[:, : here.stop - here.start]
    done, order = 0, list(range(len(settings)))
    for number, size in enumerate(calls):
        if leave is not None and number == leave[1]:
            order = [order[row] for row in rows.drop([order.index(leave[0])])]
        coding.close(all_open=number == turn)
        here = tails[:, order, :, done : done + size]
        rows.update(*here, 0)
        done += size
    coding.close()
    keys, values = rows.layers[0].stored()
    book = {row.index: (row.settled, row.coded) for row in rows.rows}
    held = {row.index: (keys[n].clone(), values[n].clone()) for n, row in enumerate(rows.rows)}
    return held, book


ONE_BY_ONE = [1] * TAIL
CHUNKS = [7] * 10 + [16] * 5  # a turn ends after 70 tokens, as it does one by one


def _same_in_any_company(name, rule):
    """A row's states one token at a time, in chunks, beside a row that ends, and alone; those of the chunks."""
    settings, tails = settings_of(name), _states(4, TAIL, 2)
    together, book = _run(settings, RULES[rule], tails, ONE_BY_ONE, turn=70)
    in_chunks, _ = _run(settings, RULES[rule], tails, CHUNKS, turn=10)
    left, _ = _run(settings, RULES[rule], tails, CHUNKS, turn=10, leave=(2, 4))
    alone, alone_book = _run(settings[1:2], RULES[rule], tails[:, 1:2], CHUNKS, turn=10)
    assert alone_book[0] == book[1]
    for side in range(2):
        for index in range(4):
            # The last bit of a rotation back hangs on how many vectors are rotated at once.
            torch.testing.assert_close(together[index][side], in_chunks[index][side], rtol=0, atol=1e-5)
            if index != 2:
                assert torch.equal(left[index][side], in_chunks[index][side]), (index, side)
        assert torch.equal(alone[0][side], in_chunks[1][side])
        assert not torch.equal(together[1][side], together[0][side])
    return in_chunks


@pytest.mark.quick_cases(5)
# A few quantizers, and in turn every rule: all quantizers are in the slow test below.
@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, list(RULES)[k % len(RULES)]) for k, name in enumerate([*QUANTIZERS[: -len(OWN) : 5], *OWN])],
)
def test_a_row_is_the_same_alone_and_together_whatever_the_calls(name, rule):
    _same_in_any_company(name, rule)


# Of the rules that code generated tokens alone, or in blocks of five, one in turn.
UNDER = [
    (name, rule)
    for k, name in enumerate(QUANTIZERS)
    for rule in ("prefill", "generation", ("generated", "small blocks")[k % 2])
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), UNDER)
def test_every_quantizer_in_batches_of_any_size(name, rule):
    in_chunks = _same_in_any_company(name, rule)
    settings, tails = settings_of(name), _states(4, TAIL, 2)
    for max_rows in (1, 3):
        for start in range(0, len(settings), max_rows):
            batch = slice(start, start + max_rows)
            held, _ = _run(settings[batch], RULES[rule], tails[:, batch], CHUNKS, turn=10)
            for index, states in held.items():
                for side in range(2):
                    assert torch.equal(states[side], in_chunks[start + index][side]), (max_rows, start, side)


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("name", choices("sweep")["quantizer"])
def test_a_window_longer_than_the_row_leaves_it_as_it_was(name):
    keys, values = (replace(side, keep=replace(side.keep, recent=PROMPT + TAIL)) for side in of_file(name))
    settings, tails = [FULL, *uniform_settings(keys, values, [2])], _states(2, TAIL, 2)
    held, book = _run(settings, CodingRule("both", 32), tails, CHUNKS)
    # Sinks are settled, and nothing is coded.
    assert book[1][1] == (0, 0)
    for side in range(2):
        assert torch.equal(held[1][side][:, :PROMPT], _states(1, PROMPT, 1)[side, 0])
        assert torch.equal(held[1][side][:, PROMPT:], tails[side, 1])


@pytest.mark.parametrize("quantizer", [Affine, TurboQuant])
def test_sinks_and_recent_tokens_stay_in_16_bits(quantizer):
    keys = quantizer(keep=Keep(sinks=4, recent=64))
    settings, tails = [FULL, *uniform_settings(keys, keys, [2])], _states(2, TAIL, 2)
    held, book = _run(settings, CodingRule("both", 32), tails, [1] * TAIL)
    whole = torch.cat([_states(1, PROMPT, 1)[:, 0], tails[:, 1]], dim=2)
    total = PROMPT + TAIL
    assert book[1] == ((total - 64,) * 2, (total - 68,) * 2)
    for side in range(2):
        same = (held[1][side] == whole[side]).all(-1).all(0)
        assert same.tolist() == [True] * 4 + [False] * (total - 68) + [True] * 64


def test_ranked_rows_with_windows_move_on_in_blocks():
    keys = Affine(keep=Keep(sinks=4, recent=20))
    mixes = TwoLevelMixes(16, 2, 0.5, "recency").settings(keys, keys)
    _, book = _run([FULL, *mixes], CodingRule("both", 32), _states(2, TAIL, 2), [1] * TAIL)
    start = PROMPT - 20
    assert book[1][0] == (start + (PROMPT + TAIL - 20 - start) // 32 * 32,) * 2
