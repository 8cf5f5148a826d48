"""Weights known by content: what a charter keeps of a model, so that another one under the same path is noticed."""

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from semkv_bench.errors import MissingError
from semkv_bench.files import parse_json

__all__ = ["generation_settings", "local_weights"]

# Models up to here are read whole; of a larger one so many samples a tensor, or a file of another format.
_WHOLE = 64 * 1024**2
_TENSOR_SAMPLES, _FILE_SAMPLES = 4, 256
_SAMPLE = 4096
_KINDS = ("*.safetensors", "*.bin", "*.gguf")
# Of a configuration, what says where it came from and not what it is.
_ORIGIN = ("_name_or_path", "transformers_version", "_commit_hash", "_from_model_config")


def local_weights(path: Path) -> dict[str, Any]:
    """Fingerprint of the model in ``path``, a folder or a file.

    ``sha256`` covers name, type, shape and samples of every tensor, however they are spread over safetensors files;
    of other formats name, size and samples of the files. A model of up to 64 MiB is read whole. ``bytes`` is the size
    of the tensors, or files; ``config_sha256`` covers config.json. Takes well under a second.

    Raises MissingError for a file that cannot be read.
    """
    try:
        files = [path] if path.is_file() else _weight_files(path)
        by_tensor = bool(files) and all(file.suffix == ".safetensors" for file in files)
        parts = list(_tensor_digests(files) if by_tensor else _file_digests(files))
        config = path / "config.json"
        settings = parse_json(config.read_bytes()) if config.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise MissingError(f"the weights in {path} cannot be read: {error}") from error
    whole = hashlib.sha256()
    for name, digest, _ in sorted(parts):
        whole.update(json.dumps([name, digest]).encode())
    return {
        "tensors" if by_tensor else "files": len(parts),
        "bytes": sum(size for *_, size in parts),
        "sha256": whole.hexdigest()[:32],
        **({} if settings is None else {"config_sha256": _settings_hash(settings)}),
    }


def generation_settings(content: dict[str, Any]) -> dict[str, Any]:
    """What a generation_config says, without where it came from; as JSON holds it."""
    kept = {
        name: value for name, value in sorted(content.items()) if name not in _ORIGIN and value is not None
    }
    return json.loads(json.dumps(kept, default=str))


def _weight_files(folder: Path) -> list[Path]:
    """Those that are loaded: safetensors where there are any."""
    return next((found for kind in _KINDS if (found := sorted(folder.glob(kind)))), [])


def _tensor_digests(files: Sequence[Path]) -> Iterator[tuple[str, str, int]]:
    """Name, digest and bytes of every tensor in safetensors files."""
    whole = _are_small(files)
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError(f"{path.name} is no safetensors file")
            header = parse_json(file.read(length))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                digest = hashlib.sha256(json.dumps([entry["dtype"], entry["shape"]]).encode())
                for part in _samples(file, 8 + length + begin, end - begin, whole, _TENSOR_SAMPLES):
                    digest.update(part)
                yield name, digest.hexdigest(), end - begin


def _file_digests(files: Sequence[Path]) -> Iterator[tuple[str, str, int]]:
    whole = _are_small(files)
    for path in files:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for part in _samples(file, 0, size, whole, _FILE_SAMPLES):
                digest.update(part)
        yield path.name, digest.hexdigest(), size


def _are_small(files: Sequence[Path]) -> bool:
    return sum(file.stat().st_size for file in files) <= _WHOLE


def _samples(file: BinaryIO, begin: int, size: int, whole: bool, count: int) -> Iterator[bytes]:
    """The ``size`` bytes from ``begin``, or ``count`` samples of them, evenly spread and both ends among them."""
    if whole or size <= count * _SAMPLE:
        file.seek(begin)
        yield file.read(size)
        return
    for number in range(count):
        file.seek(begin + (size - _SAMPLE) * number // (count - 1))
        yield file.read(_SAMPLE)


def _settings_hash(settings: Any) -> str:
    if isinstance(settings, dict):
        settings = {name: value for name, value in settings.items() if name not in _ORIGIN}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
