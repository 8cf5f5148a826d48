"""Run a computation over slices of tokens: on a CPU in cache-sized pieces, one thread a piece.

Torch parallelises inside each operation. For a dozen passes over a few hundred kilobytes that costs
a thread barrier per pass, which is slow, and on a busy machine slower than no threads by far.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from semkv_bench.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["for_token_chunks"]

_VALUES = 1 << 17
_VALUES_ON_GPU = 1 << 23  # bounds the memory of intermediate results, which are several times as large


def for_token_chunks(work: Callable[[slice], None], x: Tensor) -> None:
    """Call ``work(slice)`` for slices that together cover the tokens of x [heads, tokens, head_dim].

    On a CPU the slices run side by side on as many threads as torch uses, each within a
    single-threaded torch.
    """
    heads, tokens, head_dim = x.shape
    on_cpu = x.device.type == "cpu"
    step = max(1, (_VALUES if on_cpu else _VALUES_ON_GPU) // max(1, heads * head_dim))
    chunks = [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]
    threads = torch.get_num_threads()
    if threads == 1 or not on_cpu:
        _in_turn(work, chunks)
        return
    torch.set_num_threads(1)
    try:
        if len(chunks) < 2:
            _in_turn(work, chunks)
        else:
            _on_threads(work, chunks, min(threads, len(chunks)))
    finally:
        torch.set_num_threads(threads)


def _in_turn(work: Callable[[slice], None], chunks: list[slice]) -> None:
    for chunk in chunks:
        work(chunk)


def _on_threads(work: Callable[[slice], None], chunks: list[slice], threads: int) -> None:
    # Grad and inference mode belong to a thread; without them writing to the caller's tensors fails.
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def in_callers_mode(chunk: slice) -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad and not inference):
            work(chunk)

    with ThreadPoolExecutor(threads) as pool:
        for finished in [pool.submit(in_callers_mode, chunk) for chunk in chunks]:
            finished.result()
