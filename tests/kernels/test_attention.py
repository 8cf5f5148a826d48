"""Reference attention over packed vectors against torch's own attention."""

import torch
from attended import piece

from semkv_bench.kernels import merge_attention
from semkv_bench.kernels.attention_reference import attention_work, packed_attention
from semkv_bench.kernels.packing_reference import unpack_dequantize


def expected(query, keys, values):
    """Output and log-sum-exp of query [query_heads, head_dim] over keys and values [heads, tokens, head_dim]."""
    keys, values = (side.float().repeat_interleave(len(query) // len(side), dim=0) for side in (keys, values))
    attend = torch.nn.functional.scaled_dot_product_attention
    scores = (query[:, None] @ keys.transpose(1, 2))[:, 0] * 0.125
    return attend(query[:, None], keys, values, scale=0.125)[:, 0], scores.exp().sum(-1).log()


def decoded(pieces):
    return [torch.cat([unpack_dequantize(piece[side]) for piece in pieces], dim=1) for side in range(2)]


def test_is_attention_over_the_decoded_values_of_every_row():
    query, turned = torch.randn(2, 2, 6, 64, generator=torch.Generator().manual_seed(9))
    rows = [
        [piece(2, 100, 64, (5, 6), (5,)), piece(2, 7, 64, (3,), (8,), 1)],
        [piece(2, 30, 64, (5,), (5,), 2)],
    ]
    coded, plain = packed_attention(query, turned, attention_work(rows), [], 0.125)
    for number, pieces in enumerate(rows):
        out, log_sum = expected(turned[number], *decoded(pieces))
        torch.testing.assert_close(coded[0][number], out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(coded[1][number], log_sum, rtol=1e-5, atol=1e-5)
    assert not plain[0].any() and (plain[1] == -torch.inf).all()


def test_coded_and_plain_parts_merge_to_the_whole():
    query = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(9))
    pieces = [piece(2, 70, 64, (5,), (6,))]
    sinks, tail = torch.randn(2, 2, 1, 2, 11, 64, generator=torch.Generator().manual_seed(1))
    parts = packed_attention(query, query, attention_work([pieces]), [tuple(sinks), tuple(tail)], 0.125)
    out, log_sum = merge_attention(*(torch.stack(column, dim=1) for column in zip(*parts, strict=True)))
    keys, values = (torch.cat([sinks[n][0], d, tail[n][0]], dim=1) for n, d in enumerate(decoded(pieces)))
    torch.testing.assert_close((out[0], log_sum[0]), expected(query[0], keys, values), rtol=1e-5, atol=1e-5)


def test_nothing_merges_to_nothing():
    out, log_sum = merge_attention(torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf))
    assert not out.any() and (log_sum == -torch.inf).all()
    out, log_sum = merge_attention(torch.zeros(0, 3, 4), torch.zeros(0, 3))
    assert not out.any() and (log_sum == -torch.inf).all()
