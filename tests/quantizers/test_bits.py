"""What every method costs: bits of keys and values at three lengths, by the command that a user asks."""

import json
from functools import partial

import pytest
from test_formats import FIXED

from semkv_bench.cli import main
from semkv_bench.config.choices import names_of
from semkv_bench.config.compose import compose_config
from semkv_bench.plan.storage import storage_rows

LENGTHS = (1000, 4000, 32000)


def always(keys, values=None):
    """A price that does not hang on the number of tokens."""
    return [(keys, keys if values is None else values)] * 3


# By method, levels and other options: bits of keys and of values at 1,000, 4,000 and 32,000 tokens, for a head_dim of
# 128 and 8 KV heads. Levels are of both sides, or of keys and of values.
BITS = {
    ("affine", 16): always(4.25),
    ("turboquant", 16): always(4.125),
    ("kivi", 4): [(4.352, 4.664), (3.104, 3.416), (3.000, 3.052)],
    ("kivi", 16): [(6.144, 6.408), (5.088, 5.352), (5.000, 5.044)],
    ("hf_quanto", 16): always(4.5),
    ("kvquant", 8): [(3.333, 3.364), (3.323, 3.354), (3.320, 3.352)],
    ("kvquant", 4): [(2.334, 2.365), (2.323, 2.355), (2.320, 2.352)],
    ("skvq", (4, 3)): [(3.970, 3.624), (2.586, 2.200), (2.183, 1.784)],
    ("rotatekv", 4): [(2.525, 2.525), (2.319, 2.319), (2.259, 2.259)],
    # Sometimes told as 4.196 and 3.581 at 1,000 tokens: then only the 960 coded tokens' share of the factor over
    # channels, 4 * 16 / 1000 bits, is counted, of which all is kept.
    ("gear", 4): [(4.1984, 4.1984), (3.755, 3.755), (3.642, 3.642)],
    ("gear_l", 4): [(3.584, 3.584), (3.120, 3.120), (3.002, 3.002)],
    ("zipcache", 4): [(3.264, 3.263), (3.216, 3.239), (3.202, 3.232)],
    ("quarot", 16): always(4.25),
    ("quarot", 8): always(3.25),
    ("kvarn", (16, 4)): [(7.072, 5.536), (4.840, 2.920), (4.421, 2.429)],
    ("kitty", 4): [(3.855, 4.450), (2.554, 2.800), (2.500, 2.319)],
    ("polarquant", 16): [(5.472, 5.472), (4.344, 4.344), (4.250, 4.250)],
    ("polarquant", (16, "full")): [(5.472, 16), (4.344, 16), (4.250, 16)],
    ("mlx_affine", 16): always(4.5),
    ("vllm_int4_per_token_head", 16): always(4.25),
    ("vllm_turboquant_4bit_nc", 16): always(4.125, 4.25),
    ("vllm_turboquant_k3v4_nc", 16): always(3.125, 4.25),
    ("vllm_turboquant_3bit_nc", 16): always(3.125, 3.25),
    ("vllm_turboquant_k8v4", 16): always(8, 4.25),
    ("fp8", 16): always(8),
    ("fp8_per_token_head", 16): always(8.25),
    ("nvfp4", 16): always(4.5),
    ("mxfp4", 16): always(4.25),
    ("sglang_fp4", 16): always(4.5),
    ("q8_0", 16): always(8.5),
    ("q5_1", 16): always(6),
    ("q5_0", 16): always(5.5),
    ("q4_1", 16): always(5),
    ("q4_0", 16): always(4.5),
    ("iq4_nl", 16): always(4.5),
    ("aquakv", 4): [(3.470, 3.470), (2.127, 2.127), (2.072, 2.072)],
    # Methods of which no figures are published are here by their formula.
    ("hadamard", 16): always(4.25),
    ("saw_int4", 16): always(4.25),
    ("atom", 16): always(4.25),
    ("wkvquant_lite", 16): always(4.25),
    ("cq", 4): always(2),
    ("intactkv", 16): [(4.26175,) * 2, (4.25294,) * 2, (4.25037,) * 2],
    ("qserve", 16): [(4.266, 4.25), (4.254, 4.25), (4.2505, 4.25)],
    ("mikv", 4): always(5.25),
    ("qaq", 16): always(
        4.6325
    ),  # 4 + 32/128 of scale and mean + 8/128 of a level count + 32 * 10/1024 of outliers
    ("ott", 4): [(4.8, 4.664), (3.6, 3.416), (3.5, 3.052)],
    ("nsnquant", 4): [(3.04, 3.04), (2.608, 2.608), (2.5, 2.5)],
    ("turboquant_channel_split", 4): always(2.5),
    ("turboquant_prod", 16): always(5.25, 4.125),
    ("fp8_e5m2", 16): always(8),
    ("vllm_int8_per_token_head", 16): always(8.25),
    ("ggml_sym", 16): always(4.5),
    ("ggml_asym", 16): always(5),
    ("q8_0_rotated", 16): always(8.5),
    ("q5_1_rotated", 16): always(6),
    ("q5_0_rotated", 16): always(5.5),
    ("q4_1_rotated", 16): always(5),
    ("q4_0_rotated", 16): always(4.5),
    ("iq4_nl_rotated", 16): always(4.5),
}


def asked(name, levels):
    """The command's options."""
    keys, values = levels if isinstance(levels, tuple) else (levels, levels)
    both = [] if keys == values else [f"grid.value_levels={values}"]
    return [f"quantizer={name}", f"grid.levels=[{keys}]", *both, "head_dim=128", "kv_heads=8"]


def test_every_method_is_priced():
    assert {name for name, _ in BITS} == set(names_of("quantizer"))


@pytest.mark.quick_cases(15)
@pytest.mark.parametrize("case", BITS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_bits_of_a_cache_at_three_lengths(case):
    config = compose_config("storage", asked(*case))
    close = partial(pytest.approx, abs=0.002)
    for tokens, (keys, values) in zip(LENGTHS, BITS[case], strict=True):
        config.tokens = tokens
        (row,) = storage_rows(config)
        found = [row[name] for name in ("key_cache_bits", "value_cache_bits", "cache_bits")]
        assert found == [close(keys), close(values), close((keys + values) / 2)], tokens


def test_the_command_says_the_same(capsys):
    for case in (("kivi", 4), ("aquakv", 4), ("vllm_turboquant_3bit_nc", 16)):
        assert main(["storage", *asked(*case), "tokens=4000", "--json"]) == 0
        row = json.loads(capsys.readouterr().out)
        assert (row["key_cache_bits"], row["value_cache_bits"]) == pytest.approx(BITS[case][1], abs=0.002)
        assert row["cache_bits"] == pytest.approx(sum(BITS[case][1]) / 2, abs=0.002)
        assert row["tokens"] == 4000 and row["setting"].startswith(case[0])
        assert case[0] not in FIXED or row["setting"] == case[0]
