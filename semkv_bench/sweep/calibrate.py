"""Fitting a method to a model: a text is read, what its parts need is kept by layer and side, and written to a file."""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from semkv_bench.checks import whole
from semkv_bench.config.compose import build
from semkv_bench.console import ERR, track
from semkv_bench.engine.calibration import Seen, watch_texts
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.files import check_writable
from semkv_bench.grid.cost import SIDES
from semkv_bench.models.rotary import check_rotary
from semkv_bench.quantizers import Method
from semkv_bench.quantizers.calibration import CALIBRATIONS, write
from semkv_bench.quantizers.side import Side
from semkv_bench.tasks.haystack import prose
from semkv_bench.tasks.words import WORDS

__all__ = ["calibrate", "fit_layers", "story"]

_LEAST = 32


def calibrate(config: DictConfig) -> Path:
    """Fit ``config.quantizer`` to ``config.model`` and write the calibration; returns its path.

    Raises:
        UsageError: a quantizer that needs no calibration or does not fit the model, a text that is too short.
        MissingError: text or model that is not there.
    """
    method, source = build(config.quantizer, "quantizer"), build(config.model, "model")
    sides = _fitted_sides(method)
    shape = source.shape()
    _check(sides, source, shape)
    for name, least in (("sequences", 1), ("length", _LEAST)):
        whole(name, config[name], least)
    if shape.max_positions is not None and config.length > shape.max_positions:
        raise UsageError(
            f"length={config.length} is beyond the {shape.max_positions} positions of {source.name}"
        )
    check_writable(Path(config.out or CALIBRATIONS).expanduser().parent)
    texts, told = _texts(config, source.tokenizer())
    about = {
        "method": method.name,
        "model": {"name": source.name, "weights": source.weights()},
        "fits": {side.side: side.fit_key for side in sides},
        "text": told,
        "sequences": config.sequences,
        "length": config.length,
    }
    loaded = source.load()
    shown = track(iter(texts), len(texts), "texts", ERR)
    skip = max(side.keep.sinks for side in sides)
    plain = any(side.positional for side in sides)
    seen = watch_texts(loaded, shown, any(side.code.weighted for side in sides), plain, skip)
    path = Path(config.out).expanduser() if config.out else _named(about)
    write(path, about, fit_layers(sides, seen, loaded.shape.quantized_layers))
    return path


def fit_layers(sides: Sequence[Side], seen: Seen, layers: Sequence[int]) -> dict[str, torch.Tensor]:
    """What is kept of every layer and side, by ``LAYER/SIDE/PART:NAME``; ``seen`` is emptied on the way."""
    found, known = {}, {}
    steps = [(layer, side) for layer in layers for side in sides]
    for layer, side in track(iter(steps), len(steps), "fitting", ERR):
        values, weights = seen.of(layer, side.side)
        # What the layer below gives back; of values, what their own keys do as well.
        below = [known[name] for name in SIDES[: SIDES.index(side.side) + 1]] if layer != layers[0] else []
        fitted = side.fit(values, weights if side.code.weighted else None, below)
        found |= {f"{layer}/{side.side}/{name}": tensor for name, tensor in fitted.items()}
        coded = side.layers.stored(layer, 1 + max(layers))
        known[side.side] = side.given_back(values, fitted, below) if coded else values
    return found


def story(seed: int) -> Iterator[str]:
    """A text without end: a village story, lists of words and figures between its sentences."""
    rng = random.Random(f"calibration/{seed}")
    sentence = prose(rng)
    while True:
        yield " ".join(sentence() for _ in range(rng.randint(2, 6)))
        kind = rng.random()
        if kind < 0.2:
            words = rng.sample(WORDS, rng.randint(3, 8))
            yield f"The list had {len(words)} things on it: {', '.join(words)}."
        elif kind < 0.4:
            first, second = rng.sample(WORDS, 2)
            yield f"The {first} has the number {rng.randrange(10**6)}; the {second}, {rng.randrange(100)}."
        elif kind < 0.5:
            yield f"\n\n{rng.choice(WORDS).title()} and {rng.choice(WORDS)}\n\n"


def _fitted_sides(method: Any) -> list[Side]:
    sides = [method.of_side(side) for side in SIDES] if isinstance(method, Method) else []
    fitted = [side for side in sides if side.calibrated]
    if not fitted:
        raise UsageError(f"quantizer={method.name} is fitted to no model; it needs no calibration")
    return fitted


def _check(sides: Sequence[Side], source: Any, shape: Any) -> None:
    for side in sides:
        for layer in shape.cache:
            if layer is not None and layer.coded:
                held = getattr(layer, side.side)
                side.check(held.head_dim)
                side.check_heads(held.heads, held.head_dim)
        if side.positional:
            check_rotary(source.config(), source.name, side.name)


def _texts(config: DictConfig, tokenizer: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Token ids of every stretch, and where they are from."""
    needed = config.sequences * config.length
    if config.text is None:
        parts, count = [], 0
        for part in story(config.seed):
            parts.append(part)
            count += len(part)
            # No tokenizer needs more than so many characters for a token of English.
            if count > needed * 8:
                break
        text, told = " ".join(parts), {"source": "generated", "seed": config.seed}
        content = text.encode()
    else:
        try:
            content = Path(config.text).expanduser().read_bytes()
            text = content.decode("utf-8-sig")
        except OSError as error:
            raise MissingError(f"text={config.text} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"text={config.text} is not UTF-8 text") from error
        told = {"source": Path(config.text).name}
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < needed:
        raise UsageError(
            f"text={config.text} has {len(ids)} tokens, fewer than sequences={config.sequences} of "
            f"length={config.length}; lower one of them"
        )
    stretches = [ids[start : start + config.length] for start in range(0, needed, config.length)]
    return stretches, {**told, "sha256": hashlib.sha256(content).hexdigest()}


def _named(about: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:10]
    return CALIBRATIONS / f"{about['method']}-{about['model']['name'].replace('/', '-')}-{digest}.safetensors"
