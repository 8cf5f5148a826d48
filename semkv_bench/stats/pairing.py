"""From records to arrays: which example was scored how often, under which setting, beside its reference.

A cluster is one example of one task with all its seeds and turns, or several examples that share a document (column
``cluster``) or a prompt (equal ``prompt_hash``). Its value is the mean over its rows, so every example counts once
however many seeds or turns it has, and examples of one cluster come and go together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from semkv_bench.errors import UsageError
from semkv_bench.records.names import DESCRIBED
from semkv_bench.records.racing import LAST_LOOK
from semkv_bench.records.schema import REFERENCE, UNIT
from semkv_bench.stats.gaps import gaps
from semkv_bench.stats.options import StatsOptions
from semkv_bench.stats.spending import Look, Looks

__all__ = ["PairedScores", "SettingInfo", "cluster_labels", "pair"]

_OUTCOMES = ("score", "prediction", "runaway", "kl", "top1_agreement", "new_tokens", "prompt_hash")
_PARTED = ("parted_at", "parted_by_token", "parted_by_end")
_RELATIVE = ("kl", "top1_agreement", "agreement", *_PARTED)
_MEASURES = ("score", "runaway", "nll", *_RELATIVE)


@dataclass(frozen=True)
class SettingInfo:
    """What is known of a setting beside its scores; bits per value, ``cache_bits`` a mean over its records,
    ``read_bits`` of what a step reads, None where it reads all.

    ``family`` is the quantizer without its options, ``levels`` those of a uniform setting (None where keys and values
    differ), ``high``, ``low`` and ``fraction`` those of a mix, ``keep`` the share that a deletion keeps, ``metric``
    and ``scope`` what ranks tokens.
    """

    name: str
    kind: str
    quantizer: str | None
    code_bits: float | None
    packed_bits: float | None
    effective_bits: float | None
    family: str | None = None
    levels: int | None = None
    high: int | None = None
    low: int | None = None
    fraction: float | None = None
    keep: float | None = None
    metric: str | None = None
    scope: str | None = None
    options: str | None = None
    cache_bits: float | None = None
    read_bits: float | None = None

    @property
    def paid_bits(self) -> float | None:
        """What a setting costs: the bits of the whole cache where they are recorded, else the price of a value."""
        return self.effective_bits if self.cache_bits is None else self.cache_bits

    @property
    def compression(self) -> float | None:
        """How many times smaller than 16 bits, by ``paid_bits``."""
        return 16 / self.paid_bits if self.paid_bits else None


@dataclass(frozen=True)
class PairedScores:
    """Cluster means of all settings, column 0 the reference itself. N clusters, S settings.

    ``measures[name]`` and ``references[name]`` ("score", "runaway" and so on) are [N, S]: the
    setting's mean and the reference's mean over the same rows, NaN where nothing is paired. ``evidence``
    [N, S] counts the rows that are not repeats. ``row_sizes`` [N, S] says how far the scores of single rows
    (seeds, turns) are from the reference's: the mean of absolute differences, weighted by their squares.
    ``tasks`` [N] are codes into ``task_names``. ``documents`` [N] are equal where clusters of several tasks are about
    one document, None where there are no such clusters. ``unpaired`` counts, by setting, rows that the reference
    does not have, ``missing`` rows of any setting that this one does not have. ``last_look`` [S] is the number of
    the last look that each setting is planned for, None where no setting may leave early.
    """

    settings: tuple[SettingInfo, ...]
    task_names: tuple[str, ...]
    tasks: np.ndarray
    measures: dict[str, np.ndarray]
    references: dict[str, np.ndarray]
    evidence: np.ndarray
    row_sizes: np.ndarray
    recorded: int
    repeats: int
    sizes: np.ndarray
    documents: np.ndarray | None = None
    shared: int = 0
    same_prompts: int = 0
    across_tasks: int = 0
    unpaired: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    worst: PairedScores | None = None
    chosen_by: dict[int, float] = field(default_factory=dict)
    last_look: np.ndarray | None = None

    def looks(self, look: Look | None) -> Look | Looks | None:
        """``look``, or the last one of every setting where some left at an earlier one."""
        return look if look is None or self.last_look is None else look.at(self.last_look)

    def confidence(self, confidence: float, look: Look | None) -> np.ndarray:
        """Level of each setting's interval at a ``look`` that covers with ``confidence`` over all looks, [S]."""
        level = confidence if look is None else self.looks(look).confidence(confidence)
        return np.broadcast_to(level, len(self.settings))

    @property
    def n_clusters(self) -> int:
        """Clusters, those of one document in several tasks being one."""
        return len(self.tasks if self.documents is None else np.unique(self.documents))

    @property
    def differences(self) -> np.ndarray:
        """Score of the setting less that of the reference, [N, S]."""
        return self.measures["score"] - self.references["score"]

    def take(self, clusters: np.ndarray) -> PairedScores:
        """Only some clusters (indices)."""
        return replace(
            self,
            tasks=self.tasks[clusters],
            measures={name: values[clusters] for name, values in self.measures.items()},
            references={name: values[clusters] for name, values in self.references.items()},
            evidence=self.evidence[clusters],
            row_sizes=self.row_sizes[clusters],
            sizes=self.sizes[clusters],
            documents=None if self.documents is None else self.documents[clusters],
        )

    def of_tasks(self, codes: Sequence[int]) -> PairedScores:
        """Only the tasks ``codes``."""
        worst = self.worst and self.worst.take(np.flatnonzero(np.isin(self.worst.tasks, codes)))
        return replace(self.take(np.flatnonzero(np.isin(self.tasks, codes))), worst=worst)

    def column(self, name: str) -> int:
        """Index of setting ``name``."""
        return next(i for i, info in enumerate(self.settings) if info.name == name)


def pair(frame: pd.DataFrame, options: StatsOptions) -> PairedScores:
    """Pair normalized records (see :func:`semkv_bench.records.schema.normalize`) row by row with the reference.

    Rows of one example that differ only in the seed and came out alike under every setting are repeats, not
    evidence: they do not count in ``evidence``, and a seed that repeats another wherever both were run is
    left out altogether.

    Raises UsageError for rows without a partner (unless dropped by choice), for partners with different
    prompts, and for a setting that never read its quantized cache.
    """
    _check_reads(frame)
    unpaired, missing = gaps(frame, options)
    settings = tuple(_settings(frame))
    names = [info.name for info in settings]
    labels = {"cluster": cluster_labels(frame), "document": cluster_labels(frame, across_tasks=True)}
    units = frame.assign(**labels).drop_duplicates(UNIT)[[*UNIT, *labels]].reset_index(drop=True)
    row = pd.MultiIndex.from_frame(units[UNIT]).get_indexer(pd.MultiIndex.from_frame(frame[UNIT]))
    column = pd.Index(names).get_indexer(frame["setting"])
    _check_prompts(frame, row, column)
    last = _last_looks(frame, options, names)
    frame = frame.assign(**_partings(frame))
    grids = {name: _grid(frame[name], row, column, len(units), len(names)) for name in _MEASURES}
    outcome = _grid(_outcome_codes(frame), row, column, len(units), len(names))
    whole = ~np.isnan(grids["score"][:, 0])
    pairs = {}
    for name, grid in grids.items():
        # KL and agreement are already against the reference, whose own value says nothing and may be absent.
        both = ~np.isnan(grid) & (name in _RELATIVE or ~np.isnan(grid[:, :1]))
        pairs[name] = (np.where(both, grid, np.nan)[whole], np.where(both, grid[:, :1], np.nan)[whole])
    paired = _assemble(settings, units[whole], pairs, outcome[whole])
    if unpaired or missing:
        planned = True if last is None else _looks_of(units, frame)[:, None] <= last
        worst = {"score": _total_losses(grids["score"], settings, planned)}
        worst = replace(_assemble(settings, units, worst, outcome), last_look=last)
        paired = replace(paired, unpaired=unpaired, missing=missing, worst=worst)
    spread = units.groupby("document")["task"].transform("nunique") > 1
    return replace(
        paired,
        shared=_joined(frame, "cluster"),
        same_prompts=_joined(frame, "prompt_hash"),
        across_tasks=len(units[spread].drop_duplicates(["task", "example_id"])),
        last_look=last,
    )


def _last_looks(frame: pd.DataFrame, options: StatsOptions, names: Sequence[str]) -> np.ndarray | None:
    """Number of the last look that each setting is planned for, where settings may leave."""
    if not options.race or LAST_LOOK not in frame:
        return None
    return frame.groupby("setting")[LAST_LOOK].max().reindex(names).to_numpy(dtype=int)


def _looks_of(units: pd.DataFrame, frame: pd.DataFrame) -> np.ndarray:
    """Number of the look that every unit belongs to, [U]."""
    return (
        units[UNIT]
        .merge(frame[[*UNIT, "look"]].drop_duplicates(UNIT), on=UNIT, how="left")["look"]
        .to_numpy()
    )


def _partings(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """``_PARTED`` of every row, from ``parted_at`` and ``parted_by``; NaN where answers were not compared."""
    if not {"parted_at", "parted_by"} <= set(frame.columns):
        return dict.fromkeys(_PARTED, pd.Series(np.nan, index=frame.index))
    compared = frame["agreement"].notna()
    shares = [(frame["parted_by"] == how).astype(float).where(compared) for how in ("token", "end")]
    places = pd.to_numeric(frame["parted_at"], errors="coerce")
    return dict(zip(_PARTED, (places, *shares), strict=True))


def _assemble(
    settings: tuple[SettingInfo, ...],
    units: pd.DataFrame,
    pairs: dict[str, tuple[np.ndarray, np.ndarray]],
    outcome: np.ndarray,
) -> PairedScores:
    """Clusters from rows: ``units`` with their cluster, ``pairs`` of values and the reference's, [U, S] each."""
    keep, fresh = _repeats(units, outcome)
    order = np.flatnonzero(keep)
    codes = pd.factorize(units["task"], sort=True)[0]
    order = order[np.lexsort([units["cluster"].to_numpy()[order], codes[order]])]
    evidence = (fresh[:, None] & ~np.isnan(pairs["score"][0]))[order]
    away = np.abs(np.nan_to_num(pairs["score"][0] - pairs["score"][1]))[order]
    units = units.iloc[order].reset_index(drop=True)
    starts = _cluster_starts(units)
    means = {
        name: tuple(_cluster_means(side[order], starts) for side in sides) for name, sides in pairs.items()
    }
    task_names = tuple(sorted(units["task"].unique()))
    new = ~units.duplicated(["task", "example_id"]).to_numpy()
    documents = units["document"].to_numpy()[starts]
    paired = PairedScores(
        settings=settings,
        task_names=task_names,
        tasks=pd.Index(task_names).get_indexer(units["task"].to_numpy()[starts]),
        measures={name: sides[0] for name, sides in means.items()},
        references={name: sides[1] for name, sides in means.items()},
        evidence=np.add.reduceat(evidence.astype(int), starts, axis=0),
        row_sizes=_row_sizes(away, starts),
        recorded=len(keep),
        repeats=int(len(fresh) - fresh.sum()),
        sizes=np.add.reduceat(new.astype(float), starts),
        documents=documents if len(np.unique(documents)) < len(documents) else None,
    )
    return paired.take(_canonical_order(paired))


def cluster_labels(frame: pd.DataFrame, across_tasks: bool = False) -> np.ndarray:
    """Which rows belong together, as equal numbers: by example, by column ``cluster``, by ``prompt_hash``.

    Within a task, or ``across_tasks``; there an example's own name, which stands in for a cluster that is not given,
    joins nothing.
    """
    example = frame.groupby(["task", "example_id"], sort=False).ngroup().to_numpy()
    ends, nodes = [], int(example.max()) + 1
    for name in ("cluster", "prompt_hash"):
        known = _known(frame, name)
        if across_tasks and name == "cluster" and known.any():
            known = known & (frame[name] != frame["example_id"]).to_numpy()
        key = [name] if across_tasks else ["task", name]
        codes = frame[known].groupby(key, sort=False).ngroup().to_numpy() if known.any() else []
        ends.append((example[known], np.asarray(codes, dtype=int) + nodes))
        nodes += int(max(codes, default=-1)) + 1
    first, second = (np.concatenate([end[side] for end in ends]) for side in (0, 1))
    graph = coo_array((np.ones(len(first)), (first, second)), shape=(nodes, nodes))
    return connected_components(graph, directed=False)[1][example]


def _known(frame: pd.DataFrame, name: str) -> np.ndarray:
    """Rows in which column ``name`` says something."""
    if name not in frame:
        return np.zeros(len(frame), bool)
    return (frame[name].notna() & (frame[name].astype(str).str.strip() != "")).to_numpy()


def _joined(frame: pd.DataFrame, name: str) -> int:
    """How many examples share their ``name`` with another example of the task."""
    rows = frame[_known(frame, name)]
    if rows.empty:
        return 0
    several = rows.groupby(["task", name])["example_id"].transform("nunique") > 1
    return len(rows.loc[several, ["task", "example_id"]].drop_duplicates())


def _total_losses(
    scores: np.ndarray, settings: tuple[SettingInfo, ...], planned: np.ndarray | bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and the reference's [U, S], a ``planned`` missing score being 0 and the reference's missing one 1."""
    compared = np.array([info.kind != "full" for info in settings])
    full = np.broadcast_to(scores[:, :1], scores.shape)
    own = np.where(np.isnan(scores) & compared & planned, 0.0, scores)
    return own, np.where(np.isnan(own), np.nan, np.where(np.isnan(full), 1.0, full))


def _check_reads(frame: pd.DataFrame) -> None:
    if "quantized_reads" not in frame:
        return
    reads = pd.to_numeric(frame["quantized_reads"], errors="coerce")
    coded = frame["kind"].isin(["uniform", "mixed"]) & reads.notna()
    never = reads[coded].groupby(frame["setting"][coded]).max() == 0
    if never.any():
        raise UsageError(
            f"setting {never.index[never.to_numpy()][0]} never read its quantized cache (quantized_reads is 0 "
            "everywhere), so its scores measure full precision; check what the protocol quantizes"
        )


def _settings(frame: pd.DataFrame) -> list[SettingInfo]:
    """The reference first, then from many code bits to few."""
    first = frame.drop_duplicates("setting")
    by_setting = frame.groupby("setting")["cache_bits"]
    # Settings are compared by the mean only where every row has its cost; the full cache's needs no record.
    whole = {name: math.fsum(rows) / len(rows) for name, rows in by_setting if rows.notna().all()}
    if set(first.loc[first["kind"] != "full", "setting"]) <= set(whole):
        whole = dict.fromkeys(first.loc[first["kind"] == "full", "setting"], 16.0) | whole
    else:
        whole = {}

    parts = frame.groupby("setting")["read_bits"]
    read = {name: math.fsum(rows) / len(rows) for name, rows in parts if rows.notna().all()}

    def bits(value: float) -> float | None:
        return None if pd.isna(value) else float(value)

    known = [
        SettingInfo(
            name=row["setting"],
            kind=row["kind"],
            quantizer=row["quantizer"] if isinstance(row["quantizer"], str) else None,
            code_bits=bits(row["code_bits"]),
            packed_bits=bits(row["packed_bits"]),
            effective_bits=bits(row["effective_bits"]),
            cache_bits=whole.get(row["setting"]),
            read_bits=read.get(row["setting"]),
            **{name: row[name] for name in DESCRIBED},
        )
        for _, row in first.iterrows()
    ]

    def place(info: SettingInfo) -> tuple:
        most = info.code_bits if info.code_bits is not None else info.effective_bits or 0.0
        return (info.name != REFERENCE, info.kind != "full", info.kind == "prune", -most, info.name)

    return sorted(known, key=place)


def _check_prompts(frame: pd.DataFrame, row: np.ndarray, column: np.ndarray) -> None:
    if "prompt_hash" not in frame:
        return
    prompt = frame["prompt_hash"].astype(object)
    own = np.full(row.max() + 1, None, dtype=object)
    own[row[column == 0]] = prompt[column == 0]
    both = prompt.notna().to_numpy() & pd.notna(own[row])
    differs = both & (prompt.to_numpy() != own[row])
    if differs.any():
        first = frame[differs].iloc[0]
        raise UsageError(
            f"setting {first['setting']} answered another prompt than {REFERENCE} in task {first['task']}, example "
            f"{first['example_id']}, seed {first['seed']} (prompt_hash differs); only equal prompts can be paired"
        )


def _grid(values: pd.Series, row: np.ndarray, column: np.ndarray, rows: int, columns: int) -> np.ndarray:
    grid = np.full((rows, columns), np.nan)
    grid[row, column] = values.to_numpy(dtype=float)
    return grid


def _outcome_codes(frame: pd.DataFrame) -> pd.Series:
    """Equal numbers for rows of one setting that came out alike in all that was recorded."""
    names = [name for name in _OUTCOMES if name in frame]
    code = np.zeros(len(frame), dtype=np.int64)
    for name in names:
        part, _ = pd.factorize(frame[name], use_na_sentinel=True)
        code, _ = pd.factorize(code * (int(part.max()) + 2) + part + 1)
    return pd.Series(code, index=frame.index)


def _repeats(units: pd.DataFrame, outcome: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows [U] stay in the means, and which are evidence.

    A seed is left out where it repeats an earlier one in every example that both were run on. Within an
    example, equal outcomes count once; they still weigh in its mean, which would be biased otherwise.
    """
    whole = np.where(np.isnan(outcome), -1, outcome).astype(np.int64)
    example, seed = units[["task", "example_id"]].apply(tuple, axis=1), units["seed"].to_numpy()
    keep, fresh = np.ones(len(units), bool), np.ones(len(units), bool)
    if len(np.unique(seed)) == 1:
        return keep, fresh
    runs: dict[tuple, dict[int, list[int]]] = {}
    for i, key in enumerate(example):
        runs.setdefault(key, {}).setdefault(seed[i], []).append(i)
    turns = units["turn"].to_numpy()

    def result(rows: list[int]) -> tuple:
        return tuple((turns[i], whole[i].tobytes()) for i in rows)

    alike: dict[tuple[int, int], bool] = {}
    for by_seed in runs.values():
        results = {s: result(rows) for s, rows in sorted(by_seed.items())}
        seen: set[tuple] = set()
        for s, outcome_of_s in results.items():
            if outcome_of_s in seen:
                fresh[by_seed[s]] = False
            seen.add(outcome_of_s)
            for earlier in (e for e in results if e < s):
                same = results[earlier] == outcome_of_s
                alike[earlier, s] = alike.get((earlier, s), True) and same
    for by_seed in runs.values():
        kept: list[int] = []
        for s in sorted(by_seed):
            if any(alike[earlier, s] for earlier in kept):
                keep[by_seed[s]] = False
            else:
                kept.append(s)
    return keep, fresh


def _cluster_starts(units: pd.DataFrame) -> np.ndarray:
    key = units[["task", "cluster"]]
    return np.flatnonzero((key != key.shift()).any(axis=1).to_numpy())


def _cluster_means(grid: np.ndarray, starts: np.ndarray) -> np.ndarray:
    known = ~np.isnan(grid)
    number = np.add.reduceat(known.astype(int), starts, axis=0)
    total = np.add.reduceat(np.where(known, grid, 0.0), starts, axis=0)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _row_sizes(away: np.ndarray, starts: np.ndarray) -> np.ndarray:
    squares, cubes = (np.add.reduceat(away**power, starts, axis=0) for power in (2, 3))
    return np.where(squares > 0, cubes / np.where(squares > 0, squares, 1.0), 0.0)


def _canonical_order(paired: PairedScores) -> np.ndarray:
    """Clusters by task and outcome, so that neither row order nor the examples' names touch the resampling."""
    tables = [table for name in paired.measures for table in (paired.references[name], paired.measures[name])]
    keys = [column for table in (*tables, paired.row_sizes) for column in table.T]
    return np.lexsort([paired.sizes, *reversed(keys), paired.tasks])
