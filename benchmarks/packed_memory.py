"""Memory of a generation whose context reaches 4,000 tokens: a 16-bit DynamicCache against the packed cache.

Every case runs in a process of its own and is measured from outside the cache, in four ways:

- peak_allocated: most bytes that torch's allocator had handed out at any moment of the generation, as its memory
  profiler recorded them, less that with a cache that keeps nothing, so that activations cancel;
- live: bytes of all tensor storages that exist after the generation, less those that exist after the cache is
  deleted; found by walking the garbage collector's objects, not by asking the cache;
- resident: growth of the process's resident memory over the generation, activations freed, less the growth
  with a cache that keeps nothing; it includes what the heap loses to fragmentation;
- peak_resident: highest resident memory during the generation above its start, less that with a cache that keeps
  nothing; to peak_allocated it adds what the C heap holds back of freed temporaries, some megabytes.

The factor that ``storage`` predicts is for coded tokens. It is held against ``live`` per token: the growth
from a short context to the long one, both with as many open tokens. In all, open tokens count at 16 bits and
TurboQuant's rotations as the constant that they are (16 KiB a layer and side); that prediction is held against
peak_allocated. Resident memory is a witness.

The rows of the batch are different random tokens, so that each has a cache of its own; no row ends early.
``python benchmarks/packed_memory.py --help``.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from semkv_bench import SemKVCache
from semkv_bench.engine.batching import row_bytes
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.quantizers import Affine, TurboQuant
from semkv_bench.settings.sets import TwoLevelMixes, uniform_settings
from semkv_bench.settings.setting import Setting

NOTHING, DYNAMIC = "nothing", "dynamic"
TOLERANCE = 0.02
SHORT = 264  # context of the generation that warms the process up, and that growth is counted from
# One heap, and large buffers outside of it: freed memory goes back to the system.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_MMAP_THRESHOLD_": "524288"}


def main() -> None:
    """Run every case, compare, write the outcome; exit 1 if a factor is off by more than 2 %."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=4000, help="prompt and new tokens together")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/packed_memory.json"))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case, arguments)))
        return
    cases = {case: _run_apart(case) for case in (NOTHING, DYNAMIC, *_packed_cases())}
    outcome = compare(cases, arguments)
    print(json.dumps(outcome["factors"], indent=1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")
    off = [name for name, row in outcome["factors"].items() if not row["within_tolerance"]]
    if off:
        sys.exit(f"factor off by more than {TOLERANCE:.0%}: {', '.join(off)}")


def measure(case: str, arguments: argparse.Namespace) -> dict[str, int]:
    """Bytes of one case, measured in this process."""
    torch.manual_seed(0)
    loaded = EmbeddedModel(dtype="bfloat16").load()
    short = _new_cache(case, loaded)
    _generate(loaded, short, arguments.rows, SHORT, arguments.new_tokens)
    _collect()
    live_short = _live()
    del short
    _collect()
    live_short -= _live()
    _collect()
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")
    cache = _new_cache(case, loaded)
    _generate(loaded, cache, arguments.rows, arguments.context, arguments.new_tokens)
    peak = _status("VmHWM")
    _collect()
    live = _live()
    _collect()
    resident = _resident()
    parts = vars(cache.nbytes) if isinstance(cache, SemKVCache) else None
    del cache
    _collect()
    live -= _live()
    return {
        "live": live,
        "live_short": live_short,
        "resident_above_start": resident - before,
        "peak_above_start": peak - before,
        "peak_allocated": _peak_allocated(
            lambda: _generate(
                loaded, _new_cache(case, loaded), arguments.rows, arguments.context, arguments.new_tokens
            )
        ),
        "own_account": parts,
    }


def compare(cases: dict[str, dict], arguments: argparse.Namespace) -> dict:
    """How many times smaller every packed cache is than the 16-bit one, measured and predicted."""
    full, nothing = cases[DYNAMIC], cases[NOTHING]
    factors = {}
    shape = EmbeddedModel().shape()
    for name, (setting, attention) in _packed_cases().items():
        packed = cases[name]
        share = 1 / setting.storage(shape.head_dim).compression
        # Whoever dequantizes keeps one layer in full besides.
        workspace = 1 / shape.layers if attention == "dequantize" else 0
        predicted = 1 / (share + workspace)
        # The newest token is never stored; the prompt's last one and those that follow are open.
        stored, opened = arguments.context - 1, arguments.new_tokens
        rotations = 4 * shape.head_dim**2 * 2 * shape.layers if setting.quantizer == TurboQuant.name else 0
        tokens = (stored - opened) * share + opened + stored * workspace
        per_token = row_bytes(shape, 1, torch.bfloat16.itemsize) * arguments.rows
        predicted_in_all = stored * per_token / (tokens * per_token + rotations)
        row = {
            "predicted": predicted,
            "predicted_in_all": predicted_in_all,
            "live_per_token": (full["live"] - full["live_short"]) / (packed["live"] - packed["live_short"]),
            "live_in_all": full["live"] / packed["live"],
            "resident": _share(full, nothing, "resident_above_start")
            / _share(packed, nothing, "resident_above_start"),
            "peak_resident": _share(full, nothing, "peak_above_start")
            / _share(packed, nothing, "peak_above_start"),
            "peak_allocated": _share(full, nothing, "peak_allocated")
            / _share(packed, nothing, "peak_allocated"),
        }
        row["within_tolerance"] = (
            abs(row["live_per_token"] / predicted - 1) <= TOLERANCE
            and abs(row["peak_allocated"] / predicted_in_all - 1) <= TOLERANCE
        )
        factors[name] = row
    return {
        "what": __doc__.split("``python")[0].strip(),
        "model": EmbeddedModel.name,
        "dtype": "bfloat16",
        "machine": describe(torch.device("cpu")),
        "allocator": ALLOCATOR,
        "rows": arguments.rows,
        "prompt_tokens": arguments.context - arguments.new_tokens,
        "new_tokens": arguments.new_tokens,
        "short_context": SHORT,
        "tolerance": TOLERANCE,
        "bytes": cases,
        "factors": factors,
    }


def _share(case: dict, nothing: dict, name: str) -> int:
    return case[name] - nothing[name]


def _packed_cases() -> dict[str, tuple[Setting, str]]:
    """Settings by name, each with the way of attention."""
    settings = [
        *uniform_settings(Affine(), Affine(), [5]),
        *uniform_settings(TurboQuant(), TurboQuant(), [4]),
        # Ranked in each layer: a shared ranking holds all layers in full until the prompt is in.
        *TwoLevelMixes(6, 5, 0.25, "key_norm", "layer").settings(Affine(), Affine()),
    ]
    cases = {setting.name: (setting, "packed") for setting in settings}
    cases[f"{settings[0].name} dequantized"] = (settings[0], "dequantize")
    return cases


def _run_apart(case: str) -> dict:
    print(f"{case} ...", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
    ran = subprocess.run(
        command, env={**os.environ, **ALLOCATOR}, stdout=subprocess.PIPE, text=True, check=True
    )
    print(ran.stdout, file=sys.stderr, flush=True)
    return json.loads(ran.stdout.splitlines()[-1])


def _new_cache(case: str, loaded) -> Cache:
    config = loaded.model.config
    if case == NOTHING:
        return Cache(layers=[KeepsNothing() for _ in range(config.num_hidden_layers)])
    if case == DYNAMIC:
        return DynamicCache(config=config)
    setting, attention = _packed_cases()[case]
    return SemKVCache(config, setting, attention=attention)


class KeepsNothing(CacheLayerMixin):
    """Counts tokens and stores none: every call attends to itself alone."""

    is_sliding = False
    length = 0

    def lazy_initialization(self, key_states, value_states):
        """Nothing to prepare."""

    def update(self, key_states, value_states, *args, **kwargs):
        """Hand back what came in."""
        self.length += key_states.shape[2]
        return key_states, value_states

    def get_mask_sizes(self, query_length):
        """The new tokens alone."""
        return query_length, self.length

    def get_seq_length(self):
        """Tokens seen."""
        return self.length

    def get_max_length(self):
        """No limit."""
        return -1


def _generate(loaded, cache: Cache, rows: int, context: int, new: int) -> None:
    ids = torch.randint(100, 40_000, (rows, context - new), generator=torch.Generator().manual_seed(1))
    loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **{loaded.cache_keyword: cache},
    )


def _collect() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _live() -> int:
    """Bytes of all tensor storages that the garbage collector can reach, each once."""
    storages = {}
    for found in gc.get_objects():
        # Containers such as dataclasses hold their tensors; tensors themselves are tracked, too.
        # Not isinstance, which makes lazy modules speak up.
        if issubclass(type(found), torch.Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _peak_allocated(run: Callable[[], None]) -> int:
    """Most bytes that torch's CPU allocator had handed out at once while ``run`` ran, above its start."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")


def _resident() -> int:
    return _status("VmRSS")


def _status(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
