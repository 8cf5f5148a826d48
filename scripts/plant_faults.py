"""Does `semkv-bench regress` notice? Plants faults in the code, one at a time, and runs the real command.

    python scripts/plant_faults.py [--out results/regress/planted_faults.json] [key=value ...]

Every fault is an edit of a function's source, made in this process and undone afterwards. Besides, the
untouched tree is run on the baseline's examples, which must stay green. Overrides go to every run.
"""

import argparse
import inspect
import json
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from semkv_bench.cli import main
from semkv_bench.engine import coding, decode
from semkv_bench.kernels import affine_reference, codebook_reference, packing_reference
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.quantizers import Affine, TurboQuant
from semkv_bench.settings import sets as settings

# Of every fault half of the baseline's examples; the untouched tree gets all.
FAULTY_SAMPLE = "per_task=8"


@dataclass(frozen=True)
class Fault:
    """Edits, each: the owner of a function (module or class), its name, the text to replace, its replacement."""

    name: str
    edits: tuple[tuple[Any, str, str, str], ...]
    quantizer: str = "affine"


_CODE, _TOP = (affine_reference, "_code"), (affine_reference, "_top")
_FILL, _SIDE = (coding.RowCoder, "_fill_layer"), (coding.RowCoder, "_side")
_CELL, _NORM = (codebook_reference, "_cell"), (codebook_reference, "_norm")

# The first six are the ones that the command was made for; the others are variants of them.
FAULTS = (
    Fault("rounding half up", ((*_CODE, ".round_()", ".add_(0.5).floor_()"),)),
    Fault(
        "scale (max - min)/L",
        (
            (affine_reference, "affine_quantize", "span / top", "span / (top + 1)"),
            (affine_reference, "_chunk_quantize_dequantize", "span / top", "span / (top + 1)"),
        ),
    ),
    Fault("clamp one too low", ((*_CODE, "minimum(codes, top,", "minimum(codes, top - 1,"),)),
    Fault(
        "keys and values swapped",
        ((*_SIDE, "(setting.keys, setting.values)", "(setting.values, setting.keys)"),),
    ),
    Fault(
        "one layer left unquantized",
        ((*_SIDE, "if layer in self.places", "if layer in self.places and layer != 1"),),
    ),
    Fault("levels one too many", ((*_TOP, "levels - 1", "levels"),)),
    Fault("clamp one too high", ((*_CODE, "minimum(codes, top,", "minimum(codes, top + 1,"),)),
    Fault(
        "states of keys and values swapped", ((*_FILL, "enumerate(stored)", "enumerate(reversed(stored))"),)
    ),
    Fault(
        "first layer taken for a sliding one",
        ((decode, "fill", "shape.quantized_layers", "shape.quantized_layers[1:]"),),
    ),
    Fault(
        "levels one too few in the settings",
        ((settings, "_uniform", "_grid_point(keys, key)", "_grid_point(keys, key - 1)"),),
    ),
    Fault("zeros not counted as stored", ((Affine, "metadata_bits", "32 *", "16 *"),)),
    Fault(
        "digits packed in reverse",
        ((packing_reference, "_fraction", "reversed(digits.unbind(-1))", "digits.unbind(-1)"),),
    ),
    Fault("threshold one cell off", ((*_CELL, ".floor_()", ".floor_().add_(1)"),), "turboquant"),
    Fault("norm of a shorter vector", ((*_NORM, "y, dim=-1", "y[..., 1:], dim=-1"),), "turboquant"),
    Fault(
        "one rotation for all seeds",
        ((TurboQuant, "coder", "head_dim, seed)", "head_dim, 0)"),),
        "turboquant",
    ),
)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The code with ``fault`` in it; as it was afterwards.

    Raises ValueError if the text to be replaced is not in the source any more.
    """
    before = [(owner, name, owner.__dict__[name]) for owner, name, _, _ in fault.edits]
    try:
        for owner, name, old, new in fault.edits:
            setattr(owner, name, _edited(owner, name, old, new))
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _edited(owner: Any, name: str, old: str, new: str) -> Any:
    function = inspect.unwrap(owner.__dict__[name])
    source = textwrap.dedent(inspect.getsource(function))
    if old not in source:
        raise ValueError(f"{name} does not hold {old!r} any more; bring the planted fault up to date")
    changed: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<{name} with a fault>", "exec"), function.__globals__, changed)
    return changed[name]


def run_command(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Exit code and outcome of one `semkv-bench regress`."""
    code = main(["regress", f"out={folder}", *overrides])
    content = json.loads((folder / "regress.json").read_text()) if (folder / "regress.json").exists() else {}
    return {"exit_code": code, **content}


def _row(outcome: dict[str, Any]) -> dict[str, Any]:
    findings = outcome.get("findings", [])
    witnesses = list(dict.fromkeys(finding["witness"] for finding in findings))
    return {
        "exit_code": outcome["exit_code"],
        "witnesses": witnesses,
        "findings": [f"{f['witness']}: {f['what']} [{f['certainty']}]" for f in findings],
        "cliff": outcome.get("cliff"),
    }


def _fault_row(fault: Fault, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    with planted(fault):
        outcome = run_command([f"quantizer={fault.quantizer}", FAULTY_SAMPLE, *overrides], folder)
    return {"quantizer": fault.quantizer, **_row(outcome)}


def _untouched_row(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    outcome = run_command(list(overrides), folder)
    smallest = min((shift["p_adjusted"] for shift in outcome.get("shifts", [])), default=None)
    return {
        **_row(outcome),
        "alike": outcome.get("alike"),
        "smallest_adjusted_p": smallest,
    }


def _summary(faults: dict[str, Any], untouched: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "red": f"{sum(row['exit_code'] == 1 for row in faults.values())} of {len(faults)}",
        "faults": faults,
        "untouched": untouched,
    }


def _run_all(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Every run in turn; the outcome so far is written after each."""
    faults: dict[str, Any] = {}
    untouched = None
    chosen = [fault for fault in FAULTS if given.only is None or given.only in fault.name]
    for number, fault in enumerate((*chosen, *(() if given.only else (None,)))):
        folder = scratch / str(number)
        if fault is not None:
            row = faults[fault.name] = _fault_row(fault, given.overrides, folder)
        else:
            row = untouched = _untouched_row(given.overrides, folder)
        name = "untouched" if fault is None else fault.name
        print(f"{name}: exit {row['exit_code']}, {row['witnesses']}", flush=True)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(_summary(faults, untouched), indent=1) + "\n")
    return _summary(faults, untouched)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/regress/planted_faults.json"))
    parser.add_argument("--only", help="only faults whose name holds this, and no untouched run")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    # One model serves all runs; what is planted is in the cache, not in its weights.
    EmbeddedModel.load = cache(EmbeddedModel.load)
    with tempfile.TemporaryDirectory() as scratch:
        result = _run_all(arguments, Path(scratch))
    green = result["untouched"] is None or result["untouched"]["exit_code"] == 0
    print(f"red: {result['red']}, untouched {'green' if green else 'not green'}; {arguments.out}")
    codes = [row["exit_code"] != 1 for row in result["faults"].values()]
    sys.exit(any(codes) or not green)
