"""Importance metrics of the user's own: ``DIR/metric/mine.yaml`` in a folder of theirs makes ``mine`` known."""

import importlib
from pathlib import Path

from omegaconf import OmegaConf

from semkv_bench.config.own import METRICS, own_folders
from semkv_bench.errors import UsageError
from semkv_bench.importance.base import Metric

__all__ = ["import_own_metrics"]


def import_own_metrics() -> None:
    """Make the metrics of the user's folders known.

    Raises:
        UsageError: a metric's file that names no importance metric, or another than its file name says.
    """
    for folder in own_folders():
        for path in sorted((folder / METRICS).glob("*.yaml")):
            _import_metric(path)


def _import_metric(path: Path) -> None:
    try:
        module, _, name = str(OmegaConf.load(path).get("_target_") or "").rpartition(".")
        found = getattr(importlib.import_module(module), name, None) if module else None
    except Exception as error:  # whatever the user's module raises
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: {type(error).__name__}: {reason}") from error
    if not isinstance(found, type) or not issubclass(found, Metric):
        raise UsageError(f"{path}: _target_ must name a subclass of semkv_bench.importance.Metric")
    if found.name != path.stem:
        raise UsageError(f"{path}: its metric is called {found.name}; name the file {found.name}.yaml")
