"""One ranking from several layers."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_bench.importance import shared

layers = st.integers(1, 4).flatmap(
    lambda tokens: st.lists(
        st.lists(st.integers(-50, 50), min_size=tokens, max_size=tokens), min_size=1, max_size=5
    )
)


def test_every_layer_has_one_vote():
    assert shared(torch.tensor([[1.0, 2.0, 3.0], [9000.0, 10.0, 1.0]])).tolist() == [0.5, 0.5, 0.5]
    assert shared(torch.tensor([[1.0, 2.0, 3.0], [10.0, 9000.0, 1.0]])).tolist() == [0.25, 0.75, 0.5]


def test_ties_share_their_rank():
    assert shared(torch.tensor([[5.0, 5.0, 1.0]])).tolist() == [0.75, 0.75, 0.0]
    assert shared(torch.tensor([[4.0, 4.0, 4.0]])).tolist() == [0.5, 0.5, 0.5]


def test_one_token_and_one_layer():
    assert shared(torch.tensor([[3.0]])).tolist() == [0.0]
    assert shared(torch.tensor([[3.0, -1.0]])).tolist() == [1.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(layers)
def test_only_the_order_within_a_layer_counts(rows):
    scores = torch.tensor(rows, dtype=torch.float32)
    scales = torch.arange(1, len(rows) + 1)[:, None] ** 3
    combined = shared(scores)
    torch.testing.assert_close(combined, shared(scores * scales + 7 * scales))
    assert abs(combined.mean() - (0.5 if scores.shape[1] > 1 else 0.0)) < 1e-6
