"""What is found beyond the cliff, typed: comparisons of settings, methods, metrics and turns, and texts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "NO_ENDS",
    "Comparison",
    "Deletion",
    "Ends",
    "Interpolation",
    "MethodPair",
    "MethodPoint",
    "Methods",
    "MetricPair",
    "Perturbed",
    "RankedMetric",
    "Ranking",
    "RunawayDetector",
    "TextResult",
    "Turn",
    "TurnDrift",
    "TurnResult",
]

Ends = tuple[float | None, float | None]
NO_ENDS: Ends = (None, None)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two settings, neither of them the reference; p-values adjusted over all comparisons of their kind."""

    n_clusters: int
    diff: float | None
    diff_ci: Ends
    p_difference: float | None
    p_difference_raw: float | None = None
    p_equivalence: float | None
    p_equivalence_raw: float | None = None
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Interpolation(Comparison):
    """A mix against the line between its ends."""

    setting: str
    quantizer: str | None = None
    code_bits: float | None = None
    effective_bits: float | None
    metric: str
    high: int
    low: int
    fraction: float
    high_setting: str
    low_setting: str
    high_score: float | None
    low_score: float | None
    ends_differ: bool
    score: float | None
    line: float | None


@dataclass(frozen=True, kw_only=True)
class Deletion(Comparison):
    """A setting that deletes tokens against one that keeps all of them in as much memory, null where none does."""

    setting: str
    metric: str | None = None
    effective_bits: float | None
    cache_bits: float | None = None
    score: float | None
    against: str | None
    against_kind: str | None = None
    against_effective_bits: float | None
    against_cache_bits: float | None = None
    against_score: float | None


@dataclass(frozen=True, kw_only=True)
class MethodPair(Comparison):
    """Two methods at equal ``bits``, each on the line between the neighbouring points of its own grid.

    ``diff`` is first less second. ``diff_ci`` is of the pair by itself, ``diff_ci_all`` holds for all pairs together.
    """

    bits: float
    first: str
    second: str
    first_score: float | None
    second_score: float | None
    diff_ci_all: Ends


@dataclass(frozen=True, kw_only=True)
class MethodPoint:
    """A method at ``bits``: ``share`` of the way from ``lower`` to ``upper``; these are null beyond its grid's ends."""

    bits: float
    method: str
    least_bits: float
    most_bits: float
    upper: str | None = None
    lower: str | None = None
    share: float | None = None
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class Methods:
    """Method against method at ``at_bits``; ``front`` are the settings that none is both cheaper and as good as.

    ``priced_by`` says which bits are meant: ``cache_bits``, or ``effective_bits`` where records do not tell these.
    """

    priced_by: str
    at_bits: tuple[float, ...]
    methods: tuple[str, ...]
    points: tuple[MethodPoint, ...]
    pairs: tuple[MethodPair, ...]
    front: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankedMetric:
    """One metric of a ranking, against the best of the sample and against the random control."""

    metric: str
    setting: str
    score: float
    score_ci: Ends
    diff_best: float | None
    diff_best_ci: Ends
    p_best: float | None
    diff_random: float | None
    diff_random_ci: Ends
    p_random: float | None
    rank: tuple[int, int]
    letters: str


@dataclass(frozen=True, kw_only=True)
class MetricPair:
    """Two metrics of a ranking against each other."""

    first: str
    second: str
    n_clusters: int
    diff: float | None
    diff_ci: Ends
    p: float
    p_raw: float


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Importance metrics that share an allocation."""

    group: str
    kind: str
    quantizer: str | None = None
    high: int | None = None
    low: int | None = None
    fraction: float | None = None
    keep: float | None = None
    code_bits: float | None = None
    effective_bits: float | None
    best: str
    control: str | None
    metrics: tuple[RankedMetric, ...]
    pairs: tuple[MetricPair, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TurnResult:
    """One setting in one turn."""

    score: float
    diff: float | None
    diff_ci: Ends
    n_clusters: int | None = None
    coded_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """All settings in one turn, counted from 0."""

    turn: int
    n_clusters: int
    settings: dict[str, TurnResult]


@dataclass(frozen=True, kw_only=True)
class TurnDrift:
    """The difference from the reference in the last turn less that in the first."""

    setting: str
    first_turn: int
    last_turn: int
    n_clusters: int
    diff: float | None
    diff_ci: Ends
    p: float


@dataclass(frozen=True, kw_only=True)
class Perturbed:
    """What a setting loses beyond what the reference loses when prompts are changed; p-values are Holm-adjusted.

    ``full_change`` and ``change`` are the mean changes of score of the reference and of the setting, over the prompts
    that both have in both wordings; ``diff`` is the second less the first. ``verdict`` is ``loses more``,
    ``loses less``, ``loses as much`` (within the margin) or ``not decided``.
    """

    perturb: str
    setting: str
    n_clusters: int
    full_change: float | None
    change: float | None
    diff: float | None
    diff_ci: Ends
    p_difference: float
    p_equivalence: float
    verdict: str


@dataclass(frozen=True, kw_only=True)
class RunawayDetector:
    """How often the reference's own outputs count as runaway; null ``loops``: records do not tell."""

    outputs: int
    runaway: int
    rate: float
    rate_ci: Ends
    loops: int | None
    loops_exact: bool


@dataclass(frozen=True, kw_only=True)
class TextResult:
    """A text under one setting: means over windows; ``ratio`` is its perplexity over the reference's."""

    setting: str
    n_windows: int
    nll: float | None
    perplexity: float | None
    perplexity_ci: Ends
    ratio: float | None
    ratio_ci: Ends
    kl: float | None
    kl_ci: Ends
    top1_agreement: float | None
    top1_agreement_ci: Ends
