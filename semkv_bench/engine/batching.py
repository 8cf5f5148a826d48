"""How many settings are decoded together: what a row takes, what memory holds, and what happens where it does not."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from semkv_bench.engine.decode import Decoding, row_room
from semkv_bench.engine.options import EngineOptions
from semkv_bench.engine.outcome import Turn
from semkv_bench.engine.rows import allocated
from semkv_bench.errors import SemkvError
from semkv_bench.models.shape import ModelShape

__all__ = ["in_batches", "is_out_of_memory", "row_bytes", "row_cost", "rows_that_fit"]

T = TypeVar("T")


def row_bytes(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Bytes of one cache row at ``itemsize`` bytes a value: ``tokens`` tokens in every layer that attends, and states.

    Rows hold the tokens behind a window too.
    """
    return (shape.values(tokens, windows=False) + shape.state_values) * itemsize


def row_cost(shape: ModelShape, turns: Sequence[Turn], how: Decoding, vocabulary: int, itemsize: int) -> int:
    """Bytes of a batch for each row: its cache as it is allocated, the forced answer's logits and their logarithms."""
    capacity = allocated(len(turns[0].input_ids) - 1 + row_room(turns, how))
    at_once = max(how.teacher_tokens, how.rule.block * how.rule.codes_tail)
    return row_bytes(shape, capacity, itemsize) + 2 * 4 * at_once * vocabulary


def rows_that_fit(options: EngineOptions, per_row: int, memory: int, weights: int) -> int:
    """Rows in one batch: what the rows' share of the memory holds, or what the weights leave, at most ``max_rows``."""
    budget = min(options.memory_fraction * memory, memory - weights)
    fit = max(1, int(budget // per_row))
    return min(fit, options.max_rows or fit)


def in_batches(
    settings: Sequence[T],
    fit: int,
    run: Callable[[Sequence[T]], list],
    make_room: Callable[[], None],
) -> list:
    """``run`` on batches of at most ``fit`` settings; where memory gives out, on halves, until this prompt is done.

    make_room: gives back what the failed batch held.

    Raises:
        SemkvError: memory does not hold a single row.
    """
    done: list = []
    while len(done) < len(settings):
        group = settings[len(done) : len(done) + fit]
        try:
            done.extend(run(group))
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(group) == 1:
                raise SemkvError(
                    "out of memory with a single cache row: shorten the prompts (max_prompt_tokens=...)"
                ) from error
            fit = len(group) // 2
        else:
            continue
        # Outside of the handler, whose traceback holds the batch's tensors.
        make_room()
    return done


def is_out_of_memory(error: BaseException) -> bool:
    """Did memory give out?"""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
