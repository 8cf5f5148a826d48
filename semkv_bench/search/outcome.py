"""What a search came to: the candidates on fresh examples, and each against the one that was found."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from semkv_bench.plan.plan import Plan
from semkv_bench.records.folder import read_run
from semkv_bench.records.normalize import normalize
from semkv_bench.search.layers import Cache, LevelsBySide, Part
from semkv_bench.stats import StatsOptions
from semkv_bench.stats.comparisons import judged_columns
from semkv_bench.stats.contrast import Arm, arm_of, contrast_of
from semkv_bench.stats.pairing import PairedScores, pair
from semkv_bench.stats.result import Report

__all__ = ["Candidate", "Outcome", "outcome"]

_WORDS = ("alike within the margin", "better", "worse")


@dataclass(frozen=True)
class Candidate:
    """Levels by layer and side that are tried. cache_bits: of a prompt's cache, planned; node: of its quantizer."""

    called: str
    about: str
    levels: LevelsBySide = field(repr=False)
    node: Mapping[str, Any] = field(repr=False)
    cache_bits: float

    @property
    def setting(self) -> str:
        """Ending of the setting's name."""
        return self.called


@dataclass(frozen=True)
class Row:
    """One setting on the fresh examples. prompt_bits: bits per value of a prompt's cache at the budget's length."""

    setting: str
    about: str
    prompt_bits: float
    score: float
    kl: float | None
    verdict: str
    predicted_kl: float | None


@dataclass(frozen=True)
class Against:
    """What was found less another setting: mean paired difference of scores with its interval."""

    setting: str
    prompt_bits: float
    diff: float | None
    diff_ci: tuple[float | None, float | None]
    p_difference: float
    verdict: str
    n_clusters: int


@dataclass(frozen=True)
class Outcome:
    """The rows, dearest first, and the comparisons of the first candidate with all others."""

    found: str
    tokens: int
    levels: dict[str, dict[int, int]]
    confidence: float
    rows: tuple[Row, ...]
    against: tuple[Against, ...]

    def as_json(self, target: float, model: str) -> str:
        """``search.json``."""
        content = {"model": model, "target_bits": target, **asdict(self)}
        return json.dumps(content, indent=1) + "\n"

    def words(self) -> list[str]:
        """What is said at the end: the comparison with uniform levels at equal bits first."""
        return [self._sentence(one) for one in self.against]

    def _sentence(self, one: Against) -> str:
        low, high = one.diff_ci
        if one.diff is None or low is None or high is None:
            return f"{self.found} and {one.setting} have no examples in common"
        word = one.verdict if one.verdict in ("better", "worse") else f"{one.verdict},"
        return (
            f"{self.found} against {one.setting} ({one.prompt_bits:.3f} bits): {word} {one.diff:+.3f} "
            f"[{low:+.3f}, {high:+.3f}], p {one.p_difference:.3g}"
        )

    def as_markdown(self, target: float, model: str, name: str) -> str:
        """``search.md``."""
        percent = f"{100 * self.confidence:g} %"
        lines = [
            f"# Levels by layer and side: {model} at {target:g} bits",
            "",
            f"Bits are those of a prompt's cache of {self.tokens} tokens, metadata included. Levels were chosen by KL "
            "on calibration prompts; everything below is of fresh examples (`confirm/report.html`).",
            "",
            "| setting | what | bits | score | KL | verdict against full | KL predicted |",
            "|---|---|---:|---:|---:|---|---:|",
            *(
                f"| `{r.setting}` | {r.about} | {r.prompt_bits:.3f} | {r.score:.3f} | {_number(r.kl)} | {r.verdict} | "
                f"{_number(r.predicted_kl)} |"
                for r in self.rows
            ),
            "",
            f"`{self.found}` less each other setting, paired by example; {percent} intervals, p-values Holm-adjusted:",
            "",
            "| against | its bits | difference | interval | p | verdict |",
            "|---|---:|---:|---|---:|---|",
            *(
                f"| `{a.setting}` | {a.prompt_bits:.3f} | {_signed(a.diff)} | [{_signed(a.diff_ci[0])}, "
                f"{_signed(a.diff_ci[1])}] | {a.p_difference:.3g} | {a.verdict} |"
                for a in self.against
            ),
            "",
            "Predicted KL is the sum over layers and sides, each coded alone on the calibration prompts.",
            "",
            f"The levels are in `quantizer/{name}.yaml`: `semkv-bench sweep --conf FOLDER quantizer={name}`, with this "
            "folder as FOLDER.",
        ]
        return "\n".join(lines) + "\n"


def outcome(
    result: Report,
    run: Path,
    plan: Plan,
    candidates: Sequence[Candidate],
    cache: Cache,
    losses: Mapping[tuple[Part, int], float],
) -> Outcome:
    """Rows and comparisons of the confirming run."""
    named = {_setting_of(plan, c): c for c in candidates}
    bits = {s.name: s.planned(plan.shape.cache, cache.tokens).cache_bits for s in plan.settings}
    rows = [
        Row(
            r.setting,
            _about(r.setting, named),
            bits[r.setting],
            r.score,
            r.kl,
            r.verdict,
            _predicted(r.setting, named, plan, cache, losses),
        )
        for r in result.settings
    ]
    found = _setting_of(plan, candidates[0])
    options = StatsOptions(**{k: v for k, v in plan.charter["stats"].items() if k != "looks"})
    others = [s for s in _nearest_first(bits, found, named) if s not in (found, "full")]
    paired = pair(normalize(read_run(run)[0]), options)
    levels = {
        side: {layer: n for (layer, at), n in candidates[0].levels.items() if at == side}
        for side in ("keys", "values")
    }
    return Outcome(
        found,
        cache.tokens,
        levels,
        options.confidence,
        tuple(sorted(rows, key=lambda row: -row.prompt_bits)),
        _against(paired, found, others, bits, options),
    )


def _against(
    paired: PairedScores, found: str, others: Sequence[str], bits: Mapping[str, float], options: StatsOptions
) -> tuple[Against, ...]:
    def sides(scores: PairedScores) -> tuple[Arm, Arm]:
        mine = arm_of(scores, [scores.column(found)] * len(others))
        return mine, arm_of(scores, [scores.column(name) for name in others])

    judged = judged_columns(contrast_of(paired, sides, options), options, _WORDS)
    return tuple(
        Against(
            name,
            bits[name],
            one["diff"],
            one["diff_ci"],
            one["p_difference"],
            one["verdict"],
            one["n_clusters"],
        )
        for name, one in zip(others, judged, strict=True)
    )


def _nearest_first(bits: Mapping[str, float], found: str, named: Mapping[str, Candidate]) -> list[str]:
    """Candidates in their order, then uniform points from near to far."""
    uniform = sorted((s for s in bits if s not in named), key=lambda s: abs(bits[s] - bits[found]))
    return [*named, *uniform]


def _setting_of(plan: Plan, candidate: Candidate) -> str:
    """The setting's name: that whose layers are called so."""
    for setting in plan.settings:
        sides = [side.quantizer.layers.called for side in (setting.keys, setting.values) if side is not None]
        if candidate.called in sides:
            return setting.name
    raise KeyError(candidate.called)


def _about(setting: str, named: Mapping[str, Candidate]) -> str:
    if setting in named:
        return named[setting].about
    return "16 bits" if setting == "full" else "uniform"


def _predicted(
    setting: str,
    named: Mapping[str, Candidate],
    plan: Plan,
    cache: Cache,
    losses: Mapping[tuple[Part, int], float],
) -> float | None:
    """The sum of what each layer and side loses alone."""
    if setting in named:
        return sum(losses[part, levels] for part, levels in named[setting].levels.items())
    one = next(s for s in plan.settings if s.name == setting)
    if one.keys is None:
        return None
    return sum(losses[part, one.keys.allocation.grid_point] for part in cache.parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"
