"""The calibrations that a sweep's settings take their numbers from: found, checked, and told in the charter."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.models.rotary import check_rotary
from semkv_bench.quantizers import Quantizer, calibration
from semkv_bench.quantizers.side import Side
from semkv_bench.settings.setting import Coded, Setting

__all__ = ["calibrated", "calibrations_told", "check_text"]


def calibrated(settings: Sequence[Setting], source: Any) -> tuple[Setting, ...]:
    """The settings with a calibration of the model ``source`` for every method that has to be fitted.

    Raises:
        UsageError: a calibration that is named is of another model or other options, several fit and none is named, or
            the model's rotary embedding cannot be undone.
        MissingError: there is no calibration that fits.
    """
    quantizers = {side.quantizer for setting in settings for side in _sides(setting)}
    if any(quantizer.positional for quantizer in quantizers):
        who = next(quantizer.name for quantizer in quantizers if quantizer.positional)
        check_rotary(source.config(), source.name, who)
    fitted = {each: _with_file(each, source) for each in quantizers if each.calibrated}
    if not fitted:
        return tuple(settings)
    return tuple(
        replace(setting, **{name: _changed(getattr(setting, name), fitted) for name in ("keys", "values")})
        for setting in settings
    )


def calibrations_told(settings: Sequence[Setting]) -> dict[str, Any]:
    """What the charter says of the calibrations, by method; nothing where there are none."""
    found = {}
    for setting in settings:
        for side in _sides(setting):
            if side.quantizer.calibrated:
                read = calibration.read(side.quantizer.calibration)
                found[side.quantizer.name] = {
                    "file": read.path.name,
                    "sha256": read.sha256,
                    **{name: read.about[name] for name in ("text", "sequences", "length")},
                }
    return {"calibrations": found} if found else {}


def check_text(settings: Sequence[Setting], task: Any) -> None:
    """Raise UsageError where the text that a method is fitted to is the one that it is measured on."""
    path = getattr(task, "path", None)
    if path is None or not Path(path).expanduser().is_file():
        return
    digest = hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()
    for method, told in calibrations_told(settings).get("calibrations", {}).items():
        if told["text"]["sha256"] == digest:
            raise UsageError(
                f"{method} is calibrated on {path}, the text that it would be measured on; calibrate on another text"
            )


def _sides(setting: Setting) -> list[Coded]:
    return [side for side in (setting.keys, setting.values) if side is not None]


def _changed(side: Coded | None, fitted: Mapping[Quantizer, Quantizer]) -> Coded | None:
    if side is None or side.quantizer not in fitted:
        return side
    return replace(side, quantizer=fitted[side.quantizer])


def _with_file(side: Side, source: Any) -> Side:
    problem = partial(_misfit, side, source.name, source.weights())
    if side.calibration is not None:
        if (wrong := problem(calibration.read(side.calibration).about)) is not None:
            raise UsageError(f"the calibration {side.calibration} {wrong}; {_command(side, source)}")
        return side
    fitting = [path for path, about in calibration.headers().items() if problem(about) is None]
    if not fitting:
        raise MissingError(
            f"{side.name} is fitted to a model, and {calibration.CALIBRATIONS} has no calibration of {source.name} "
            f"that fits: {_command(side, source)}"
        )
    if len(fitting) > 1:
        raise UsageError(
            f"several calibrations of {side.name} fit {source.name}; name one by quantizer.calibration=FILE: "
            f"{', '.join(map(str, fitting))}"
        )
    return replace(side, calibration=str(fitting[0]))


def _misfit(side: Side, model: str, weights: Mapping[str, Any], about: Mapping[str, Any]) -> str | None:
    """Why a calibration is not for this side of this model; None: it is."""
    if about["method"] != side.name:
        return f"is of {about['method']}, not of {side.name}"
    if about["model"]["weights"] != weights:
        return f"is of another model or revision ({about['model']['name']}, not this {model})"
    if about["fits"].get(side.side) != side.fit_key:
        return f"is of {side.name} with other options of its {side.side}"
    return None


def _command(side: Side, source: Any) -> str:
    return f"semkv-bench calibrate model=... quantizer={side.name} (with the same options of model and quantizer)"
