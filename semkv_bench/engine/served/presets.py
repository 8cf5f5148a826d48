"""What is known of the servers that people deploy: how they are told a cache type, and how they tell it back."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from semkv_bench.engine.served.client import Client
from semkv_bench.engine.served.setting import GGML_BITS

__all__ = ["PRESETS", "Preset", "Said", "preset_of"]


@dataclass(frozen=True)
class Said:
    """What a server tells of its cache: the type, and how many tokens it has room for; None where it does not."""

    kind: str | None = None
    capacity: float | None = None


@dataclass(frozen=True)
class Preset:
    """One kind of server.

    flag: how a command is told the cache type; bits: of the types that are known, metadata included, at a head of 128;
    full: the types of 16 bits; reads_back: asks the server for its type, with what it printed; native_layers: how many
    layers stay in 16 bits under a type, half of them at each end.
    """

    name: str
    flag: str
    bits: Mapping[str, float]
    full: tuple[str, ...]
    reads_back: Callable[[Client, str], Said]
    speaks_llama: bool = False
    advice: str = ""
    native_layers: Mapping[str, int] = field(default_factory=dict)


_VLLM_TYPE = re.compile(r'vllm:cache_config_info\{[^}]*cache_dtype="([^"]+)"')
_VLLM_LOG = re.compile(r"GPU KV cache size:\s*([\d,]+) tokens")
_LLAMA_LOG = re.compile(r"llama_kv_cache: size\s*=\s*([\d.]+) MiB .*?K \((\w+)\).*?V \((\w+)\)")


def _vllm(client: Client, printed: str) -> Said:
    kind = _VLLM_TYPE.search(client.get_text("/metrics"))
    room = _VLLM_LOG.search(printed)
    return Said(kind and kind[1], room and float(room[1].replace(",", "")))


def _sglang(client: Client, printed: str) -> Said:
    info = client.get("/server_info") or client.get("/get_server_info") or {}
    kind, room = info.get("kv_cache_dtype"), info.get("max_total_num_tokens")
    return Said(kind, None if room is None else float(room))


def _llama(client: Client, printed: str) -> Said:
    found = _LLAMA_LOG.search(printed)
    if found is None:
        return Said()
    kind = found[2] if found[2] == found[3] else f"{found[2]}/{found[3]}"
    # The context is fixed here, so that a smaller type shows in fewer MiB for it.
    return Said(kind, 1 / float(found[1]))


def _silent(client: Client, printed: str) -> Said:
    return Said()


_FP8 = {"fp8": 8.0, "fp8_e4m3": 8.0, "fp8_e5m2": 8.0}
_TURBOQUANT = {
    "turboquant_k8v4": 6.125,
    "turboquant_4bit_nc": 4.1875,
    "turboquant_k3v4_nc": 3.6875,
    "turboquant_3bit_nc": 3.1875,
}
_PER_HEAD = {"fp8_per_token_head": 8.25, "int8_per_token_head": 8.25, "int4_per_token_head": 4.25}
_FULL = ("float16", "bfloat16", "half", "f16", "bf16")

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "vllm",
            "--kv-cache-dtype",
            {**_FP8, **_PER_HEAD, **_TURBOQUANT, "nvfp4": 4.5, "float16": 16.0, "bfloat16": 16.0},
            _FULL,
            _vllm,
            advice="start it with --no-enable-prefix-caching --generation-config vllm",
            # The first and the last two layers stay as they are unless --kv-cache-dtype-skip-layers says otherwise.
            native_layers=dict.fromkeys(_TURBOQUANT, 4),
        ),
        Preset(
            "sglang",
            "--kv-cache-dtype",
            {**_FP8, "mxfp8": 8.25, "nvfp4": 4.5, "fp4_mx_block16": 4.5, "fp4_e2m1": 4.5, "bf16": 16.0},
            _FULL,
            _sglang,
            advice="start it with --disable-radix-cache",
        ),
        Preset("trtllm", "--kv_cache_dtype", {"fp8": 8.0, "nvfp4": 4.5}, ("auto", *_FULL), _silent),
        Preset("llama-server", "--cache-type-k {type} --cache-type-v", GGML_BITS, _FULL, _llama, speaks_llama=True),
        Preset("openai", "", {}, _FULL, _silent),
    )
}  # fmt: skip


def preset_of(command: str | None) -> Preset:
    """The preset that a command's program names; ``openai`` where none does."""
    words = (command or "").lower()
    named = [preset for name, preset in PRESETS.items() if name in words and name != "openai"]
    if "trtllm" in words or "trtllm-serve" in words:
        return PRESETS["trtllm"]
    return named[0] if named else PRESETS["openai"]


def describe(said: Said) -> dict[str, Any]:
    """What of it is kept."""
    return {"type": said.kind, "capacity": said.capacity}
