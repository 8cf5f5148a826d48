import pytest

from semkv_bench.sweep.runaway import is_loop, is_runaway

SENTENCE = list(range(100, 120))


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([7] * 24, True),
        ([7] * 23, False),
        ([1, 2, 3] * 8, True),
        (list(range(500)) + [4, 5] * 12, True),
        ([7] * 200 + [8], False),
        (SENTENCE * 3, True),
        (SENTENCE * 3 + SENTENCE[:7], True),
        (SENTENCE * 2 + SENTENCE[:19], False),
        ([5, *SENTENCE, 6, *SENTENCE, 7, *SENTENCE], False),
        (list(range(512)), False),
        ([n for i in range(100) for n in (9, 1, i + 200)], False),
        ([], False),
    ],
)
def test_a_loop_is_an_ngram_three_times_at_the_end(tokens, loops):
    assert is_loop(tokens) is loops


def test_a_runaway_meets_its_limit_or_loops():
    assert is_runaway([1, 2, 3], ended=False) and not is_runaway([1, 2, 3], ended=True)
    assert is_runaway(SENTENCE * 3, ended=True)
