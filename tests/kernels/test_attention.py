"""Reference attention over packed vectors against torch's own attention."""

import torch

from semkv_bench.kernels import PackedLayout, PackedVectors, merge_attention
from semkv_bench.kernels.affine_reference import affine_quantize
from semkv_bench.kernels.attention_reference import packed_attention
from semkv_bench.kernels.packing_reference import pack, unpack_dequantize


def packed(tokens, seed, levels=5):
    x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(seed))
    layout = PackedLayout.build(torch.full((tokens,), levels), 2, 64)
    codes, scale, zero = affine_quantize(x, layout.levels()[None], 64)
    return PackedVectors(layout, pack(codes[0], layout), scale[0], zero)


def test_is_attention_over_the_decoded_values():
    query = torch.randn(6, 64, generator=torch.Generator().manual_seed(9))
    keys, values = packed(100, 0), packed(100, 1)
    out, log_sum = packed_attention(query, keys, values, 0.125)
    k, v = (unpack_dequantize(side).repeat_interleave(3, dim=0) for side in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(query[:, None], k, v, scale=0.125)[:, 0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    scores = (query[:, None] @ k.transpose(1, 2))[:, 0] * 0.125
    torch.testing.assert_close(log_sum, scores.exp().sum(-1).log(), rtol=1e-5, atol=1e-5)


def test_parts_merge_to_the_whole():
    query = torch.randn(4, 64, generator=torch.Generator().manual_seed(9))
    sides = [(packed(70, 0), packed(70, 1)), (packed(33, 2, levels=3), packed(33, 3, levels=8))]
    parts = [packed_attention(query, keys, values, 0.125) for keys, values in sides]
    out, log_sum = merge_attention(*(torch.stack(column) for column in zip(*parts, strict=True)))
    k, v = (torch.cat([unpack_dequantize(side[i]) for side in sides], dim=1) for i in (0, 1))
    k, v = k.repeat_interleave(2, dim=0), v.repeat_interleave(2, dim=0)
    expected = torch.nn.functional.scaled_dot_product_attention(query[:, None], k, v, scale=0.125)[:, 0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    scores = (query[:, None] @ k.transpose(1, 2))[:, 0] * 0.125
    torch.testing.assert_close(log_sum, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
