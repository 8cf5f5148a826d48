"""A report in an experiment tracker: what was run, a few numbers a setting, and the files."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semkv_bench.checks import choice
from semkv_bench.errors import MissingError, SemkvError
from semkv_bench.report.formatting import known
from semkv_bench.stats.result import Report

__all__ = ["Logger", "MLflow", "WandB"]

_NUMBERS = ("score", "diff", "cache_bits", "effective_bits", "kl", "runaway_rate")
_FILES = ("report.json", "report.md", "report.html")


class Logger(ABC):
    """Somewhere else that a report is written to; subclasses are frozen dataclasses, built by ``+log=NAME``."""

    @abstractmethod
    def log(self, report: Report, folder: Path) -> str:
        """Write the report of ``folder``; what to say of it in one line.

        Raises:
            MissingError: the tracker's package is not installed.
            SemkvError: the tracker refused.
        """


@dataclass(frozen=True)
class MLflow(Logger):
    """A run of an experiment of MLflow."""

    experiment: str = "semkv-bench"
    tracking_uri: str | None = None

    def log(self, report: Report, folder: Path) -> str:
        """See ``Logger``."""
        try:
            import mlflow
        except ModuleNotFoundError as error:
            raise MissingError("+log=mlflow needs MLflow: pip install mlflow-skinny") from error
        try:
            if self.tracking_uri is not None:
                mlflow.set_tracking_uri(self.tracking_uri)
            mlflow.set_experiment(self.experiment)
            with mlflow.start_run(run_name=folder.name) as run:
                mlflow.log_params(_told(report))
                mlflow.log_metrics({_plain(name): value for name, value in _numbers(report).items()})
                for name in _FILES:
                    mlflow.log_artifact(str(folder / name))
        except Exception as error:
            raise SemkvError(f"MLflow did not take the report: {error}") from error
        return f"logged: MLflow experiment {self.experiment}, run {run.info.run_id}"


@dataclass(frozen=True)
class WandB(Logger):
    """A run of a project of Weights & Biases."""

    project: str = "semkv-bench"
    mode: str = "offline"

    def __post_init__(self) -> None:
        choice("log.mode", self.mode, ("offline", "online"))

    def log(self, report: Report, folder: Path) -> str:
        """See ``Logger``."""
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise MissingError("+log=wandb needs Weights & Biases: pip install wandb") from error
        try:
            run = wandb.init(
                project=self.project,
                name=folder.name,
                mode=self.mode,
                config=_told(report),
                settings=wandb.Settings(silent=True),
            )
            run.log(_numbers(report))
            for name in _FILES:
                run.save(str(folder / name), base_path=str(folder), policy="now")
            place = run.dir if self.mode == "offline" else run.url
            run.finish()
        except Exception as error:
            raise SemkvError(f"Weights & Biases did not take the report: {error}") from error
        return f"logged: Weights & Biases project {self.project}, {place}"


def _told(report: Report) -> Mapping[str, Any]:
    """What was measured and what came out, as few words."""
    quantizers = [report.quantizer] if isinstance(report.quantizer, str) else list(report.quantizer or ())
    point = report.operating_point
    return {
        "model": report.model,
        "quantizer": ", ".join(quantizers),
        "protocol": report.protocol,
        "margin": report.margin,
        "alpha": report.alpha,
        "examples": report.n_examples,
        "preregistered": report.preregistered,
        "cliff": report.cliff.status,
        "cliff_lower_bits": report.cliff.lower_bits,
        "cliff_upper_bits": report.cliff.upper_bits,
        "operating_point": None if point is None else point.setting,
        **{f"verdict/{_plain(row.setting)}": row.verdict for row in report.settings},
    }


def _numbers(report: Report) -> dict[str, float]:
    """Numbers of every setting, by its name."""
    return {
        f"{row.setting}/{name}": float(value)
        for row in report.settings
        for name in _NUMBERS
        if known(value := getattr(row, name))
    }


def _plain(name: str) -> str:
    """A name of letters, digits and the signs that every tracker takes."""
    return re.sub(r"[^\w./ -]", "_", name)
