"""How long a sweep would take on an accelerator that is not at hand: a roofline by stage, and no measurement.

Each stage takes the longer of two times (Williams, Waterman and Patterson, 2009): its arithmetic at a share of the
device's peak, and its bytes at a share of the memory's bandwidth. Kernel launches, Python and tokenizing are not in it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from semkv_bench.checks import choice
from semkv_bench.engine.batching import row_cost, rows_that_fit
from semkv_bench.engine.decode import Decoding
from semkv_bench.engine.outcome import request_of
from semkv_bench.plan.memory import Weights
from semkv_bench.plan.plan import Plan
from semkv_bench.tasks import Example

__all__ = ["ACCELERATORS", "Accelerator", "Roofline", "Stages", "estimate_on", "this_cpu"]

# What dense products and reads reach of the peaks in practice; assumptions, as the peaks are the makers' figures.
_OF_PEAK, _OF_BANDWIDTH = 0.5, 0.7


@dataclass(frozen=True)
class Accelerator:
    """Peak of dense products in 16 bits and in float32, operations a second; bandwidth, bytes a second; memory, bytes.

    of_peak, of_bandwidth: shares of these that are counted on; 1 where they were measured.
    """

    name: str
    peak: float
    float32_peak: float
    bandwidth: float
    memory: float
    of_peak: float = _OF_PEAK
    of_bandwidth: float = _OF_BANDWIDTH


# Makers' data sheets: dense bfloat16, and float32 without a narrower format (torch's default), one device.
ACCELERATORS = {
    "A100": Accelerator("A100", 312e12, 19.5e12, 2.04e12, 80e9),
    "H100": Accelerator("H100", 989e12, 67e12, 3.35e12, 80e9),
    "H200": Accelerator("H200", 989e12, 67e12, 4.8e12, 141e9),
    "MI300X": Accelerator("MI300X", 1307e12, 163e12, 5.3e12, 192e9),
}


@dataclass(frozen=True)
class Stages:
    """Seconds of a sweep by stage; ``decoding`` if every answer ends at once, and if each runs to its limit."""

    prefill: float
    coding: float
    forced: float
    decoding: tuple[float, float]


@dataclass(frozen=True)
class Roofline:
    """The estimate for one accelerator: stages of the plan's share of the examples, rows in one batch, does it fit?"""

    accelerator: Accelerator
    stages: Stages
    batch_rows: int
    fits: bool

    @property
    def seconds(self) -> tuple[float, float]:
        """Least and most, all stages together."""
        fixed = self.stages.prefill + self.stages.coding + self.stages.forced
        return fixed + self.stages.decoding[0], fixed + self.stages.decoding[1]


def this_cpu() -> Accelerator:
    """This machine's processor, measured for half a second: float32 products and reads of memory."""
    square = torch.rand(768, 768)
    held = torch.rand(2**25)
    product = _seconds(lambda: square @ square)
    read = _seconds(lambda: held.sum())
    peak = 2 * 768**3 / product
    return Accelerator(
        "this CPU", peak, peak, held.numel() * held.element_size() / read, float("inf"), 1.0, 1.0
    )


def estimate_on(plan: Plan, weights: Weights, name: str) -> Roofline:
    """The plan on the accelerator ``name``, or on ``cpu``, which is measured; UsageError for another name."""
    choice("on", name, [*ACCELERATORS, "cpu"])
    accelerator = this_cpu() if name == "cpu" else ACCELERATORS[name]
    size = weights.itemsize
    how = Decoding(plan.protocol.rule, plan.protocol.own_history, plan.engine.teacher_tokens)
    per_row = max(
        row_cost(plan.shape, request_of(example).turns, how, weights.vocabulary, size)
        for example in plan.examples
    )
    held = weights.parameters * size
    finite = int(min(accelerator.memory, 2**60))
    rows = max(1, min(rows_that_fit(plan.engine, per_row, finite, held), len(plan.settings)))
    parts = [_stages(plan, weights, accelerator, example, rows) for example in plan.share]
    return Roofline(
        accelerator,
        Stages(
            sum(part.prefill for part in parts),
            sum(part.coding for part in parts),
            sum(part.forced for part in parts),
            (sum(part.decoding[0] for part in parts), sum(part.decoding[1] for part in parts)),
        ),
        rows,
        held + per_row <= accelerator.memory,
    )


def _stages(plan: Plan, weights: Weights, at: Accelerator, example: Example, batch_rows: int) -> Stages:
    settings, size = len(plan.settings), weights.itemsize
    batches = -(-settings // batch_rows)
    parameters, held = weights.parameters, weights.parameters * size
    turns: Sequence[Example] = [example.at(turn) for turn in range(example.turns)]
    prompt = len(example.input_ids)
    cache = plan.shape.values(prompt) * size

    def longer(operations: float, read: float) -> float:
        peak = at.float32_peak if size >= 4 else at.peak
        return max(operations / (peak * at.of_peak), read / (at.bandwidth * at.of_bandwidth))

    # The head sees the last token alone; a pair of tokens meets once, in keys and in values.
    body = parameters - weights.vocabulary * weights.hidden
    pairs = 2 * plan.shape.layers * weights.hidden * prompt * prompt
    prefill = longer(2 * body * prompt + pairs, held)
    # Every row but that of full is read once and written once.
    coding = longer(0, (settings - 1) * 2 * cache)
    asked = [len(each.target_ids[: plan.engine.teacher_tokens]) for each in turns]
    later = sum(len(each.input_ids) for each in example.follow_ups)
    fed = [tokens for tokens in (*asked, later) if tokens]
    forced = sum(
        longer(2 * parameters * settings * tokens, batches * held + settings * cache) for tokens in fed
    )

    def decoding(steps: int) -> float:
        return steps * longer(2 * parameters * settings, batches * held + settings * cache)

    limits = sum(each.max_new_tokens for each in turns)
    return Stages(prefill, coding, forced, (decoding(example.turns), decoding(limits)))


def _seconds(run, least: float = 0.25) -> float:
    run()
    began, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - began) < least or not count:
        run()
        count += 1
    return taken / count
