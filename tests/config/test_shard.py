from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv_bench.config.shard import Shard
from semkv_bench.errors import UsageError
from semkv_bench.sweep.gpus import free_gpu
from semkv_bench.tasks import Example


def _example(task: str, number: int, seed: int = 0, tokens: int = 10) -> Example:
    return Example(task, str(number), seed, tuple(range(tokens)), ("x",), 4)


@pytest.mark.parametrize("text", ["0/4", "5/4", "x", "1", "1/0", "-1/4", "1.5/4", "1/4/2", "", "٢/٤"])
def test_bad_shards_say_what_a_shard_is(text):
    with pytest.raises(UsageError, match="i/K with i from 1 to K"):
        Shard.parse(text)


def test_a_shard_reads_as_it_is_written():
    assert Shard.parse("2/4") == Shard.parse(" 2 / 4 ") == Shard(2, 4)
    assert str(Shard(2, 4)) == "2/4"


def test_a_worked_split():
    # Tokens 50, 40, 30, 20, 10 of one task dealt to and fro over two shares: 50 | 40, 30 | 20 turned round, 10.
    examples = [_example("a", i, tokens=tokens) for i, tokens in enumerate((10, 20, 30, 40, 50))]
    first, second = (Shard(i, 2).take(examples) for i in (1, 2))
    assert [len(e.input_ids) for e in first] == [10, 20, 50]
    assert [len(e.input_ids) for e in second] == [30, 40]


@given(
    sizes=st.lists(st.integers(0, 13), min_size=1, max_size=6),
    count=st.integers(1, 7),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
)
def test_shares_are_a_balanced_partition(sizes, count, lengths):
    examples = [
        _example(f"task{t}", i, tokens=lengths[(t + i) % len(lengths)])
        for t, size in enumerate(sizes)
        for i in range(size)
    ]
    shares = [Shard(i, count).take(examples) for i in range(1, count + 1)]
    assert sorted((e.task, e.example_id) for share in shares for e in share) == sorted(
        (e.task, e.example_id) for e in examples
    )
    for task in {e.task for e in examples}:
        held = [Counter(e.task for e in share)[task] for share in shares]
        assert max(held) - min(held) <= 1
    held = [len(share) for share in shares]
    assert max(held) - min(held) <= 1
    backwards = [Shard(i, count).take(examples[::-1]) for i in range(1, count + 1)]
    assert [set(share) for share in backwards] == [set(share) for share in shares]


def test_what_belongs_together_stays_together():
    examples = [_example("a", number, seed) for number in range(5) for seed in range(3)]
    shares = [Shard(i, 2).take(examples, lambda e: e.example_id) for i in (1, 2)]
    ids = [{e.example_id for e in share} for share in shares]
    assert not ids[0] & ids[1] and sorted(map(len, ids)) == [2, 3]
    assert sum(map(len, shares)) == 15


def test_each_process_takes_a_gpu_that_is_free(tmp_path):
    with free_gpu(1, 2, tmp_path) as own:
        assert own == 1
        with free_gpu(3, 2, tmp_path) as other:
            assert other == 0
            with free_gpu(5, 2, tmp_path) as third:
                assert third == 1
    with free_gpu(5, 2, tmp_path) as again:
        assert again == 1
