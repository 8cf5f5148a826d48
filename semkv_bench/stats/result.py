"""What an analysis found, typed: the object that statistics make, reports show and report.json holds.

The fields of these classes are the fields of report.json (docs/report.schema.json). ``Report.to_json`` and
``Report.from_json`` are the only places where one becomes the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semkv_bench.stats.further import (
    NO_ENDS,
    Deletion,
    Ends,
    Interpolation,
    Methods,
    Perturbed,
    Ranking,
    RunawayDetector,
    TextResult,
    Turn,
    TurnDrift,
)
from semkv_bench.stats.plain import plain, read

__all__ = [
    "SCHEMA",
    "Allocation",
    "Assay",
    "Batching",
    "CacheSize",
    "Cliff",
    "CliffInterval",
    "Confirmation",
    "Extension",
    "Fall",
    "Layers",
    "LengthResult",
    "LengthTrend",
    "Measured",
    "NoiseFloor",
    "OperatingPoint",
    "Parting",
    "Report",
    "Sequential",
    "Served",
    "SettingResult",
    "TaskResult",
]

SCHEMA = 2
_READABLE = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Which tokens a mix or a deletion favours: ``high`` and ``low`` levels and ``fraction``, or the share kept.

    ``metric`` keeps all that ranks the tokens, scope and the values' own metric included; ``group`` is equal
    for allocations that differ in the metric alone.
    """

    group: str
    metric: str
    high: int | None = None
    low: int | None = None
    fraction: float | None = None
    keep: float | None = None


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """A whole cache of so many tokens under the run's protocol, and the full one's bytes at the same length."""

    cache_bits: float
    compression: float | None
    cache_bytes: int
    full_bytes: int


@dataclass(frozen=True, kw_only=True)
class Layers:
    """How many of the model's layers are coded; the others hold a window in 16 bits, or nothing."""

    total: int
    quantized: int


@dataclass(frozen=True, kw_only=True)
class Parting:
    """How answers part from the reference's: the share of them that do by another token, and by an end of one.

    ``place`` is the mean number of equal tokens before that, over the answers that part.
    """

    by_token: float
    by_token_ci: Ends
    by_end: float
    by_end_ci: Ends
    place: float | None
    place_ci: Ends


@dataclass(frozen=True, kw_only=True)
class SettingResult:
    """One setting beside the reference; the comparing fields are null for the reference itself.

    Bits are per value, ``cache_bits`` over all that the cache stored, mean over the records; ``compression`` is by
    these, or by ``effective_bits``, the price of a coded value, where they are not known. ``read_bits`` are what a step
    reads of them; null where it reads all. ``cache_at`` holds whole
    caches by their number of tokens. Differences are setting less reference on the 0 to 1 scale; ``n_needed`` are
    the clusters that would settle it four times in five. ``left_at_look`` is the look of a raced run that showed the
    setting degraded, so that no later example was run under it.
    """

    setting: str
    kind: str
    quantizer: str | None = None
    method: str | None = None
    family: str | None = None
    levels: int | None = None
    options: str | None = None
    code_bits: float | None
    packed_bits: float | None
    effective_bits: float | None
    cache_bits: float | None = None
    read_bits: float | None = None
    cache_at: dict[str, CacheSize] | None = None
    compression: float | None
    n: int
    n_clusters: int
    n_unpaired: int = 0
    n_missing: int = 0
    score: float
    score_ci: Ends
    reference_score: float | None = None
    diff: float | None
    diff_ci: Ends
    equivalence_ci: Ends = NO_ENDS
    bootstrap_ci: Ends = NO_ENDS
    p_equivalence: float | None
    p_equivalence_raw: float | None = None
    p_no_worse: float | None = None
    p_no_worse_raw: float | None = None
    p_degraded: float | None
    p_degraded_raw: float | None = None
    p_difference: float | None = None
    n_worse: int | None = None
    n_better: int | None = None
    p_mcnemar: float | None = None
    detectable: bool | None
    verdict: str
    n_needed: int | None
    runaway_rate: float | None
    runaway_p: float | None
    kl: float | None
    kl_ci: Ends = NO_ENDS
    top1_agreement: float | None
    agreement: float | None = None
    agreement_ci: Ends = NO_ENDS
    parting: Parting | None = None
    allocation: Allocation | None = None
    detectable_drop: float | None = None
    residual: str | None = None
    left_at_look: int | None = None

    @property
    def paid_bits(self) -> float | None:
        """Bits per value of the whole cache, or of a coded value where caches were not recorded."""
        return self.effective_bits if self.cache_bits is None else self.cache_bits


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """One setting on one task."""

    score: float
    diff: float | None
    diff_ci: Ends
    n_clusters: int | None = None


@dataclass(frozen=True, kw_only=True)
class CliffInterval:
    """One outcome of the bootstrap over the grid, and its share of the resamples."""

    lower_bits: float | None
    upper_bits: float | None
    probability: float
    status: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fall:
    """Two neighbouring grid points, and how much of the average score is lost between them."""

    lower_bits: float
    upper_bits: float
    lower_setting: str
    upper_setting: str
    drop: float


@dataclass(frozen=True, kw_only=True)
class Cliff:
    """Where the uniform grid of ``quantizer`` falls off, in code bits: collapses at ``lower``, holds at ``upper``.

    The verdicts decide that; ``steepest`` is where the averages fall most between neighbours, null where none falls.
    """

    quantizer: str | None = None
    status: str
    lower_bits: float | None
    upper_bits: float | None
    lower_setting: str | None
    upper_setting: str | None
    probability: float | None
    intervals: tuple[CliffInterval, ...] = ()
    steepest: Fall | None = None


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The operating point tested on two halves: on one with all settings (``p_adjusted``), on the other alone."""

    setting: str
    clusters_to_choose: int
    clusters_to_test: int
    diff: float
    diff_ci: Ends
    p_adjusted: float | None = None
    p_no_worse: float | None = None
    confirmed: bool


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """The cheapest setting that holds; ``confirmation_reason`` says why there is no confirmation.

    ``diff_ci`` allows for the choice among ``candidates`` settings (Bonferroni).
    """

    setting: str
    kind: str | None = None
    code_bits: float | None
    packed_bits: float | None = None
    effective_bits: float | None
    cache_bits: float | None = None
    cache_at: dict[str, CacheSize] | None = None
    compression: float | None
    verdict: str
    n_missing: int = 0
    diff: float | None = None
    diff_ci: Ends = NO_ENDS
    candidates: int | None = None
    confirmation: Confirmation | None = None
    confirmation_reason: str | None = None

    @property
    def paid_bits(self) -> float | None:
        """Bits per value of the whole cache, or of a coded value where caches were not recorded."""
        return self.effective_bits if self.cache_bits is None else self.cache_bits


@dataclass(frozen=True, kw_only=True)
class Assay:
    """Could this measurement have seen a loss? ``tasks`` are those that can react, ``dead_tasks`` why others cannot.

    ``too_few``: even a reference that solves all of so few examples would not be shown to be above chance.
    """

    sensitive: bool
    positive_control: str | None
    reference_above_chance: bool
    reference_low: float | None = None
    chance: float | None = None
    tasks: tuple[str, ...] = ()
    dead_tasks: dict[str, str] | None = None
    too_few: bool = False


@dataclass(frozen=True, kw_only=True)
class Sequential:
    """Where a sequential run stands and what its looks cost; the fields behind are known of run folders only.

    ``raced``: settings shown degraded leave at a look. ``planned_rows`` are planned examples times settings, the
    reference among them, up to this look; ``run_rows`` those of them that were run.
    """

    look: int
    looks: int
    examples: tuple[int, ...]
    information: tuple[float, ...] = ()
    alpha_spent: float
    alpha_at_look: float
    raced: bool = False
    planned_rows: int | None = None
    run_rows: int | None = None
    planned_examples: int | None = None
    recorded_examples: int | None = None
    complete_looks: int | None = None
    stopped: bool = False
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What was added to a run after it was planned: ``examples`` before and after, and ``settings``.

    ``recorded`` examples were known then, and ``reported`` says whether they had been analysed.
    """

    time: str
    examples: tuple[int, ...]
    settings: tuple[str, ...] = ()
    recorded: int
    reported: bool


@dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """The reference against its own repeat."""

    setting: str
    diff: float
    diff_ci: Ends
    n_worse: int
    n_better: int


@dataclass(frozen=True, kw_only=True)
class Batching:
    """``full`` decoded alone against ``full`` among the other settings."""

    examples: int
    same_tokens: int
    kl: float | None
    diff: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A setting in a packed cache beside a plain one, on ``examples`` of the run: bytes held at the ends of answers.

    ``times_smaller`` and ``cache_bits`` count tokens that are not coded in 16 bits; the predicted ones are those of the
    records of the same examples. The last two: on how many examples each cache gave the sweep's answer.
    """

    setting: str
    examples: int
    device: str
    dtype: str
    nbytes: int
    plain_nbytes: int
    cache_bits: float
    predicted_cache_bits: float | None
    times_smaller: float
    predicted_times_smaller: float | None
    tokens_per_second: float
    plain_tokens_per_second: float
    answers_as_in_sweep: int
    plain_answers_as_in_sweep: int


@dataclass(frozen=True, kw_only=True)
class LengthResult:
    """What the examples of one length say by themselves: no alpha is shared with the other lengths.

    ``operating_point`` is the name of the cheapest setting that holds there, ``cache_bits`` its price. ``cliffs`` are
    those of all quantizers.
    """

    length: int
    n_clusters: int
    cliff: Cliff
    cliffs: dict[str, Cliff] | None = None
    operating_point: str | None
    cache_bits: float | None
    settings: dict[str, TaskResult]


@dataclass(frozen=True, kw_only=True)
class LengthTrend:
    """Change of a setting's difference from the reference with every doubling of the length."""

    setting: str
    slope: float | None
    slope_ci: Ends
    p: float | None


@dataclass(frozen=True, kw_only=True)
class PlaceResult:
    """The examples of one length whose needles stand, on average, in one part of the haystack.

    ``depth``: ends of that part, 0 at the start of the haystack and 1 at its end.
    """

    length: int
    depth: tuple[float, float]
    n_clusters: int
    settings: dict[str, TaskResult]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the server of a setting said of its cache; null for what it does not tell.

    mib: of ``cells`` tokens; bits: a value by these bytes, against 16 under the reference; effect: was a difference
    from the reference's answers shown?
    """

    setting: str
    type: str | None
    mib: float | None
    cells: int | None
    bits: float | None
    rotated: bool | None
    build: str | None
    effect: str | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that is said of one set of records.

    ``cliffs`` holds one cliff per quantizer ("" where it has no name), ``cliff`` that of the quantizer with most
    grid points. ``planned_examples`` is null where no plan is known.
    """

    schema: int = SCHEMA
    model: str | None
    quantizer: str | tuple[str, ...] | None
    engine: str | None = None
    protocol: str | None
    reference: str
    alpha: float
    margin: float
    average: str
    confidence: float | None = None
    resamples: int | None = None
    seed: int | None = None
    n_examples: int
    n_examples_recorded: int | None = None
    n_repeats_collapsed: int = 0
    n_units_recorded: int | None = None
    n_clusters: int
    n_turns: int = 1
    planned_examples: int | None = None
    layers: Layers | None = None
    preregistered: bool
    options_as_fixed: bool = False
    extensions: tuple[Extension, ...] = ()
    assay: Assay | None = None
    settings: tuple[SettingResult, ...]
    tasks: dict[str, dict[str, TaskResult]]
    cliff: Cliff
    cliffs: dict[str, Cliff] | None = None
    operating_point: OperatingPoint | None
    sequential: Sequential | None = None
    noise_floor: NoiseFloor | None = None
    batching: Batching | None = None
    served: tuple[Served, ...] = ()
    measured: Measured | None = None
    warnings: tuple[str, ...] = ()
    methods: Methods | None = None
    texts: tuple[TextResult, ...] = ()
    interpolation: tuple[Interpolation, ...] = ()
    rankings: tuple[Ranking, ...] = ()
    deletion: tuple[Deletion, ...] = ()
    depths: dict[str, dict[str, TaskResult]] | None = None
    lengths: tuple[LengthResult, ...] = ()
    length_trend: tuple[LengthTrend, ...] = ()
    places: tuple[PlaceResult, ...] = ()
    perturbed: tuple[Perturbed, ...] = ()
    turns: tuple[Turn, ...] = ()
    turn_drift: tuple[TurnDrift, ...] = ()
    runaway_detector: RunawayDetector | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of report.json as plain data; null for NaN and infinity."""
        return plain(self)

    @classmethod
    def from_json(cls, content: object) -> Report:
        """The report that ``content`` of a report.json holds; unknown fields are passed over.

        Reads schema 1 too, whose reports know nothing of ``cache_bits``.

        Raises ValueError naming the field that is missing or is something else.
        """
        if not isinstance(content, Mapping) or content.get("schema") not in _READABLE:
            raise ValueError(f"not a report of schema {' or '.join(map(str, _READABLE))}")
        return read(cls, {**content, "schema": SCHEMA}, "report")
