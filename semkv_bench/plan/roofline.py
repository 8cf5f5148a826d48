"""How long a sweep would take on an accelerator that is not at hand: a roofline by stage, and no measurement.

A stage is a sum over what its forward passes do one after the other, and each of these takes the longer of two times
(Williams, Waterman and Patterson, 2009): its arithmetic at the rate of products, and its bytes at the rate of the
memory. Three kinds are counted: products with weights; attention over what is stored; and all that goes over
activations value by value (norms, rotations, gates, sums), which transformers runs operation by operation. Starting
operations from Python is counted where it was measured. What the engine does between passes, and tokenizing, are not in
it.
"""

from dataclasses import dataclass

from semkv_bench.checks import choice
from semkv_bench.engine.batching import Batches, row_bytes
from semkv_bench.plan.accelerators import ACCELERATORS, Accelerator, this_cpu
from semkv_bench.plan.memory import Weights, split
from semkv_bench.plan.plan import Plan
from semkv_bench.tasks import Example

__all__ = ["Forward", "Roofline", "Stages", "estimate_on"]

# Values of a token that operations of a layer read and write besides products, in units of the hidden size and of the
# width between: two norms (7 each), two sums (3 each), rotation of queries and keys (10), attention's output (2); and
# the gate (2), its product (3).
_PER_HIDDEN, _PER_INTERMEDIATE = 32, 5
_LOGIT_PASSES = 8  # of logits in float32: converted, normalised, compared


@dataclass(frozen=True)
class Stages:
    """Seconds of a sweep by stage; ``decoding`` if every answer ends at once, and if each runs to its limit."""

    prefill: float
    coding: float
    forced: float
    decoding: tuple[float, float]


@dataclass(frozen=True)
class Roofline:
    """The estimate for one accelerator: stages of the plan's share of the examples, rows in one batch, does it fit?

    store: how rows hold what is coded, ``rows`` or ``packed``; see ``EngineOptions``.
    """

    accelerator: Accelerator
    stages: Stages
    batch_rows: int
    store: str
    fits: bool

    @property
    def seconds(self) -> tuple[float, float]:
        """Least and most, all stages together."""
        fixed = self.stages.prefill + self.stages.coding + self.stages.forced
        return fixed + self.stages.decoding[0], fixed + self.stages.decoding[1]


@dataclass(frozen=True)
class Forward:
    """Seconds of forward passes of a model of ``layers`` layers on an accelerator."""

    at: Accelerator
    weights: Weights
    layers: int

    def seconds(
        self, rows: int, new: float, before: float = 0, read: float = 0, logits: float = 0, calls: int = 1
    ) -> float:
        """Of ``new`` tokens in each of ``rows`` rows that hold ``before`` tokens, in ``calls`` batches.

        read: bytes of the rows' caches; logits: tokens whose logits are asked for, of all rows.
        """
        at, size, tokens = self.at, self.weights.itemsize, rows * new
        hidden, vocabulary = self.weights.hidden, self.weights.vocabulary
        head = hidden * vocabulary
        body = self.weights.products - head
        held = calls * size * (body + head * (logits > 0))
        products = at.product(2 * (body * tokens + head * logits), held, tokens / calls, size)
        # A pair of tokens meets twice, in keys and in values; new ones meet those before and half of each other.
        pairs = tokens * (before + new / 2)
        attention = max(4 * hidden * self.layers * pairs / at.rate(size), at.attended(read))
        each = _PER_HIDDEN * hidden + _PER_INTERMEDIATE * self.weights.intermediate
        passed = at.passed(tokens * self.layers * each * size + logits * vocabulary * 4 * _LOGIT_PASSES)
        return products + attention + passed + calls * self.layers * at.starting


def estimate_on(plan: Plan, weights: Weights, name: str) -> Roofline:
    """The plan on the accelerator ``name``, in either case, or on ``cpu``, which is measured.

    Raises UsageError for another name.
    """
    known = [*ACCELERATORS, "cpu"]
    name = next((other for other in known if other.lower() == name.lower()), name)
    choice("on", name, known)
    held, shape = weights.parameters * weights.itemsize, plan.shape
    if name == "cpu":
        accelerator = this_cpu(weights, shape.kv_heads, shape.head_dim, len(plan.settings))
    else:
        accelerator = ACCELERATORS[name]
    found = split(plan, weights, int(min(accelerator.memory, 2**60)))
    longest = max(len(example.input_ids) for example in plan.examples)
    parts = [_stages(plan, weights, accelerator, example, found, longest) for example in plan.share]
    return Roofline(
        accelerator,
        Stages(
            sum(part.prefill for part in parts),
            sum(part.coding for part in parts),
            sum(part.forced for part in parts),
            (sum(part.decoding[0] for part in parts), sum(part.decoding[1] for part in parts)),
        ),
        max(map(len, found.groups)),
        found.store,
        held + row_bytes(shape, longest, weights.itemsize) + found.row <= accelerator.memory,
    )


def _stages(
    plan: Plan, weights: Weights, at: Accelerator, example: Example, found: Batches, longest: int
) -> Stages:
    """Of one example; ``found``: of the plan's longest prompt, of ``longest`` tokens."""
    settings, calls = len(plan.settings), len(found.groups)
    forward, prompt = Forward(at, weights, plan.shape.layers), len(example.input_ids)
    # Prompts that are read together share the reading of the weights.
    together = min(plan.engine.prompts, len(plan.share))
    prefill = forward.seconds(together, prompt) / together
    # Every row but that of full is read once and written once; as codes, less is written.
    cache = plan.shape.values(prompt) * weights.itemsize
    coding = (settings - 1) * 2 * cache / (at.bandwidth * at.of_bandwidth)
    # Rows of codes are written out and read by every step, one layer at a time.
    read = found.read * prompt / longest
    asked = [
        len(each.target_ids[: plan.engine.teacher_tokens]) for each in map(example.at, range(example.turns))
    ]
    fed = [tokens + len(later) for tokens, later in zip(asked, _later(example), strict=True)]
    forced = sum(
        forward.seconds(settings, new, prompt, read, settings * (answer + 1), calls)
        for new, answer in zip(fed, asked, strict=True)
    )
    step = forward.seconds(settings, 1, prompt, read, settings, calls)
    limits = sum(example.at(turn).max_new_tokens for turn in range(example.turns))
    return Stages(prefill, coding, forced, (example.turns * step, limits * step))


def _later(example: Example) -> list[tuple[int, ...]]:
    """What is fed to every row before an answer, turn by turn: of the first prompt its last token."""
    return [tuple(example.input_ids[-1:]), *(tuple(turn.input_ids) for turn in example.follow_ups)]
