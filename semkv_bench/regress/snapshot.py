"""A run boiled down to what two runs are compared by; a baseline is one of these in a JSON file."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hydra.utils import get_object

from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.files import parse_json, write_atomically
from semkv_bench.grid.cost import LayerShape, SideShape
from semkv_bench.models.shape import ModelShape
from semkv_bench.records.schema import REFERENCE, UNIT
from semkv_bench.stats import StatsOptions, analyze
from semkv_bench.stats.result import OperatingPoint

__all__ = [
    "Snapshot",
    "completed",
    "from_run",
    "planned_identity",
    "read_baseline",
    "through_json",
    "write_baseline",
]

SCHEMA = 1
_MEASURES = ("score", "kl", "new_tokens", "runaway", "quantized_reads")
_BITS = ("code_bits", "packed_bits", "effective_bits")
# What two runs must share to be comparable; sample, storage figures and code are what may differ.
_SHARED = (
    "model", "quantizer", "value_quantizer", "protocol", "head_dim", "task", "tasks", "prompts",
    "max_prompt_tokens", "max_new_tokens",
)  # fmt: skip
_SHARED_STATS = ("margin", "alpha", "average")
_HEAD = ("identity", "shape", "layers", "sample", "environment", "settings", "cliff", "operating_point")
_VERSIONS = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class Snapshot:
    """What a run measured, with what the code did on fixed tensors at the time.

    identity: what must agree for a comparison to make sense.
    shape: of the model's cache; layers: how many of them the run quantized.
    sample: seeds, per_task, planned examples, and whether what is stored depends on the seed.
    settings: name to kind, bits and verdict, the reference first.
    units: (task, example, seed, turn), sorted; prompts: hash of the prompt of each.
    measures: score, kl, new_tokens, runaway and quantized_reads, arrays [units, settings], NaN where absent.
    checks: see ``code_checks``.
    """

    identity: dict[str, Any]
    shape: dict[str, Any]
    layers: dict[str, int]
    sample: dict[str, Any]
    environment: dict[str, Any]
    settings: dict[str, dict[str, Any]]
    cliff: dict[str, Any]
    operating_point: dict[str, Any] | None
    units: list[tuple[str, str, int, int]]
    prompts: list[str]
    measures: dict[str, np.ndarray] = field(repr=False)
    checks: dict[str, dict[str, Any]] = field(repr=False)

    @property
    def names(self) -> list[str]:
        """Settings in the order of the columns, the reference first."""
        return list(self.settings)

    @property
    def label(self) -> str:
        """Model and quantizer in words."""
        kinds = {row["quantizer"] for row in self.settings.values() if row["quantizer"]}
        return f"{'+'.join(sorted(kinds)) or 'cache'} on {self.identity['model']}"

    def model_shape(self) -> ModelShape:
        """Shape of the model's cache."""
        if "cache" in self.shape:
            return ModelShape.from_json(self.shape)
        # Baselines from before layers were told apart.
        side = SideShape(self.shape["kv_heads"], self.shape["head_dim"])
        coded = self.shape["quantized_layers"]
        layers = tuple(LayerShape(side, side, coded=i in coded) for i in range(self.shape["layers"]))
        return ModelShape(layers, self.shape["max_positions"])


def from_run(
    frame: pd.DataFrame,
    charter: Mapping[str, Any],
    shape: ModelShape,
    checks: dict,
    environment: Mapping[str, Any],
    *,
    seeded: bool,
) -> Snapshot:
    """Snapshot of a run's records and protocol; verdicts, cliff and operating point are computed here.

    seeded: does the seed change what is stored (``Setting.seeded`` of any setting)?

    Raises UsageError for records that cannot be analysed, and for a run whose settings differ in their examples.
    """
    options = StatsOptions(**charter["stats"])
    if options.race:
        raise UsageError(
            "a raced run has settings that left early; regress compares whole runs: stats.race=false"
        )
    report = analyze(frame, options, chance=charter["chance"], preregistered=True)
    rows = {row.setting: row for row in report.settings}
    kept = ("kind", "quantizer", *_BITS, "verdict")
    settings = {name: {key: getattr(rows[name], key) for key in kept} for name in rows}
    frame = frame.sort_values([*UNIT, "setting"], ignore_index=True)
    reference = frame[frame["setting"] == REFERENCE]
    units = [(str(t), str(e), int(s), int(n)) for t, e, s, n in reference[UNIT].itertuples(index=False)]
    return Snapshot(
        identity=_identity(frame, charter),
        shape=shape.to_json(),
        layers=dict(charter["layers"]),
        sample={
            **{name: charter[name] for name in ("seeds", "per_task")},
            "planned": charter["examples"]["count"],
            "seeded": seeded,
        },
        environment=_versions(environment),
        settings=settings,
        cliff={k: getattr(report.cliff, k) for k in ("status", "lower_bits", "upper_bits")},
        operating_point=_point(report.operating_point),
        units=units,
        prompts=[str(text) for text in reference["prompt_hash"]],
        measures={name: _table(frame, name, units, list(settings)) for name in _MEASURES},
        checks=checks,
    )


def through_json(snapshot: Snapshot) -> Snapshot:
    """The snapshot as it comes back from a file."""
    return _from_json(json.loads(_to_json(snapshot)))


def write_baseline(snapshot: Snapshot, path: Path) -> None:
    """Write ``snapshot`` as JSON, all or nothing.

    Raises SemkvError if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _to_json(snapshot))
    except OSError as error:
        raise SemkvError(f"cannot write the baseline {path}: {error.strerror or error}") from error


def read_baseline(path: Path) -> Snapshot:
    """The baseline in ``path``.

    Raises:
        MissingError: there is no such file.
        UsageError: it holds something else.
    """
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise MissingError(
            f"there is no baseline {path}; from a tree you trust, write it with --update added to this command"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"the baseline {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} is not a baseline of this version (schema {SCHEMA}); write it anew with --update"
        )
    try:
        return _from_json(content)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"the baseline {path} is damaged ({type(error).__name__}: {error}); write it anew"
        ) from error


def planned_identity(charter: Mapping[str, Any]) -> dict[str, Any]:
    """What of the identity is known before anything is run."""
    config = {k: v for k, v in charter["model_config"].items() if k in ("dtype", "attention")}
    task = charter["task"]
    if isinstance(task, Mapping):
        # Where data lie differs from machine to machine; what was read shows in the hashes of the prompts.
        task = {name: value for name, value in task.items() if not name.endswith("path")}
    return {
        **{name: charter[name] for name in _SHARED},
        "protocol_config": charter.get("protocol_config"),
        "task": task,
        **config,
        "engine": {k: v for k, v in charter["engine"].items() if k != "noise_examples"},
        "stats": {name: charter["stats"][name] for name in _SHARED_STATS},
        "grid": list(charter["settings"]),
    }


def completed(part: Any) -> Any:
    """A part of an identity, with the defaults of what it names by ``_target_`` where it says nothing.

    So an option that came after a baseline was written counts as its default there.
    """
    if isinstance(part, list | tuple):
        return [completed(entry) for entry in part]
    if not isinstance(part, Mapping):
        return part
    given = {str(name): completed(value) for name, value in part.items()}
    return _over(_defaults(given["_target_"]), given) if "_target_" in given else given


def _defaults(target: str) -> dict[str, Any]:
    """Defaults of a dataclass as plain data; none where there is no such class here."""
    try:
        kind = get_object(target)
    except (ImportError, ValueError, AttributeError, TypeError):
        return {}
    found = {}
    for entry in fields(kind) if is_dataclass(kind) else ():
        made = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if entry.init and made is not MISSING:
            found[entry.name] = completed(asdict(made) if is_dataclass(made) else made)
    return found


def _over(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` and what it lacks of ``defaults``; windows, which name no class, part by part."""
    found = {**defaults, **given}
    for name in defaults.keys() & given.keys():
        both = defaults[name], given[name]
        if all(isinstance(value, Mapping) and "_target_" not in value for value in both):
            found[name] = _over(*both)
    return found


def _identity(frame: pd.DataFrame, charter: Mapping[str, Any]) -> dict[str, Any]:
    revisions = sorted({str(value) for value in frame["model_revision"].dropna()})
    return {
        **planned_identity(charter),
        "model_revision": revisions[0] if len(revisions) == 1 else revisions or None,
    }


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What may explain a difference: versions and processor."""
    packages = environment.get("packages", {})
    known = {name: environment.get(name) for name in ("semkv_bench", "python", "cpu", "device", "kernels")}
    return {**known, **{name: packages.get(name) for name in _VERSIONS}}


def _point(point: OperatingPoint | None) -> dict[str, Any] | None:
    return None if point is None else {name: getattr(point, name) for name in ("setting", *_BITS)}


def _table(frame: pd.DataFrame, name: str, units: list, settings: list[str]) -> np.ndarray:
    if name not in frame:
        return np.full((len(units), len(settings)), np.nan)
    wide = frame.pivot(index=UNIT, columns="setting", values=name)
    ordered = wide.reindex(index=pd.MultiIndex.from_tuples(units, names=UNIT), columns=settings)
    return ordered.to_numpy(dtype=float)


def _to_json(snapshot: Snapshot) -> str:
    """One line an example and setting block, so that a baseline's changes can be read in a diff."""
    head = {
        "schema": SCHEMA,
        **{name: getattr(snapshot, name) for name in _HEAD},
    }
    lines = [
        f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items() if name != "settings"
    ]
    lines.append(_block("settings", snapshot.settings))
    examples = [
        json.dumps([*unit, prompt]) for unit, prompt in zip(snapshot.units, snapshot.prompts, strict=True)
    ]
    lines.append(' "units": [\n  ' + ",\n  ".join(examples) + "\n ]")
    for name, table in snapshot.measures.items():
        columns = {
            setting: [_short(value) for value in table[:, place]]
            for place, setting in enumerate(snapshot.settings)
        }
        lines.append(_block(name, columns))
    for kind, cases in snapshot.checks.items():
        lines.append(_block(f"checks: {kind}", cases))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _block(name: str, rows: Mapping[str, Any]) -> str:
    inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items())
    return f" {json.dumps(name)}: {{\n{inner}\n }}"


def _short(value: float) -> float | int | None:
    """Six significant digits, whole numbers without a point."""
    if np.isnan(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _from_json(content: Mapping[str, Any]) -> Snapshot:
    settings = content["settings"]
    units = [(str(t), str(e), int(s), int(n)) for t, e, s, n, _ in content["units"]]
    measures = {}
    for name in _MEASURES:
        columns = [content[name][setting] for setting in settings]
        measures[name] = np.array(columns, dtype=float).T.reshape(len(units), len(settings))
    prefix = "checks: "
    return Snapshot(
        **{name: content[name] for name in _HEAD},
        units=units,
        prompts=[str(row[4]) for row in content["units"]],
        measures=measures,
        checks={k.removeprefix(prefix): v for k, v in content.items() if k.startswith(prefix)},
    )
