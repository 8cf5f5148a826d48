"""How long a sweep will take: a short calibration of this machine, kept, and what follows from it for a plan."""

import json
import math
import time
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from semkv_bench.engine.options import PACKED, ROWS
from semkv_bench.errors import SemkvError
from semkv_bench.files import cache_dir, parse_json, write_atomically
from semkv_bench.models.device import describe
from semkv_bench.plan.memory import Weights, target_device
from semkv_bench.plan.plan import Plan, prompt_hash
from semkv_bench.settings.setting import FULL
from semkv_bench.tasks import Example

__all__ = ["Calibration", "Duration", "calibrate", "estimate_time", "stored_calibrations"]

_STEPS = 8
_FARTHEST = 3.0  # times the size of the model that was measured


@dataclass(frozen=True)
class Calibration:
    """Seconds measured on one machine with one model; ``parameters`` scales them to another.

    prefill: per prompt token; code: per prompt token and row beyond the first, the forced answer included; step: of
    one decoding step with one row; row: what each further row adds to a step. tokens and rows: of the measurement.
    store: how rows held what is coded, which tells of no other store.
    """

    model: str
    parameters: int
    dtype: str
    machine: str
    tokens: int
    rows: int
    prefill: float
    code: float
    step: float
    row: float
    measured: str
    store: str = ROWS

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a newer measurement replaces."""
        return (self.model, self.dtype, self.machine, self.store)


@dataclass(frozen=True)
class Duration:
    """Seconds if every answer ends at its first token (least) and if each runs to its limit (most)."""

    least: float
    most: float
    basis: str
    calibration: Calibration


def calibrate(plan: Plan, parameters: int) -> Calibration:
    """Load the plan's model, run its example of median length four times, and keep what that took."""
    session = plan.engine.open(plan.source)
    loaded = session.loaded
    example = sorted(plan.examples, key=lambda e: (len(e.input_ids), e.example_id))[len(plan.examples) // 2]

    def seconds(settings, new_tokens: int) -> float:
        # No row may end early, or the steps would be fewer than counted.
        asked = replace(example, max_new_tokens=new_tokens, min_new_tokens=new_tokens, follow_ups=())
        _finish(loaded.device)
        began = time.perf_counter()
        list(session.answers([asked], settings, plan.protocol, [False]))
        _finish(loaded.device)
        return time.perf_counter() - began

    alone, every = (FULL,), plan.settings
    # First calls allocate and compile.
    seconds(every, 1)
    short, long = seconds(alone, 1), seconds(alone, 1 + _STEPS)
    wide, full = seconds(every, 1), seconds(every, 1 + _STEPS)
    tokens, further = len(example.input_ids), max(1, len(every) - 1)
    step = max(0.0, long - short) / _STEPS
    measured = Calibration(
        model=plan.source.name,
        parameters=parameters,
        dtype=str(loaded.dtype).removeprefix("torch."),
        machine=machine(loaded.device),
        tokens=tokens,
        rows=len(every),
        prefill=short / tokens,
        code=max(0.0, wide - short) / (tokens * further),
        step=step,
        row=max(0.0, (full - wide) / _STEPS - step) / further,
        measured=datetime.now(UTC).date().isoformat(),
        store=PACKED if PACKED in session.engine.stores else ROWS,
    )
    _store(measured)
    return measured


def stored_calibrations() -> list[Calibration]:
    """What was measured before, on this machine and others that share the cache folder."""
    names = {field.name for field in fields(Calibration)}
    try:
        entries = parse_json(_file().read_bytes())
        return [Calibration(**{k: v for k, v in entry.items() if k in names}) for entry in entries]
    except (OSError, ValueError, TypeError, AttributeError):
        return []


def machine(device: torch.device) -> str:
    """What a measurement holds for: the device, and on a CPU its threads."""
    found = describe(device)
    return found["device"] if device.type == "cuda" else f"{found['cpu']}, {found['threads']} threads"


def estimate_time(plan: Plan, weights: Weights, batch_rows: int, store: str = ROWS) -> Duration | None:
    """From the calibration of this machine with this model, or else with the one nearest in size.

    None without any, and where the nearest is so much smaller or larger that its times say nothing: the parts of a
    sweep grow with the size of a model each in its own way.
    """
    where = machine(target_device(plan.source.device_map))
    here = [entry for entry in stored_calibrations() if (entry.machine, entry.store) == (where, store)]
    if not here:
        return None
    own = [entry for entry in here if entry.model == plan.source.name]
    nearest = min(own or here, key=lambda entry: abs(math.log(entry.parameters / weights.parameters)))
    factor = 1.0 if own else weights.parameters / nearest.parameters
    if not 1 / _FARTHEST <= factor <= _FARTHEST:
        return None
    least = sum(_seconds(plan, nearest, example, batch_rows, least=True) for example in _distinct(plan))
    most = sum(_seconds(plan, nearest, example, batch_rows, least=False) for example in _distinct(plan))
    alone = min(plan.engine.noise_examples, len(plan.share)) * nearest.step
    limit = max(example.max_new_tokens for example in plan.examples)
    basis = f"{nearest.model} at {nearest.tokens} tokens on {nearest.machine}, {nearest.measured}"
    if not own:
        basis += f", scaled by {factor:.3g} for the size of the model"
    return Duration((least + alone) * factor, (most + alone * limit) * factor, basis, nearest)


def _seconds(plan: Plan, measured: Calibration, example: Example, batch_rows: int, least: bool) -> float:
    rows = len(plan.settings)
    batches = -(-rows // batch_rows)
    turns = (example, *example.follow_ups)
    steps = sum(1 if least else turn.max_new_tokens for turn in turns)
    tokens = sum(len(turn.input_ids) for turn in turns)
    prefill = len(example.input_ids) * measured.prefill
    # Questions of later turns are fed to every row.
    prefill += (tokens - len(example.input_ids)) * measured.prefill * rows
    step = batches * measured.step + (rows - batches) * measured.row
    return prefill + tokens * (rows - 1) * measured.code + steps * step


def _distinct(plan: Plan) -> list[Example]:
    """The share's examples without those whose records are copied from the same item under another seed."""
    if not plan.repeats_alike:
        return list(plan.share)
    return list({(e.task, e.example_id, prompt_hash(e)): e for e in plan.share}.values())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _file() -> Path:
    return cache_dir() / "calibration.json"


def _store(measured: Calibration) -> None:
    kept = [entry for entry in stored_calibrations() if entry.key != measured.key]
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(entry) for entry in [*kept, measured]], indent=1) + "\n"
        write_atomically(_file(), text)
    except OSError as error:
        raise SemkvError(
            f"cannot keep the calibration in {_file()}: {error.strerror}; set SEMKV_CACHE"
        ) from error
