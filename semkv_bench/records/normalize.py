"""Records checked as a whole, and completed: what one row cannot tell."""

import shlex
from collections.abc import Hashable, Iterable
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd

from semkv_bench.errors import UsageError
from semkv_bench.records.columns import (
    Complaint,
    RunComplaint,
    Where,
    descriptions,
    flags,
    kinds,
    numbers,
    texts,
    whole_numbers,
)
from semkv_bench.records.schema import COLUMNS, NEEDED, PLACE, REFERENCE, UNIT, plain_name

__all__ = ["normalize"]

_SAME_BITS = 1e-6


# Two-level and pruning allocations round to whole tokens, so recorded bits may move a little with the prompt.
_MIXED_BITS = 0.05


# Bits may be written with one decimal; no cache value takes more than a float32.
_ROUNDED_BITS, _MOST_BITS = 0.05, 32


# Scores are exact; token-level measures are means in half precision.
_ROUNDED = {"score": 0.0, "top1_agreement": 1e-3, "agreement": 1e-3, "kl": 1e-3}


_SHARES = ("score", "top1_agreement", "agreement")


_BITS = ("code_bits", "packed_bits", "effective_bits")


def normalize(
    frame: pd.DataFrame, source: str = "records", *, where: Where | None = None, model: str | None = None
) -> pd.DataFrame:
    """Checked copy of ``frame`` with all record columns, sorted by example, seed, turn and setting.

    ``source`` names the records in messages, ``where`` a row by its position; records of a run folder name their
    file and line (``PLACE``). Doing it twice changes nothing.

    Raises UsageError as :func:`read_records`.
    """
    _check_names(frame, source)
    missing = [name for name in NEEDED if name not in frame.columns]
    if missing:
        raise UsageError(
            f"{source}: no column {', '.join(missing)}; needed are {', '.join(NEEDED)}, "
            f"found {', '.join(map(str, frame.columns)) or 'none'}"
        )
    if frame.empty:
        raise UsageError(f"{source} holds no records")
    frame = frame.reset_index(drop=True).copy()
    fail = Complaint(source, where or (lambda i: f"row {i + 1}"))
    if where is None and set(PLACE) <= set(frame.columns):
        fail = RunComplaint(frame)
        source = fail.source
    for name in ("model", "protocol", "quantizer", "kind"):
        frame[name] = texts(frame, name, None)
    frame = _one_model(frame, source, model)
    for name in ("task", "example_id", "setting"):
        frame[name] = texts(frame, name, fail)
    _check_spelling(frame["setting"], source)
    cluster = texts(frame, "cluster", None)
    frame["cluster"] = cluster.where(cluster.notna(), frame["example_id"])
    _check_clusters(frame, fail)
    for name in ("seed", "turn"):
        frame[name] = whole_numbers(frame, name, fail)
    for name in (*_BITS, "cache_bits", "read_bits", "score", "kl", "top1_agreement", "agreement", "nll"):
        frame[name] = numbers(frame, name, fail)
    frame["runaway"] = flags(frame, fail)
    frame["kind"] = kinds(frame, fail)
    frame = frame.assign(**descriptions(frame))
    _check_measures(frame, fail)
    _check_cache_bits(frame, fail)
    _check_unique(frame, fail)
    _check_one_protocol(frame, source)
    frame = _complete_bits(frame, source)
    _check_reference(frame, source)
    return frame.sort_values([*UNIT, "setting"], kind="stable").reset_index(drop=True)


def _check_names(frame: pd.DataFrame, source: str) -> None:
    """A column that is known under another spelling would go unread."""
    for name in frame.columns:
        meant = plain_name(name)
        if name != meant and meant in COLUMNS and meant not in frame.columns:
            raise UsageError(f"{source}: column {name} must be called {meant}, in lower case")


def _check_spelling(settings: pd.Series, source: str) -> None:
    meant = [name for name in settings.unique() if plain_name(name) == REFERENCE]
    if meant and REFERENCE not in meant:
        raise UsageError(
            f"{source}: the setting {meant[0]}, the reference, must be called {REFERENCE}, in lower case"
        )


def _check_measures(frame: pd.DataFrame, fail: Complaint) -> None:
    """Scores and shares within 0..1, divergences and turns not negative."""
    missing = frame["score"].isna()
    fail(missing, lambda i: "score is missing or NaN", "leave the row out or give it a score")
    for name in _SHARES:
        share = frame[name]
        low, high = share.min(), share.max()
        hint = f"{name} looks like 0..100, divide it by 100" if low >= 0 and 1.5 < high <= 100 else ""
        outside = (share < -_ROUNDED[name]) | (share > 1 + _ROUNDED[name])
        fail(outside, partial(_outside, frame, name), hint)
    fail(
        frame["kl"] < -_ROUNDED["kl"],
        lambda i: f"kl {frame['kl'][i]:g} (setting {frame['setting'][i]}) is negative; a divergence never is",
    )
    fail(
        frame["nll"] < 0,
        lambda i: (
            f"nll {frame['nll'][i]:g} (setting {frame['setting'][i]}) is negative; a likelihood is at most 1"
        ),
    )
    fail(frame["turn"] < 0, lambda i: f"turn {frame['turn'][i]} is negative; turns are counted from 0")


def _outside(frame: pd.DataFrame, name: str, row: Hashable) -> str:
    return f"{name} {frame[name][row]:g} (setting {frame['setting'][row]}) is outside 0..1"


def _one_model(frame: pd.DataFrame, source: str, model: str | None) -> pd.DataFrame:
    found = frame["model"].dropna().unique().tolist()
    if model is not None:
        if model not in found:
            held = f"holds {_names(found)}" if found else "has no column model"
            raise UsageError(f"{source} has no rows of model {model}; it {held}")
        return frame[frame["model"] == model]
    if len(found) > 1:
        raise UsageError(
            f"{source} holds {len(found)} models ({_names(found)}), which are never pooled; "
            f"choose one with {_chosen(sorted(found)[0])}"
        )
    if found and frame["model"].isna().any():
        raise UsageError(
            f"{source} has rows without a model beside rows of {found[0]}; choose them with {_chosen(found[0])}"
        )
    return frame


def _chosen(model: str) -> str:
    """The argument that chooses ``model``, quoted for a shell where its name needs that."""
    return shlex.quote(f"model={model}")


def _names(found: Iterable[str], most: int = 4) -> str:
    names = sorted(found)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _check_unique(frame: pd.DataFrame, fail: Complaint) -> None:
    keys = [*UNIT, "setting"]
    again = frame.duplicated(keys)
    if not again.any():
        return
    second = frame.index[again.to_numpy()][0]
    same = (frame[keys] == frame.loc[second, keys]).all(axis=1)
    first = frame.index[same.to_numpy()][0]
    row = frame.loc[second]
    both = frame.loc[[first, second]]
    reason = ""
    for name, plural in (("quantizer", "quantizers"), ("protocol", "protocols")):
        if both[name].nunique() > 1:
            reason = f"; they are of different {plural}, which need files or setting names of their own"
    raise UsageError(
        f"{fail.place(second)} repeats {fail.where(first)}: task {row['task']}, example {row['example_id']}, "
        f"seed {row['seed']}, turn {row['turn']}, setting {row['setting']}{reason}"
    )


def _check_clusters(frame: pd.DataFrame, fail: Complaint) -> None:
    several = frame.groupby(["task", "example_id"])["cluster"].transform("nunique") > 1
    fail(
        several,
        lambda i: f"example {frame['example_id'][i]} of task {frame['task'][i]} is in more than one cluster",
        "give all rows of an example the same cluster",
    )


def _check_one_protocol(frame: pd.DataFrame, source: str) -> None:
    found = frame["protocol"].dropna().unique().tolist()
    if len(found) > 1:
        raise UsageError(
            f"{source} holds {len(found)} protocols ({_names(found)}), which are never pooled; "
            "keep the rows of one"
        )


def _complete_bits(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """One value of each kind of bits per setting; where ``full`` leaves some out, as it stores its codes, or 16."""
    frame = frame.copy()
    full = frame["kind"] == "full"
    for name, before in zip(_BITS, (None, *_BITS), strict=False):
        own = 16.0 if before is None else frame[before]
        frame[name] = frame[name].where(~full | frame[name].notna(), own)
    for setting, rows in frame.groupby("setting", sort=True):
        kind = rows["kind"].iloc[0]
        if kind in ("uniform", "mixed") and rows["code_bits"].isna().any():
            raise UsageError(
                f"{source}: setting {setting} lacks code_bits in {_rows(rows['code_bits'].isna())}"
            )
        for name in _BITS:
            bits = rows[name].dropna()
            if bits.empty:
                continue
            low, high = float(bits.min()), float(bits.max())
            if low <= 0 or high > _MOST_BITS:
                wrong = low if low <= 0 else high
                raise UsageError(
                    f"{source}: setting {setting} has {name} {wrong:g}; bits per value are above 0 and at most "
                    f"{_MOST_BITS}"
                )
            allowed = _MIXED_BITS * high if kind in ("mixed", "prune") else _SAME_BITS
            if high - low > allowed:
                raise UsageError(
                    f"{source}: setting {setting} has different {name} ({low:g} and {high:g}); "
                    "give each setting a name of its own"
                )
            frame.loc[rows.index, name] = low if high - low <= _SAME_BITS else float(np.sort(bits).mean())
    _check_bits(frame, source)
    return frame


def _check_cache_bits(frame: pd.DataFrame, fail: Complaint) -> None:
    """Bits per value of a whole cache differ from row to row; 0 is one of which nothing is left."""
    bits = frame["cache_bits"]
    fail(
        (bits < 0) | (bits > _MOST_BITS),
        lambda i: f"cache_bits {bits[i]:g} are not bits per value, from 0 to {_MOST_BITS}",
    )


def _check_bits(frame: pd.DataFrame, source: str) -> None:
    """Packing and metadata add to the codes, and no setting codes in more bits than the reference."""
    settings = frame.drop_duplicates("setting").set_index("setting").sort_index()
    most = settings["code_bits"].get(REFERENCE)
    for setting, row in settings.iterrows():
        # The codes of a pruned setting are those of the tokens it keeps, its stored bits an average over all.
        given = [(name, row[name]) for name in _BITS if not np.isnan(row[name]) and row["kind"] != "prune"]
        for (less, fewer), (more, bits) in pairwise(given):
            if bits < fewer - _ROUNDED_BITS:
                raise UsageError(
                    f"{source}: setting {setting} has {more} {bits:g} below its {less} {fewer:g}; packing and "
                    "metadata only add bits"
                )
        if most is not None and row["code_bits"] > most + _ROUNDED_BITS:
            raise UsageError(
                f"{source}: setting {setting} has code_bits {row['code_bits']:g}, more than the {most:g} of "
                f"{REFERENCE}; {REFERENCE} is the reference in full precision"
            )


def _rows(mask: pd.Series) -> str:
    number = int(mask.sum())
    return "1 row" if number == 1 else f"{number} rows"


def _check_reference(frame: pd.DataFrame, source: str) -> None:
    reference = frame[frame["setting"] == REFERENCE]
    if reference.empty:
        raise UsageError(
            f"{source} has no rows of the setting {REFERENCE}, the 16-bit reference that all others are "
            f"paired with; it holds {_names(frame['setting'].unique())}"
        )
    others = frame[frame["setting"] != REFERENCE]
    if others.empty:
        raise UsageError(f"{source} holds only the setting {REFERENCE}; there is nothing to compare")
    units = pd.MultiIndex.from_frame(reference[UNIT])
    shared = pd.Series(pd.MultiIndex.from_frame(others[UNIT]).isin(units), index=others.index)
    none = ~shared.groupby(others["setting"]).any()
    if none.any():
        raise UsageError(
            f"{source}: setting {none.index[none.to_numpy()][0]} shares no example with {REFERENCE} "
            "(same task, example_id, seed and turn); nothing can be paired"
        )
