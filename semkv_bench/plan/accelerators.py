"""What an accelerator can do: the makers' peaks, or what this machine's processor is measured to do."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from semkv_bench.engine.attention import row_attention
from semkv_bench.engine.rows import RowCache
from semkv_bench.models.load import LoadedModel
from semkv_bench.plan.memory import Weights

__all__ = ["ACCELERATORS", "Accelerator", "this_cpu"]

# What dense products and reads reach of the peaks in practice; assumptions, as the peaks are the makers' figures.
_OF_PEAK, _OF_BANDWIDTH = 0.5, 0.7
_WIDE = 256  # rows of a product from which it runs at its peak
_BEYOND_CACHES = 2**27  # bytes
_PASSING_BY = 2**24  # bytes, about a layer of a small model
_STAYS = 2**20  # bytes that stay in a core's cache
_MEASURED = 0.15  # seconds, of each kind of work


@dataclass(frozen=True)
class Accelerator:
    """Peak of dense products in 16 bits and in float32, operations a second; bandwidth, bytes a second; memory, bytes.

    of_peak, of_bandwidth: shares of these that are counted on; 1 where they were measured. Measured, or else as the
    others say: thin: operations a second of a product of ``thin_rows`` rows with weights that come from memory;
    passing: bytes a second of operations that go over activations value by value; attending: bytes a second of keys and
    values that attention of single queries reads; starting: seconds to start the operations of one layer from Python.
    """

    name: str
    peak: float
    float32_peak: float
    bandwidth: float
    memory: float
    of_peak: float = _OF_PEAK
    of_bandwidth: float = _OF_BANDWIDTH
    thin: float | None = None
    thin_rows: int = 0
    passing: float | None = None
    attending: float | None = None
    starting: float = 0.0

    def product(self, operations: float, nbytes: float, rows: float, itemsize: int) -> float:
        """Seconds of dense products of ``rows`` rows, whose weights are ``nbytes``."""
        rate = self.rate(itemsize)
        if self.thin is not None and rows < _WIDE:
            # Between a few rows and many the rate grows with the rows.
            share = max(0.0, min(1.0, (rows - self.thin_rows) / (_WIDE - self.thin_rows)))
            rate = self.thin + share * (rate - self.thin)
        return max(operations / rate, nbytes / (self.bandwidth * self.of_bandwidth))

    def rate(self, itemsize: int) -> float:
        """Operations a second that dense products reach."""
        return (self.float32_peak if itemsize >= 4 else self.peak) * self.of_peak

    def passed(self, nbytes: float) -> float:
        """Seconds of going over activations, ``nbytes`` read and written."""
        return nbytes / (self.passing or self.bandwidth * self.of_bandwidth)

    def attended(self, nbytes: float) -> float:
        """Seconds of reading ``nbytes`` of keys and values."""
        return nbytes / (self.attending or self.bandwidth * self.of_bandwidth)


# Makers' data sheets: dense bfloat16, and float32 without a narrower format (torch's default), one device.
ACCELERATORS = {
    "A100": Accelerator("A100", 312e12, 19.5e12, 2.04e12, 80e9),
    "H100": Accelerator("H100", 989e12, 67e12, 3.35e12, 80e9),
    "H200": Accelerator("H200", 989e12, 67e12, 4.8e12, 141e9),
    "MI300X": Accelerator("MI300X", 1307e12, 163e12, 5.3e12, 192e9),
}


@torch.inference_mode()
def this_cpu(weights: Weights, heads: int, head_dim: int, rows: int) -> Accelerator:
    """This machine's processor, measured in float32 for about a second at the sizes of a model.

    heads, head_dim: of its keys; rows: in one batch.
    """
    rows = min(rows, _WIDE // 2)
    wide, thin = (_products(weights, count) for count in (_WIDE, rows))
    held = torch.rand(_BEYOND_CACHES // 4)
    few = torch.rand(_STAYS // 4)
    added = torch.empty_like(few)
    read = _seconds(lambda: held.sum())
    passing = 3 * few.nbytes / _seconds(lambda: torch.add(few, few, out=added))
    return Accelerator(
        "this CPU",
        wide,
        wide,
        held.nbytes / read,
        float("inf"),
        of_peak=1.0,
        of_bandwidth=1.0,
        thin=min(thin, wide),
        thin_rows=rows,
        passing=passing,
        attending=_attention(heads, head_dim, rows),
        starting=_starting(),
    )


def _products(weights: Weights, rows: int) -> float:
    """Operations a second of products of so many rows with matrices that no cache holds."""
    matrix = weights.hidden * weights.intermediate
    count = max(1, _BEYOND_CACHES // (4 * matrix))
    matrices = [torch.rand(weights.intermediate, weights.hidden) for _ in range(count)]
    given = torch.rand(rows, weights.hidden)
    return 2 * rows * matrix * count / _seconds(lambda: [nn.functional.linear(given, m) for m in matrices])


def _attention(heads: int, head_dim: int, rows: int) -> float:
    """Bytes a second that attention of one query a row reads of keys and values that no cache holds."""
    tokens = max(16, _BEYOND_CACHES // (8 * rows * heads * head_dim))
    keys, values = torch.rand(2, rows, heads, tokens, head_dim)
    query = torch.rand(rows, heads, 1, head_dim)
    asked = _seconds(lambda: nn.functional.scaled_dot_product_attention(query, keys, values))
    return (keys.nbytes + values.nbytes) / asked


def _starting() -> float:
    """Seconds that a step of the engine takes for every layer of a Llama so small that nothing else counts.

    Before each layer, memory is read as weights would be, so that the caches hold no more of Python than they would.
    """
    # Here, and not at the top: a plan for other accelerators need not wait for it.
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    read, token = torch.rand(_PASSING_BY // 4), torch.zeros(1, 1, dtype=torch.int64)
    layers, seconds = (1, 9), []
    for count in layers:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=count, **size)).eval()
        loaded, rows = LoadedModel(model, None, "small", None), RowCache(model.config)
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda *_: read.sum() and None)
        rows.reserve(1, 2**16)
        with row_attention(loaded, rows):
            step = partial(loaded.decoder, input_ids=token, use_cache=True, **{loaded.cache_keyword: rows})
            seconds.append(_seconds(step))
    each = (seconds[1] - seconds[0]) / (layers[1] - layers[0])
    return max(0.0, each - _seconds(read.sum))


def _seconds(run: Callable[[], object]) -> float:
    run()
    began, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - began) < _MEASURED or not count:
        run()
        count += 1
    return taken / count
