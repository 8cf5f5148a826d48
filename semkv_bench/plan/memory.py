"""What a sweep needs of a device's memory, and what would make it fit."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from semkv_bench.engine.batching import Batches, Sizes, batches, row_bytes, unpacked_model, unpacked_setting
from semkv_bench.engine.decode import Decoding, row_room
from semkv_bench.engine.options import PACKED, ROWS
from semkv_bench.engine.outcome import request_of
from semkv_bench.engine.row_layer import allocated
from semkv_bench.models.architecture import read_whole
from semkv_bench.models.device import memory_total
from semkv_bench.models.device_map import spread
from semkv_bench.plan.plan import Plan
from semkv_bench.tasks import Example

__all__ = ["Memory", "decoding_of", "estimate_memory", "split", "target_device", "weights_of"]

_GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes that the plan's longest example needs at its peak, and bytes that there are.

    weights: of the model; prompt: its cache in full precision, in which what the next prompt about the same document
    begins with stays as well, and those of prompts that are prefilled together; rows: the cache rows of one batch with
    the logits of the forced answer; activations: of the prefill, roughly. store: how rows hold what is coded, ``rows``
    or ``packed``. batch_rows: settings in the largest of ``batches``, of all ``settings``. advice: what would make it
    fit, None where it does.
    """

    device: str
    available: int
    weights: int
    prompt: int
    rows: int
    activations: int
    store: str
    batch_rows: int
    batches: int
    settings: int
    longest: int
    advice: str | None

    @property
    def needed(self) -> int:
        """All of it together."""
        return self.weights + self.prompt + self.rows + self.activations

    @property
    def fits(self) -> bool:
        """Is there enough?"""
        return self.needed <= self.available


@dataclass(frozen=True)
class Weights:
    """Parameters of a model and the bytes of one.

    tied: are the embeddings the output's weights too? packs: can rows of its cache hold codes?
    """

    parameters: int
    itemsize: int
    hidden: int
    intermediate: int
    vocabulary: int
    packs: bool = True
    tied: bool = True

    @property
    def products(self) -> int:
        """Weights that every token is multiplied with: all but embeddings that are looked up alone."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden)


def weights_of(plan: Plan) -> Weights:
    """Size of the plan's model, counted without loading a weight."""
    skeleton = plan.source.skeleton()
    text = skeleton.config.get_text_config(decoder=True)
    asked = plan.source.dtype
    stored = getattr(skeleton.config, "dtype", None)
    stored = getattr(torch, stored, None) if isinstance(stored, str) else stored
    dtype = getattr(torch, asked) if asked != "auto" else stored or torch.float32
    return Weights(
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        itemsize=dtype.itemsize,
        hidden=text.hidden_size,
        intermediate=_widest(getattr(text, "intermediate_size", None)) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        packs=unpacked_model(skeleton.config) is None,
        tied=bool(text.tie_word_embeddings),
    )


def _widest(size: int | list[int] | None) -> int | None:
    """The largest of the sizes where layers have each their own."""
    return max(size) if isinstance(size, list | tuple) else size


def decoding_of(plan: Plan) -> Decoding:
    """How the plan's answers are decoded, as far as it can be told without the model."""
    return Decoding(plan.protocol.rule, plan.protocol.own_history, plan.engine.teacher_tokens)


def split(plan: Plan, weights: Weights, available: int) -> Batches:
    """How the settings of the plan's longest example are split and stored on a device of ``available`` bytes."""
    how = decoding_of(plan)
    turns = [request_of(example).turns for example in plan.examples]
    longest = max(turns, key=lambda asked: len(asked[0].input_ids) + row_room(asked, how))
    options = replace(plan.engine, store=ROWS) if plan.protocol.one_pass else plan.engine
    held = weights.parameters * weights.itemsize
    sizes = Sizes(plan.shape, weights.vocabulary, weights.itemsize, held, available, weights.packs)
    return batches(options, plan.settings, sizes, longest, how)


def estimate_memory(plan: Plan, weights: Weights) -> Memory:
    """Peak memory of the plan's longest example on the device that the model would be loaded to."""
    name, available = _memory_of(plan.source.device_map)
    prompt, answer = max(((len(e.input_ids), _answers(e)) for e in plan.examples), key=sum)
    shape, size, how = plan.shape, weights.itemsize, decoding_of(plan)
    found = split(plan, weights, available)
    per_token = row_bytes(shape, 2, size) - row_bytes(shape, 1, size)
    active = partial(_activations, plan, weights)
    together = min(plan.engine.prompts, len(plan.examples))
    memory = Memory(
        device=name,
        available=available,
        weights=weights.parameters * size,
        prompt=row_bytes(shape, prompt, size) * together,
        rows=found.nbytes,
        activations=active(prompt) * together,
        store=found.store,
        batch_rows=max(map(len, found.groups)),
        batches=len(found.groups),
        settings=len(plan.settings),
        longest=prompt + answer,
        advice=None,
    )
    if memory.fits:
        return memory
    room = _most_room(plan, how)
    logits = found.row - row_bytes(shape, allocated(prompt + room), size)

    def alone(tokens: int) -> int:
        """Bytes that a prompt of ``tokens`` tokens needs with a single row, the weights left out."""
        row = row_bytes(shape, allocated(tokens + room), size) + logits
        return per_token * tokens + active(tokens) + row

    advice = _advice(memory, weights, found.row, alone)
    packs = weights.packs and not plan.protocol.one_pass and not any(map(unpacked_setting, plan.settings))
    packed = split(replace(plan, engine=replace(plan.engine, store=PACKED)), weights, available)
    if packs and packed.store != found.store and replace(memory, rows=packed.row).fits:
        advice = f"engine.store=packed would fit, or {advice}"
    return replace(memory, advice=advice)


def _activations(plan: Plan, weights: Weights, tokens: int) -> int:
    """Bytes of one forward call over part of a prompt of ``tokens``, roughly: layer by layer, and what masks it."""
    source, size = plan.source, weights.itemsize
    device = target_device(source.device_map).type
    chunk = plan.engine.chunk_of(tokens, device, lambda: read_whole(source.config(), source.name))
    # A later call has a mask of what it sees of all before it: truth values, and numbers that attention adds.
    mask = chunk * tokens * (1 + size) if chunk < tokens else 0
    return size * (3 * weights.intermediate + 6 * weights.hidden) * chunk + mask


def _most_room(plan: Plan, how: Decoding) -> int:
    """Tokens that a row of the plan may have to hold besides its prompt."""
    return max(row_room(request_of(example).turns, how) for example in plan.examples) - 1


def _advice(memory: Memory, weights: Weights, per_row: int, alone: Callable[[int], int]) -> str:
    left = memory.available - memory.weights
    if left <= 0:
        halved = "model.dtype=bfloat16 halves that; " if weights.itemsize == 4 else ""
        return (
            f"the weights alone take {memory.weights / _GIB:.1f} GiB: {halved}"
            f"a device of {memory.needed / _GIB:.0f} GiB would do, or model.device_map=auto over several"
        )
    rows = int((left - memory.prompt - memory.activations) // per_row)
    if rows >= 1:
        return f"engine.max_rows={rows} would fit: the settings are then decoded in batches of {rows}"
    tokens = bisect_right(range(memory.longest), left, key=alone) - 1 if memory.store == ROWS else 0
    if tokens > 1:
        return f"max_prompt_tokens={tokens} with engine.max_rows=1 would fit"
    return f"a device of {memory.needed / _GIB:.0f} GiB would do, or model.device_map=auto over several"


def _answers(example: Example) -> int:
    """Tokens that follow the first prompt at most: all answers, and the questions of later turns."""
    later = sum(len(turn.input_ids) + turn.max_new_tokens for turn in example.follow_ups)
    return example.max_new_tokens + later


def target_device(device_map: Any) -> torch.device:
    """Device that the model's first layer would be loaded to; the CPU where the one asked for is not here."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_map is None or spread(device_map):
        return torch.device("cuda" if gpus else "cpu")
    device = torch.device("cuda", device_map) if isinstance(device_map, int) else torch.device(device_map)
    here = device.type != "cuda" or (device.index or 0) < gpus
    return device if here else torch.device("cpu")


def _memory_of(device_map: Any) -> tuple[str, int]:
    """Name and memory of where the model would go; of several devices, the sum."""
    if spread(device_map):
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        places = [torch.device("cuda", i) for i in range(gpus)] + [torch.device("cpu")]
        return f"{gpus} GPUs and the CPU", sum(memory_total(place) for place in places)
    device = target_device(device_map)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name, memory_total(device)
