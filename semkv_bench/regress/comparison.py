"""What moved between a baseline and a run, by which witness, and how sure that is.

Exact witnesses: checksums of the code, storage figures, layers quantized, reads of quantized state. They have
no false alarms, so any difference counts. Statistical ones: KL of every setting and of all together, the
score of every setting, and where the cliff lies. All statistical tests are one family under Holm's
adjustment, so that an unchanged tree is called changed with a probability of at most ``false_alarm``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from semkv_bench.errors import UsageError
from semkv_bench.regress.checksums import check_count, differing
from semkv_bench.regress.shift_tests import Array, Sample, Tested, permutation_test, tolerance_test
from semkv_bench.regress.snapshot import Snapshot, completed
from semkv_bench.report import formatting
from semkv_bench.stats.multiplicity import holm

__all__ = [
    "ALL",
    "Comparison",
    "Finding",
    "JudgeOptions",
    "Shift",
    "compare",
    "compare_code",
    "require_comparable",
]

ALL = "all settings"
KL_FLOOR = 1e-5  # nats, added before logarithms: far below any quantized setting, far above rounding
FIGURES = ("code_bits", "packed_bits", "effective_bits")
_SAME_FIGURE = 1e-9
_TOLD = 4
_BRIEF = 60
_ABSENT = "nothing"


@dataclass(frozen=True)
class JudgeOptions:
    """How differences are judged.

    false_alarm: probability of calling an unchanged tree changed, over all statistical tests together.
    kl_tolerance: relative change of a setting's KL up to which it counts as the same; other machines and
    linear algebra libraries change it by far less. min_examples: fewer examples than that are not judged.
    """

    false_alarm: float = 0.01
    kl_tolerance: float = 0.05
    min_examples: int = 12

    def __post_init__(self) -> None:
        for name in ("false_alarm", "kl_tolerance"):
            if not 0 < getattr(self, name) < 0.5:
                raise UsageError(f"judge.{name}={getattr(self, name)} must be above 0 and below 0.5")
        if self.min_examples < 4:
            raise UsageError(f"judge.min_examples={self.min_examples} must be at least 4")


@dataclass(frozen=True)
class Finding:
    """Something that moved. certainty: ``exact``, or the adjusted p-value in words."""

    witness: str
    what: str
    certainty: str


@dataclass(frozen=True)
class Shift:
    """One statistical test. witness: kl, score or cliff; old and new are averages (KL: geometric means).

    change is a ratio for KL, a difference in score or bits otherwise; visible the change (ratio or
    difference) that this comparison shows nine times in ten.
    """

    witness: str
    setting: str
    old: float
    new: float
    change: float
    p: float
    p_adjusted: float
    moved: bool
    visible: float


@dataclass(frozen=True)
class Comparison:
    """Outcome of comparing two snapshots; ``judged`` is False where both hold too few of the same ``examples``."""

    findings: list[Finding]
    notes: list[str]
    shifts: list[Shift] = field(default_factory=list)
    checks: int = 0
    examples: int = 0
    judged: bool = True
    alike: bool = False

    @property
    def moved(self) -> bool:
        """Did anything move?"""
        return bool(self.findings)

    @property
    def exit_code(self) -> int:
        """1 moved, 3 not judged, 0 neither."""
        return 1 if self.moved else 0 if self.judged else 3


def require_comparable(old: Snapshot, new_identity: dict, what: str) -> None:
    """Raise UsageError, naming what differs, unless the baseline ``old`` is of the same model and protocol.

    Options left out on either side count as their defaults.
    """
    there = {name: completed(value) for name, value in old.identity.items()}
    here = {name: completed(new_identity.get(name)) for name in there}
    different = [name for name in there if there[name] != here[name]]
    if different:
        leaves = [
            f"{key}: {before} there, {now} here"
            for name in different
            for key, before, now in _leaves(name, there[name], here[name])
        ]
        short = "; ".join(leaves[:_TOLD]) + (f"; and {len(leaves) - _TOLD} more" if leaves[_TOLD:] else "")
        raise UsageError(
            f"{what} differs from the baseline in {', '.join(different)} ({short}); compare like with like, "
            "choose another baseline=FILE, or write a new one with --update"
        )


def compare_code(old: Snapshot, checks: dict, settings: dict[str, dict]) -> tuple[list[Finding], int]:
    """Exact witnesses that need no run: checksums and storage figures. Findings, and how many were compared."""
    findings = []
    for kind, cases in differing(old.checks, checks).items():
        total = len({*old.checks.get(kind, {}), *checks.get(kind, {})})
        findings.append(Finding(kind, f"{len(cases)} of {total} checks differ: {_listed(cases)}", "exact"))
    for name, row in old.settings.items():
        moved = [
            f"{figure.replace('_', ' ')} {_figure(row[figure])} -> {_figure(settings[name][figure])}"
            for figure in FIGURES
            if not _same_figure(row[figure], settings[name][figure])
        ]
        if moved:
            findings.append(Finding("storage", f"{name}: {', '.join(moved)}", "exact"))
    return findings, check_count(old.checks) + len(FIGURES) * len(old.settings)


def compare(old: Snapshot, new: Snapshot, options: JudgeOptions) -> Comparison:
    """Compare a run with its baseline.

    Raises UsageError for snapshots of different models or protocols.
    """
    require_comparable(old, new.identity, "this run")
    findings, checks = compare_code(old, new.checks, new.settings)
    findings += _layers(old, new)
    pairs = _common(old, new)
    findings += _reads(old, new, pairs)
    clusters = _Clusters(old, pairs)
    judged = clusters.size >= options.min_examples
    notes = _sample_notes(old, new, clusters.size)
    shifts = _shifts(old, new, clusters, options) if judged else []
    if not judged:
        notes.append(
            f"scores and KL were not judged: {clusters.size} of the baseline's examples, {options.min_examples} "
            "needed; run the baseline's seeds and per_task"
        )
    findings += [_shift_finding(shift, old, new) for shift in shifts if shift.moved]
    read = _read_differently(old, new, shifts)
    if _same_scores(old, new, pairs):
        findings += [Finding("analysis", f"every score is alike, yet {text}", "exact") for text in read]
    else:
        notes += [f"{text}: not beyond chance" for text in read]
    return Comparison(
        findings,
        notes,
        shifts,
        checks,
        clusters.size,
        judged,
        alike=bool(pairs[0]) and _alike(old, new, pairs),
    )


class _Clusters:
    """Values per cluster that both snapshots hold; a cluster is an example with its seeds and turns."""

    def __init__(self, old: Snapshot, pairs: tuple[list[int], list[int]]):
        groups: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        for row_old, row_new in zip(*pairs, strict=True):
            both = groups.setdefault(old.units[row_old][:2], ([], []))
            both[0].append(row_old)
            both[1].append(row_new)
        self._groups = dict(sorted(groups.items()))
        names = sorted({task for task, _ in groups})
        self._tasks = np.array([names.index(task) for task, _ in self._groups], dtype=np.int64)

    @property
    def size(self) -> int:
        """Clusters in both."""
        return len(self._groups)

    def sample(self, old: Array, new: Array) -> Sample:
        """Cluster means of unit values old [units of old], new [units of new]."""
        values = [
            np.array([_mean(table[rows[side]]) for rows in self._groups.values()])
            for side, table in enumerate((old, new))
        ]
        return Sample(*values, self._tasks).known()


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _common(old: Snapshot, new: Snapshot) -> tuple[list[int], list[int]]:
    """Rows of the units that both hold with the same prompt."""
    place = {unit: row for row, unit in enumerate(zip(old.units, old.prompts, strict=True))}
    found = [
        (place[unit], row)
        for row, unit in enumerate(zip(new.units, new.prompts, strict=True))
        if unit in place
    ]
    return [row for row, _ in found], [row for _, row in found]


def _layers(old: Snapshot, new: Snapshot) -> list[Finding]:
    if old.layers == new.layers:
        return []
    before, after = (f"{s.layers['quantized']} of {s.layers['total']}" for s in (old, new))
    return [Finding("layers", f"{before} layers quantized -> {after}", "exact")]


def _reads(old: Snapshot, new: Snapshot, pairs: tuple[list[int], list[int]]) -> list[Finding]:
    """Answers of the same length to the same prompt read the cache equally often."""
    rows_old, rows_new = pairs
    findings = []
    for column, name in enumerate(old.names):
        before = {key: table[rows_old, column] for key, table in old.measures.items()}
        after = {key: table[rows_new, new.names.index(name)] for key, table in new.measures.items()}
        same_length = (before["new_tokens"] == after["new_tokens"]) & (before["runaway"] == after["runaway"])
        known = ~np.isnan(before["quantized_reads"]) & ~np.isnan(after["quantized_reads"])
        comparable = np.flatnonzero(same_length & known)
        other = before["quantized_reads"][comparable] != after["quantized_reads"][comparable]
        if len(comparable) and other.mean() > 0.5:
            share = after["quantized_reads"][comparable].sum() / max(
                1, before["quantized_reads"][comparable].sum()
            )
            text = f"{name}: {share:.3f} of the reads of quantized state for answers of the same length"
            findings.append(Finding("reads", text, "exact"))
    return findings


def _shifts(old: Snapshot, new: Snapshot, clusters: _Clusters, options: JudgeOptions) -> list[Shift]:
    tolerance = math.log1p(options.kl_tolerance)
    columns = [new.names.index(name) for name in old.names]
    kl_old = np.log(old.measures["kl"] + KL_FLOOR)
    kl_new = np.log(new.measures["kl"][:, columns] + KL_FLOOR)
    score_old, score_new = old.measures["score"], new.measures["score"][:, columns]
    tested: list[tuple[str, str, Sample, Tested]] = []
    quantized = [place for place, row in enumerate(old.settings.values()) if row["kind"] != "full"]
    for place in quantized:
        sample = clusters.sample(kl_old[:, place], kl_new[:, place])
        if sample.size:
            tested.append(("kl", old.names[place], sample, tolerance_test(sample, tolerance)))
    if tested:
        sample = clusters.sample(kl_old[:, quantized].mean(1), kl_new[:, quantized].mean(1))
        tested.append(("kl", ALL, sample, tolerance_test(sample, tolerance)))
    for place, name in enumerate(old.names):
        # Of a setting what it loses against full, which spares differences between the examples.
        less_old, less_new = (score_old[:, 0], score_new[:, 0]) if place else (0.0, 0.0)
        sample = clusters.sample(score_old[:, place] - less_old, score_new[:, place] - less_new)
        tested.append(("score", name, sample, permutation_test(sample, seed=place)))
    halfway = _halfway(old, score_old, score_new)
    if halfway is not None:
        sample = clusters.sample(*halfway)
        tested.append(("cliff", ALL, sample, permutation_test(sample, seed=len(old.names))))
    adjusted = holm(np.array([test.p for *_, test in tested]))
    level = options.false_alarm / len(tested)
    return [
        _shift(witness, name, sample, test, float(p), options, level)
        for (witness, name, sample, test), p in zip(tested, adjusted, strict=True)
    ]


def _shift(
    witness: str, name: str, sample: Sample, test: Tested, p: float, options: JudgeOptions, level: float
) -> Shift:
    old, new, change = (float(sample.old.mean()), float(sample.new.mean()), test.difference)
    visible = test.visible(level, math.log1p(options.kl_tolerance) if witness == "kl" else 0.0)
    if witness == "kl":
        old, new, change, visible = math.exp(old), math.exp(new), math.exp(change), math.exp(visible)
    return Shift(witness, name, old, new, change, test.p, p, p < options.false_alarm, visible)


def _halfway(old: Snapshot, score_old: Array, score_new: Array) -> tuple[Array, Array] | None:
    """Where each example falls off, in code bits: the grid's upper end less the area under what it retains.

    Averaged over examples that is the place halfway down the cliff. None for a grid of fewer than three points.
    """
    bits: dict[float, list[int]] = {}
    for place, row in enumerate(old.settings.values()):
        if row["kind"] == "uniform":
            bits.setdefault(row["code_bits"], []).append(place)
    if len(bits) < 3:
        return None
    grid = sorted(bits)
    places = []
    for scores in (score_old, score_new):
        kept = np.stack([1 + (scores[:, bits[b]] - scores[:, :1]).mean(1) for b in grid], axis=1)
        places.append(grid[-1] - np.trapezoid(kept, grid, axis=1))
    return places[0], places[1]


def _shift_finding(shift: Shift, old: Snapshot, new: Snapshot) -> Finding:
    if shift.witness == "kl":
        text = f"KL of {shift.setting} {shift.old:.3g} -> {shift.new:.3g}, {_times(shift.change)}"
    elif shift.witness == "score":
        against = "score" if shift.setting == old.names[0] else "score less that of full"
        text = f"{against} of {shift.setting} {shift.old:+.3f} -> {shift.new:+.3f}"
    else:
        text = (
            f"cliff {cliff_text(old)} -> {cliff_text(new)}, halfway down at {shift.old:.2f} -> {shift.new:.2f} bits "
            f"({'better' if shift.change < 0 else 'worse'})"
        )
    return Finding(shift.witness, text, f"p {_p(shift.p_adjusted)}")


def cliff_text(snapshot: Snapshot) -> str:
    """Where the cliff of ``snapshot`` is, in the report's words."""
    cliff = snapshot.cliff
    return formatting.cliff_text(cliff["status"], cliff["lower_bits"], cliff["upper_bits"])


def _read_differently(old: Snapshot, new: Snapshot, shifts: Sequence[Shift]) -> list[str]:
    """Verdicts and cliff intervals that read differently though no test shows a move of theirs."""
    moved = {(shift.witness, shift.setting) for shift in shifts if shift.moved}
    notes = []
    if cliff_text(old) != cliff_text(new) and ("cliff", ALL) not in moved:
        notes.append(f"cliff {cliff_text(old)} -> {cliff_text(new)}")
    for name, row in old.settings.items():
        now = new.settings[name]["verdict"]
        if now != row["verdict"] and ("score", name) not in moved:
            notes.append(f"{name} was {row['verdict']}, is {now}")
    return notes


def _sample_notes(old: Snapshot, new: Snapshot, shared: int) -> list[str]:
    notes = []
    recorded, planned = len({unit[:3] for unit in new.units}), new.sample["planned"]
    if recorded < planned:
        notes.append(f"the run is unfinished: {recorded} of {planned} examples")
    same_names = set(old.units) & set(new.units)
    prompt_of = dict(zip(old.units, old.prompts, strict=True))
    changed = sum(
        prompt_of[unit] != prompt
        for unit, prompt in zip(new.units, new.prompts, strict=True)
        if unit in same_names
    )
    if changed:
        notes.append(
            f"{changed} prompts are other ones than in the baseline although their seeds agree: "
            "the task or the tokenizer changed"
        )
    elif other := len({unit[:2] for unit in new.units}) - shared:
        notes.append(f"{other} examples of the run are not the baseline's and were left out")
    changed = [k for k, v in old.environment.items() if v != new.environment.get(k)]
    if changed:
        words = (f"{name} {old.environment[name]} -> {new.environment.get(name)}" for name in changed)
        notes.append(f"other surroundings than the baseline's: {', '.join(words)}")
    return notes


def _alike(old: Snapshot, new: Snapshot, pairs: tuple[list[int], list[int]]) -> bool:
    return all(_same_measure(name, old, new, pairs) for name in old.measures)


def _same_measure(name: str, old: Snapshot, new: Snapshot, pairs: tuple[list[int], list[int]]) -> bool:
    rows_old, rows_new = pairs
    columns = [new.names.index(known) for known in old.names]
    before, now = old.measures[name][rows_old], new.measures[name][rows_new][:, columns]
    return np.array_equal(before, now, equal_nan=True)


def _same_scores(old: Snapshot, new: Snapshot, pairs: tuple[list[int], list[int]]) -> bool:
    """Is every score of both runs there and the same? Then only the analysis can make verdicts differ."""
    whole = len(pairs[0]) == len(old.units) == len(new.units)
    return whole and _same_measure("score", old, new, pairs)


def _same_figure(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is after
    return abs(before - after) <= _SAME_FIGURE


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _listed(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _leaves(key: str, there: object, here: object) -> Iterator[tuple[str, str, str]]:
    """Where two values differ: the key of each part, and what stands on both sides, in short."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in dict.fromkeys([*there, *here]):
            if there.get(name, _ABSENT) != here.get(name, _ABSENT):
                yield from _leaves(f"{key}.{name}", there.get(name, _ABSENT), here.get(name, _ABSENT))
        return
    if isinstance(there, list) and isinstance(here, list):
        alone = [[entry for entry in a if entry not in b] for a, b in ((there, here), (here, there))]
        # Of long lists with little between them, that little; of the same entries in another order, the lists.
        there, here = alone if any(alone) else (there, here)
    texts = str(there), str(here)
    # What both begin with says nothing.
    alike = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = max(0, alike - 20) if max(map(len, texts)) > _BRIEF else 0
    yield key, *(_brief(text, start) for text in texts)


def _brief(text: str, start: int) -> str:
    cut = ("..." if start else "") + text[start:]
    return cut if len(cut) <= _BRIEF else cut[: _BRIEF - 3] + "..."


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times ({'better' if ratio < 1 else 'worse'})"


def _p(value: float) -> str:
    return f"{value:.1g}" if value >= 1e-6 else "< 1e-6"
