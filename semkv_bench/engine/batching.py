"""How settings are decoded together: what a row takes, how it is stored, what memory holds, and what if it does not."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from semkv_bench.engine.decode import Decoding, row_room
from semkv_bench.engine.options import PACKED, ROWS, EngineOptions
from semkv_bench.engine.outcome import Turn
from semkv_bench.engine.row_layer import allocated
from semkv_bench.errors import SemkvError
from semkv_bench.grid.cost import SIDES
from semkv_bench.grid.levels import MAX_LEVELS
from semkv_bench.models.layers import cache_layers
from semkv_bench.models.shape import ModelShape
from semkv_bench.protocols.rule import CodingRule, settled, window
from semkv_bench.settings.setting import Setting

__all__ = [
    "Batches",
    "NoRoomError",
    "Sizes",
    "alike",
    "batches",
    "code_bytes",
    "in_batches",
    "is_out_of_memory",
    "row_bytes",
    "row_cost",
    "unpacked_model",
    "unpacked_setting",
]

T = TypeVar("T")
_PADDED = 0.2


class NoRoomError(SemkvError):
    """Memory does not hold a single cache row."""


@dataclass(frozen=True)
class Sizes:
    """What the memory of rows hangs on besides their lengths, in bytes but for ``vocabulary``.

    itemsize: of a value; weights: of the model; memory: of the device. packs: can the model's layers hold codes?
    """

    shape: ModelShape
    vocabulary: int
    itemsize: int
    weights: int
    memory: int
    packs: bool = True


@dataclass(frozen=True)
class Batches:
    """How the settings of a request are split: their numbers, batch by batch.

    store: ``rows`` or ``packed``; see ``EngineOptions``. nbytes: of the largest batch; row: of the largest row; read:
    bytes that one step over all batches reads of the prompt in all rows, and writes where codes are written out.
    """

    store: str
    groups: tuple[tuple[int, ...], ...]
    nbytes: int
    row: int
    read: int


def row_bytes(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Bytes of one cache row at ``itemsize`` bytes a value: ``tokens`` tokens in every layer that attends, and states.

    Rows hold the tokens behind a window too.
    """
    return (shape.values(tokens, windows=False) + shape.state_values) * itemsize


def row_cost(shape: ModelShape, turns: Sequence[Turn], how: Decoding, vocabulary: int, itemsize: int) -> int:
    """Bytes of a batch for each row: its cache as it is allocated, the forced answer's logits and their logarithms."""
    capacity = allocated(len(turns[0].input_ids) - 1 + row_room(turns, how))
    return row_bytes(shape, capacity, itemsize) + _logits(how, vocabulary)


def _logits(how: Decoding, vocabulary: int) -> int:
    return 2 * 4 * max(how.teacher_tokens, how.rule.block * how.rule.codes_tail) * vocabulary


def code_bytes(setting: Setting, shape: ModelShape, rule: CodingRule, prompt: int) -> int:
    """Bytes of what a row of ``setting`` holds coded of a prompt of so many tokens."""
    bits = 0.0
    for number, side in enumerate(SIDES):
        if getattr(setting, side) is None:
            continue
        tokens = sum(window(rule, setting, number, prompt).prompt_pieces())
        for index, layer in enumerate(shape.cache):
            price = setting.price(index, side, shape.layers) if layer is not None and layer.coded else None
            if price is not None and tokens:
                of = getattr(layer, side)
                bits += price.coded_bits(tokens, of) + price.sequence_bits(of)
    return math.ceil(bits / 8)


def _packed_costs(
    settings: Sequence[Setting], sizes: Sizes, turns: Sequence[Turn], how: Decoding
) -> tuple[list[int], int]:
    """Bytes of a batch for each row whose prompt is held as codes, and what a step reads and writes for all rows."""
    prompt = len(turns[0].input_ids) - 1
    length, shape = prompt + row_room(turns, how), sizes.shape
    opened = length - settled(how.rule, settings, prompt)
    widest = max(layer.keys.values + layer.values.values for layer in shape.cache if layer is not None)
    written = widest * allocated(length) * sizes.itemsize
    after = row_bytes(shape, allocated(opened), sizes.itemsize)
    codes = [code_bytes(setting, shape, how.rule, prompt) for setting in settings]
    each = after + written + _logits(how, sizes.vocabulary)
    # Codes are read and values written; these are read.
    whole = row_bytes(shape, prompt, sizes.itemsize)
    return [each + held for held in codes], sum(codes) + 2 * whole * len(settings)


def batches(
    options: EngineOptions,
    settings: Sequence[Setting],
    sizes: Sizes,
    turns: Sequence[Turn],
    how: Decoding,
) -> Batches:
    """The fewest batches that the rows' share of the memory holds, or what the weights and prompts leave of it.

    A row that does not fit by itself is a batch all the same: the memory has the last word.
    """
    prompt = len(turns[0].input_ids) - 1
    plain = row_bytes(sizes.shape, prompt, sizes.itemsize)
    budget = min(
        options.memory_fraction * sizes.memory, sizes.memory - sizes.weights - options.prompts * plain
    )
    # Answers of a conversation differ in length, and with them the rows of the next turn.
    most = options.max_rows or len(settings)
    most = most if how.uneven or len(turns) == 1 else 1
    row = row_cost(sizes.shape, turns, how, sizes.vocabulary, sizes.itemsize)
    costs, read, store = [row] * len(settings), plain * len(settings), ROWS
    packs = sizes.packs and not any(map(unpacked_setting, settings))
    if options.store == PACKED or (options.store != ROWS and row > budget and packs):
        packed, read_packed = _packed_costs(settings, sizes, turns, how)
        # Of a short prompt, what is written out takes more than codes save.
        if options.store == PACKED or max(packed) < row:
            costs, read, store = packed, read_packed, PACKED
    groups = _fewest(costs, budget, most)
    largest = max(sum(costs[row] for row in group) for group in groups)
    return Batches(store, groups, largest, max(costs), read)


def _fewest(costs: Sequence[int], budget: float, most: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of rows in groups of at most ``most`` within the budget, the first row in the first group.

    By first-fit decreasing: the fewest groups where all rows cost the same, and close to the fewest where they do not.
    """
    groups: list[list[int]] = []
    held: list[int] = []
    for row in sorted(range(len(costs)), key=lambda row: (row > 0, -costs[row])):
        fits = (
            place
            for place, group in enumerate(groups)
            if len(group) < most and held[place] + costs[row] <= budget
        )
        place = next(fits, len(groups))
        if place == len(groups):
            groups.append([])
            held.append(0)
        groups[place].append(row)
        held[place] += costs[row]
    return tuple(tuple(sorted(group)) for group in groups)


def alike(lengths: Sequence[int], padded: bool) -> list[list[int]]:
    """Numbers of prompts that are read together: of one length, or ``padded`` by a fifth of it at most.

    >>> alike([100, 60, 90, 100], padded=True), alike([100, 60, 90, 100], padded=False)
    ([[1], [2, 0, 3]], [[1], [2], [0, 3]])
    """
    buckets: list[list[int]] = []
    least = 1 - _PADDED * padded
    # From the longest, which each must come close to.
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], -number)):
        if not buckets or lengths[number] < least * lengths[buckets[-1][0]]:
            buckets.append([])
        buckets[-1].append(number)
    return [bucket[::-1] for bucket in reversed(buckets)]


def unpacked_setting(setting: Setting) -> str | None:
    """Why rows cannot hold ``setting`` as codes, in a few words; None: they can."""
    if setting.prune is not None and setting.prune.renumbered:
        return "it numbers the tokens that stay anew, which changes keys that are not coded"
    for coded in (setting.keys, setting.values):
        if coded is None:
            continue
        if reason := coded.quantizer.unpackable():
            return reason
        counts = [count for count, _ in coded.allocation.parts(2)]
        counts += (coded.quantizer.layers.levels or {}).values()
        codes = max(map(coded.quantizer.stored_codes, counts))
        if codes > MAX_LEVELS:
            return f"a value takes {codes} codes, and at most {MAX_LEVELS} are packed"
    return None


def unpacked_model(config: Any) -> str | None:
    """Why rows of a model cannot hold codes, in a few words; None: they can."""
    if any(layer.attends and layer.states for layer in cache_layers(config)):
        return "its attention layers keep states beside their tokens"
    if getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        return "layers attend to another layer's keys and values, which are written out one layer at a time"
    return None


def in_batches(
    settings: Sequence[T],
    groups: Iterable[Sequence[int]],
    run: Callable[[Sequence[T]], list],
    make_room: Callable[[], None],
) -> list:
    """``run`` on the ``groups`` of settings, in the order of ``settings``; where memory gives out, on halves.

    make_room: gives back what the failed batch held.

    Raises:
        NoRoomError: memory does not hold a single row.
    """
    done: dict[int, Any] = {}
    waiting = [tuple(group) for group in groups]
    while waiting:
        group = waiting[0]
        try:
            done |= zip(group, run([settings[place] for place in group]), strict=True)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(group) == 1:
                raise NoRoomError(
                    "out of memory with a single cache row: shorten the prompts (max_prompt_tokens=...)"
                ) from error
            half = len(group) // 2
        else:
            waiting = waiting[1:]
            continue
        # Outside of the handler, whose traceback holds the batch's tensors.
        waiting = [each[at : at + half] for each in waiting for at in range(0, len(each), half)]
        make_room()
    return [done[place] for place in range(len(settings))]


def is_out_of_memory(error: BaseException) -> bool:
    """Did memory give out?"""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
