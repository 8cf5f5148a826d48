import string
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_bench.tasks import longbench_metrics as metrics


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("a cat", "The cat sat.", 2 / 3),  # precision 1, recall 1/2
        ("The CAT, sat!", "cat sat", 1.0),
        ("yes yes yes", "yes", 0.5),  # precision 1/3, recall 1
        ("theatre", "the atre", 0.0),
        ("the", "the", 0.0),
        ("", "cat", 0.0),
        ("it's", "its", 1.0),
    ],
)
def test_word_f1(prediction, reference, score):
    assert metrics.word_f1(prediction, reference) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("北京。", "北京", 1.0),
        ("我 爱 北京", "我爱北京", 1.0),
        ("北京", "上海", 0.0),
        ("我爱北京", "我爱上海", 2 / 3),
        ("。，！", "北京", 0.0),
        ("", "北京", 0.0),
    ],
)
def test_chinese_f1(prediction, reference, score):
    assert metrics.chinese_f1(prediction, reference) == pytest.approx(score, abs=1e-12)


def test_rouge_l_by_hand():
    # Longest common subsequence "the cat sat", 3 of 4 words here and 3 of 3 there: F = 2 * 3/4 / (7/4) = 6/7.
    assert metrics.rouge_l("the big cat sat", "the cat sat") == pytest.approx(6 / 7, abs=1e-7)
    assert metrics.rouge_l("dog", "the cat sat") == 0.0


@pytest.mark.parametrize("text", ["", ".", "...", " . "])
def test_rouge_l_of_nothing_is_zero(text):
    assert metrics.rouge_l(text, "the cat sat") == 0.0
    assert metrics.rouge_l("the cat sat", text) == 0.0
    assert metrics.chinese_rouge_l(text, "北京") == 0.0


def test_chinese_rouge_l_counts_words():
    # 我 爱 北京 against 我 爱 上海: two of three words.
    assert metrics.chinese_rouge_l("我爱北京", "我爱上海") == pytest.approx(2 / 3, abs=1e-7)


def test_rouge_l_does_not_depend_on_the_callers_depth():
    def deeper(depth):
        return deeper(depth - 1) if depth else metrics.rouge_l(words, words)

    words = " ".join(f"w{i}" for i in range(700))
    limit = sys.getrecursionlimit()
    assert deeper(limit // 2) == deeper(0) == pytest.approx(1.0)
    assert sys.getrecursionlimit() == limit


def test_chinese_words_make_no_noise(capfd):
    metrics._jieba.cache_clear()
    metrics.chinese_f1("我爱北京", "我爱上海")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("Animal", 1.0),
        ("The type is Animal.", 1.0),
        ("Animal or Food", 0.5),
        ("animal", 0.0),
        ("Food", 0.0),
        ("", 0.0),
    ],
)
def test_classification(prediction, score):
    assert metrics.classification(prediction, "Animal", ["Food", "Animal", "City"]) == score


def test_class_names_within_the_right_one_do_not_count():
    classes = ["number", "City", "Other number"]
    assert metrics.classification("Other number", "Other number", classes) == 1.0
    assert metrics.classification("number", "Other number", classes) == 0.0


def test_a_part_that_follows_a_part_counts_as_in_the_benchmark():
    # "ab" comes right after the dropped "a" and is passed over: "ab" and "abc" remain.
    assert metrics.classification("abc", "abc", ["a", "ab", "abc"]) == 0.5


@pytest.mark.parametrize(
    ("prediction", "score"), [("12", 1.0), ("1 12 12 3", 0.5), ("112", 0.0), ("none", 0.0), ("", 0.0)]
)
def test_numbers(prediction, score):
    assert metrics.number_share(prediction, "12") == score
    assert metrics.paragraph_share(prediction, "Paragraph 12") == score
    assert metrics.paragraph_share(prediction, "段落12") == score


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("return x", "return x", 1.0),
        ("\n\nreturn x\nmore", "return x", 1.0),
        ("# note\n```python\n// note\nreturn x", "return x", 1.0),
        ("abcd", "abxy", 0.5),
        ("abc", "abd", 0.67),  # 2/3 rounded to a whole per cent
        ("# only a note", "x", 0.0),
        ("", "x", 0.0),
    ],
)
def test_code_similarity(prediction, reference, score):
    assert metrics.code_similarity(prediction, reference) == score


@pytest.mark.slow
@settings(deadline=None)  # the first call loads a dictionary
@given(st.text(alphabet=string.printable + "汉字。段落", max_size=60), st.text(min_size=1, max_size=30))
def test_scores_stay_within_bounds(prediction, reference):
    for metric in (metrics.word_f1, metrics.chinese_f1, metrics.rouge_l, metrics.code_similarity):
        assert 0.0 <= metric(prediction, reference) <= 1.0
    assert 0.0 <= metrics.number_share(prediction, "1") <= 1.0
