"""Hydra's launchers, and the packages that bring them."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from semkv_bench.errors import MissingError, UsageError

__all__ = ["LAUNCHER_PACKAGES", "launcher_of"]


LAUNCHER_PACKAGES = {
    "joblib": "hydra-joblib-launcher",
    "ray": "hydra-ray-launcher",
    "ray_aws": "hydra-ray-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}


_HERE = "basic"


def launcher_of(overrides: Sequence[str]) -> str:
    """Name of the launcher that ``overrides`` choose.

    Raises:
        UsageError: there is no such launcher, or several are asked for.
        MissingError: it is a plugin that is not installed.
    """
    chosen = [o.partition("=")[2] for o in overrides if o.lstrip("+").startswith("hydra/launcher=")]
    launcher = chosen[-1] if chosen else _HERE
    if launcher != _HERE and launcher not in LAUNCHER_PACKAGES:
        known = ", ".join([_HERE, *LAUNCHER_PACKAGES])
        raise UsageError(f"there is no hydra/launcher {launcher!r}; choose one of {known}")
    if launcher != _HERE:
        try:
            version(LAUNCHER_PACKAGES[launcher])
        except PackageNotFoundError:
            raise MissingError(
                f"hydra/launcher={launcher} is not installed: pip install {LAUNCHER_PACKAGES[launcher]}"
            ) from None
    return launcher
