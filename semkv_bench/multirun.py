"""``sweep -m``: the sweep under Hydra's multirun, with whichever launcher is installed."""

import os
import sys
from collections.abc import Sequence

import hydra
from omegaconf import DictConfig

from semkv_bench.config import check_config, check_sweeps, conf_dir

__all__ = ["multirun"]


def multirun(overrides: Sequence[str]) -> int:
    """Run one sweep per combination of the comma-separated choices in ``overrides``.

    Each is a run folder of its own. Raises UsageError for overrides that do not compose.
    """
    check_sweeps("sweep", [o for o in overrides if not o.lstrip("+").startswith("hydra")])
    launch = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="sweep")(_job)
    # Without it Hydra prints a failed job's traceback and exits by itself.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    own, sys.argv = sys.argv, [sys.argv[0], "--multirun", "hydra.output_subdir=null", *overrides]
    try:
        launch()
    finally:
        sys.argv = own
    return 0


def _job(config: DictConfig) -> None:
    from semkv_bench.cli import sweep_once

    sweep_once(check_config("sweep", config))
