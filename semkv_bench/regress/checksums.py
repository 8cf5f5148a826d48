"""Checksums of what the code does on fixed tensors: quantizer, packing, and the assembly of cache rows.

Codes, metadata and packed words are compared bit for bit. That holds between machines for rotated vectors,
too: a rotation is computed in float64 and rounded once to float32, so sums taken in another order (about
1e-16) practically never move a code. Values that were rotated back in float32 do differ in their last bits
between linear algebra libraries; of those, weighted sums are kept and compared within ``CLOSE``. Between two
instruction sets and libraries they differed by a hundredth of that, while a wrong step or scale moves them
by far more, and a single wrong code shows in the codes.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from semkv_bench.engine import decode
from semkv_bench.engine.prefill import Prefilled
from semkv_bench.engine.rows import RowCache
from semkv_bench.errors import CheckFailed, UsageError
from semkv_bench.kernels import PackedLayout
from semkv_bench.models.shape import ModelShape
from semkv_bench.packed.coding import check_packable
from semkv_bench.quantizers import Coder, NonFiniteError, Quantizer
from semkv_bench.regress.probe import integers, probe_states, probe_tensor
from semkv_bench.settings.setting import Setting

__all__ = ["CHECK_LEVELS", "CLOSE", "Checks", "check_count", "code_checks", "differing"]

CHECK_LEVELS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32)
CLOSE = 0.01
_PACKED_LEVELS = tuple(count for count in CHECK_LEVELS if count <= 16)
_SEEDS = (0, 1, 20_000)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ROW_TOKENS = 8
_GROUPS = 8
_PACKED_TOKENS = 64

Checks = dict[str, dict[str, Any]]


def code_checks(
    keys: Quantizer,
    values: Quantizer,
    settings: Sequence[Setting],
    shape: ModelShape,
    device: torch.device | str = "cpu",
) -> Checks:
    """Everything that is compared, by kind (codes, metadata, values, packed, refusals, rows) and case.

    A case is a short name such as ``keys float32 L5``; its entry a checksum, a number or a list of numbers.
    """
    checks: Checks = {kind: {} for kind in ("codes", "metadata", "values", "packed", "refusals", "rows")}
    sides = {"keys": keys, "values": values} if keys != values else {"": keys}
    with torch.inference_mode():
        for side, quantizer in sides.items():
            for seed in _SEEDS if quantizer.seeded else (0,):
                label = " ".join(part for part in (side, f"seed {seed}" if quantizer.seeded else "") if part)
                _check_coder(checks, label, quantizer, shape.head_dim, seed, device)
            _check_packing(checks, side, quantizer, shape, device)
            _check_refusals(checks, side, quantizer, shape.head_dim, device)
        _check_rows(checks, settings, shape, device)
    return checks


def differing(old: Checks, new: Checks) -> dict[str, list[str]]:
    """Cases of each kind that differ, that is, are not equal (checksums) or not close (sums), or are only in one."""
    found = {}
    for kind in sorted({*old, *new}):
        before, after = old.get(kind, {}), new.get(kind, {})
        cases = [case for case in {**before, **after} if not _alike(before.get(case), after.get(case))]
        if cases:
            found[kind] = cases
    return found


def _alike(old: Any, new: Any) -> bool:
    sums = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    return all(abs(a - b) <= CLOSE for a, b in zip(old, new, strict=True)) if sums else old == new


def _check_coder(
    checks: Checks, label: str, quantizer: Quantizer, head_dim: int, seed: int, device: torch.device | str
) -> None:
    coder = quantizer.coder(head_dim, seed, device)
    for name, dtype in (_DTYPES if not seed else {"float32": torch.float32}).items():
        x = probe_tensor(head_dim, CHECK_LEVELS, dtype).to(device)
        tokens = x.shape[1]
        if coder.simulated:
            _check_simulated(checks, f"{label} {name}".strip(), quantizer, coder, x)
            continue
        mixed = torch.tensor([CHECK_LEVELS[i % len(CHECK_LEVELS)] for i in range(tokens)], device=device)
        grid = torch.tensor(CHECK_LEVELS, device=device)[:, None].expand(-1, tokens)
        together = coder.quantize_dequantize(x, torch.cat([grid, mixed[None]]))
        for place, levels in enumerate([*CHECK_LEVELS, mixed]):
            points = "mixed" if place == len(CHECK_LEVELS) else f"L{levels}"
            case = " ".join(part for part in (label, name, points) if part)
            encoded = coder.encode(x, levels)
            checks["codes"][case] = _checksum(encoded.codes)
            checks["metadata"][case] = _checksum(encoded.metadata)
            if quantizer.seeded:
                decoded = coder.decode(encoded, torch.float32)
                checks["values"][case] = _sums(decoded, x)
                checks["values"][f"{case} in one pass"] = _agreement(together[place], decoded, x)
            else:
                checks["values"][case] = _checksum(coder.decode(encoded, x.dtype))
                checks["values"][f"{case} in one pass"] = _checksum(together[place])


def _check_simulated(checks: Checks, case: str, quantizer: Quantizer, coder: Coder, x: Tensor) -> None:
    """What a coder without codes gives back, over whole groups of tokens."""
    group = quantizer.granularity.tokens or x.shape[1]
    tokens = -(-x.shape[1] // group) * group
    x = x.repeat(1, -(-tokens // x.shape[1]), 1)[:, :tokens]
    coder.prepare(x)
    for levels in CHECK_LEVELS if quantizer.fixed_levels is None else (quantizer.fixed_levels,):
        try:
            quantizer.check_levels(levels)
        except UsageError:
            continue
        found = coder.quantize_dequantize(x, torch.tensor([[levels]], device=x.device))[0]
        checks["values"][f"{case} L{levels}"] = _sums(found, x)


def _check_packing(
    checks: Checks, side: str, quantizer: Quantizer, shape: ModelShape, device: torch.device | str
) -> None:
    """Packed words and their bytes, for the quantizers that can be packed."""
    try:
        check_packable(quantizer, max(_PACKED_LEVELS))
    except UsageError:
        return
    coder = quantizer.coder(shape.head_dim, 0, device)
    granularity = quantizer.granularity
    tokens = math.ceil(_PACKED_TOKENS / (granularity.tokens or 1)) * (granularity.tokens or 1)
    x = probe_states(shape.kv_heads, tokens, shape.head_dim, stream=1).to(device)
    points = {f"L{count}": [count] * tokens for count in _PACKED_LEVELS}
    if granularity.mixed:
        points["mixed"] = [_PACKED_LEVELS[i % len(_PACKED_LEVELS)] for i in range(tokens)]
    for name, per_token in points.items():
        levels = torch.tensor(per_token, device=device)
        packed = coder.pack(x, levels, PackedLayout.build)
        case = f"{side} {name}".strip()
        checks["packed"][case] = _checksum(torch.cat([stream.words for stream in packed.streams]))
        checks["packed"][f"{case} bytes"] = packed.nbytes + sum(layout.nbytes for layout in packed.layouts)
        checks["packed"][f"{case} read back"] = _sums(coder.unpack(packed, torch.float32), x)


def _check_refusals(
    checks: Checks, side: str, quantizer: Quantizer, head_dim: int, device: torch.device | str
) -> None:
    coder = quantizer.coder(head_dim, 0, device)
    for name, value in (("NaN", torch.nan), ("infinity", torch.inf)):
        x = torch.zeros(1, 2, head_dim, device=device)
        x[0, 1, -1] = value
        try:
            coder.quantize_dequantize(x, torch.tensor([[4]], device=device))
            told = "taken"
        except NonFiniteError:
            told = "refused"
        checks["refusals"][f"{side} {name}".strip()] = told


def _check_rows(
    checks: Checks, settings: Sequence[Setting], shape: ModelShape, device: torch.device | str
) -> None:
    """Does every layer and side of a setting's row hold what it should? By layer and side, and by setting.

    Settings that rank or delete tokens are left out: importance needs a model's forward pass.
    """
    plain = [setting for setting in settings if not setting.metrics and setting.prune is None]
    config = _config(shape)
    prompt, rows = RowCache(config), RowCache(config)
    prompt.reserve(1, _ROW_TOKENS)
    sources = []
    for index, layer in enumerate(prompt.layers):
        both = [
            probe_states(shape.kv_heads, _ROW_TOKENS, shape.head_dim, stream=2 + 2 * index + side).to(device)
            for side in (0, 1)
        ]
        layer.update(*(states[None] for states in both))
        sources.append(both)
    prefilled = Prefilled(prompt, (), hidden=torch.empty(0))
    decode.fill(SimpleNamespace(shape=shape), prefilled, plain, rows, room=1, seed=0)
    by_setting: dict[str, list[float]] = {setting.name: [] for setting in plain}
    for index, (layer, both) in enumerate(zip(rows.layers, sources, strict=True)):
        for side, (stored, states) in enumerate(zip(layer.stored(), both, strict=True)):
            sums = [_sums(row, states, groups=1)[0] for row in stored]
            checks["rows"][f"layer {index} {('keys', 'values')[side]}"] = sums
            for setting, total in zip(plain, sums, strict=True):
                by_setting[setting.name].append(total)
    checks["rows"] |= by_setting


def _config(shape: ModelShape) -> LlamaConfig:
    """A model's configuration that says no more than the shape of its cache."""
    config = LlamaConfig(num_hidden_layers=shape.layers, head_dim=shape.head_dim)
    config.sliding_window = config.max_position_embeddings // 2
    config.layer_types = [
        "full_attention" if index in shape.quantized_layers else "sliding_attention"
        for index in range(shape.layers)
    ]
    return config


def _checksum(x: Tensor) -> str:
    """SHA-256 of the bytes, shortened; little endian as on every machine that torch runs on."""
    flat = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def _sums(result: Tensor, source: Tensor, groups: int = _GROUPS) -> list[float]:
    """Weighted sums of result [heads, tokens, head_dim] over ``groups`` groups of tokens.

    Every vector counts relative to its source's largest value, so that huge ones do not hide the others;
    weights are whole numbers in -7..7 without 0.
    """
    size = source.double().abs().amax(-1, keepdim=True)
    relative = result.double() / size.masked_fill(size == 0, 1)
    weights = _weights(result.numel()).to(result.device).view(result.shape)
    per_token = (relative * weights).sum((0, 2))
    if not bool(torch.isfinite(per_token).all()):
        raise CheckFailed("the quantizer gave NaN or infinity for finite values")
    parts = per_token.tensor_split(groups)
    return [round(float(part.sum()), 4) + 0.0 for part in parts]


def _agreement(result: Tensor, exact: Tensor, source: Tensor) -> str:
    """Is result what float32 ``exact`` rounds to, give or take one rounding and what sums in float32 lose?"""
    info = torch.finfo(result.dtype)
    exact = exact.double().clamp(info.min, info.max)
    slack = 1e-5 * source.double().abs().amax(-1, keepdim=True)
    allowed = info.eps * exact.abs() + info.smallest_normal * info.eps + slack
    return "agrees" if bool(((result.double() - exact).abs() <= allowed).all()) else "differs"


@lru_cache(maxsize=8)
def _weights(count: int) -> Tensor:
    drawn = torch.tensor(integers(count, 1, 14, stream=99))
    return torch.where(drawn > 7, drawn - 15, drawn)


def check_count(checks: Mapping[str, Mapping[str, Any]]) -> int:
    """Number of entries."""
    return sum(len(cases) for cases in checks.values())
