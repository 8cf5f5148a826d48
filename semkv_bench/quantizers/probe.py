"""Does a quantizer of a user's own keep what the sweep relies on? Asked before the first prefill, on random values."""

from collections.abc import Iterable

import torch
from torch import Tensor

from semkv_bench.config.own import fingerprints
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.quantizers.base import Coder, Quantizer

__all__ = ["probe_own", "probe_quantizer"]

_HEADS, _LEVELS = 2, 4
_CLOSE = 1e-4


def probe_own(quantizers: Iterable[Quantizer], head_dim: int) -> None:
    """Probe those that are not the package's own, or have parts that are not; see ``probe_quantizer``."""
    for quantizer in dict.fromkeys(quantizers):
        if fingerprints([quantizer, *getattr(quantizer, "transform", ()), getattr(quantizer, "code", None)]):
            probe_quantizer(quantizer, head_dim)


def probe_quantizer(quantizer: Quantizer, head_dim: int) -> None:
    """Code a few random vectors of ``head_dim`` values.

    Raises UsageError, one line that names what is wrong, if a token's values hang on other tokens than the
    quantizer's granularity says or on other rows, if ``metadata_bits`` is not what ``encode`` returns, if values are
    not finite, or if a constant vector does not come back.
    """
    try:
        coder = quantizer.coder(head_dim)
        _check(quantizer, coder, head_dim)
    except SemkvError:
        raise
    except Exception as error:
        raise _wrong(quantizer, f"fails on plain random values: {type(error).__name__}: {error}") from error


def _check(quantizer: Quantizer, coder: Coder, head_dim: int) -> None:
    group = quantizer.granularity.tokens
    tokens = 4 * max(group or 0, 16)
    x = torch.randn(3, _HEADS, tokens, head_dim, generator=torch.Generator().manual_seed(5))
    levels = torch.full((1, tokens), quantizer.fixed_levels or _LEVELS)
    given = x.clone()
    alone = [coder.quantize_dequantize(row[None], levels)[0] for row in x]
    if not torch.equal(x, given):
        raise _wrong(quantizer, "changes the vectors that it is given; work on a copy")
    if not _same(coder.quantize_dequantize(x[-1:], levels)[0], alone[-1]):
        raise _wrong(quantizer, "codes the same vectors differently when asked again; draw from `seed` alone")
    if not _same(quantizer.coder(head_dim).quantize_dequantize(x[-1:], levels)[0], alone[-1]):
        raise _wrong(quantizer, "codes a row differently after other rows; a coder keeps nothing of them")
    if not all(bool(torch.isfinite(values).all()) for values in alone):
        raise _wrong(quantizer, "gives NaN or infinity for finite values")
    if bool((torch.stack(alone) == x).all(-1).any()):
        raise _wrong(
            quantizer, "returns tokens as they were; what stays in 16 bits is the business of `keep`"
        )
    together = coder.quantize_dequantize(x, levels.expand(3, tokens))
    if not all(_same(*pair) for pair in zip(together, alone, strict=True)):
        raise _wrong(quantizer, "codes a row differently when other rows are coded with it")
    if group is not None:
        # Other neighbours, all of them larger, in every group but the one that is watched.
        other = x[:1] * 5
        other[:, :, group : 2 * group] = x[:1, :, group : 2 * group]
        here = slice(group, 2 * group)
        if not _same(coder.quantize_dequantize(other, levels)[0, :, here], alone[0][:, here]):
            what = "token by itself" if group == 1 else f"group of {group} tokens by itself"
            raise _wrong(
                quantizer,
                f"says that it codes each {what}, but its values change with other tokens; declare `granularity`",
            )
        if not _same(coder.quantize_dequantize(x[:1, :, here], levels[:, here])[0], alone[0][:, here]):
            raise _wrong(quantizer, "codes the same tokens differently in a call of their own")
    if group == 1 and quantizer.granularity.mixed and quantizer.fixed_levels is None:
        _check_mixed(quantizer, coder, x[:1], alone[0])
    if not coder.simulated:
        _check_metadata(quantizer, coder, x[0])
    constant = torch.full((1, _HEADS, tokens, head_dim), 0.5)
    if not _same(coder.quantize_dequantize(constant * 0, levels)[0], constant[0] * 0):
        raise _wrong(quantizer, "does not give zeros back as zeros")
    found = coder.quantize_dequantize(constant, levels)[0]
    if not bool(torch.isfinite(found).all()) or float((found - 0.5).square().mean()) > 0.1:
        raise _wrong(quantizer, "does not give a constant vector back")


def _check_mixed(quantizer: Quantizer, coder: Coder, x: Tensor, low: Tensor) -> None:
    """Of x [1, heads, tokens, head_dim], every other token with twice the levels; ``low`` is all at ``_LEVELS``."""
    many = torch.full((1, x.shape[2]), 2 * _LEVELS)
    mixed = many.clone()
    mixed[:, 1::2] = _LEVELS
    try:
        quantizer.check_levels(2 * _LEVELS)
        found, high = (coder.quantize_dequantize(x, levels)[0] for levels in (mixed, many))
    except UsageError:
        return  # said where such levels are asked for
    if not _same(found[:, 1::2], low[:, 1::2]) or not _same(found[:, ::2], high[:, ::2]):
        raise _wrong(
            quantizer,
            "codes a token at the levels of others; declare `granularity = Granularity(1, mixed=False)`, or heed "
            "`levels` token by token",
        )


def _check_metadata(quantizer: Quantizer, coder: Coder, x: Tensor) -> None:
    encoded = coder.encode(x, _LEVELS)
    stored = encoded.metadata.element_size() * 8 * encoded.metadata.numel() / (x.shape[0] * x.shape[1])
    said = quantizer.metadata_bits(x.shape[2])
    if abs(stored - said) > 0.01 * max(stored, 1):
        raise _wrong(
            quantizer,
            f"states metadata_bits={said:g} for a vector, but encode returns {stored:g} bits of metadata",
        )
    codes = encoded.codes
    if type(coder).pack is Coder.pack and not bool(
        ((codes >= 0) & (codes < _LEVELS) & (codes == codes.long())).all()
    ):
        raise _wrong(
            quantizer,
            f"gives codes that are not whole numbers below the {_LEVELS} levels asked for, so they take more bits",
        )
    if not _same(coder.decode(encoded, x.dtype), coder.quantize_dequantize(x, torch.tensor([[_LEVELS]]))[0]):
        raise _wrong(quantizer, "decodes other values than quantize_dequantize gives")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE))


def _wrong(quantizer: Quantizer, what: str) -> UsageError:
    return UsageError(f"quantizer {quantizer.name} ({type(quantizer).__name__}) {what}")
