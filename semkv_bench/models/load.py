"""Loading models: by hub name, from a local folder or GGUF file."""

import copy
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.models.device_map import check_device_map, check_devices_present, check_modules, input_device
from semkv_bench.models.fingerprint import generation_settings, local_weights
from semkv_bench.models.hub import hub_reachable
from semkv_bench.models.quantized import check_weight_format
from semkv_bench.models.shape import ModelShape
from semkv_bench.models.stops import end_tokens

if TYPE_CHECKING:
    import torch

    from semkv_bench.models.later_calls import LaterCalls

__all__ = ["LoadedModel", "PretrainedModel", "first_line", "quiet_transformers"]

log = logging.getLogger(__name__)

_ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
# model-00002-of-00004.gguf
_LATER_PART = re.compile(r"-(?!00001-of-)\d{5}-of-\d{5}\.gguf$")
_DTYPES = ("auto", "float32", "float16", "bfloat16")
# What has a key of its own in the group of models.
_OWN_KEYS = {
    "pretrained_model_name_or_path": "model.path",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "device_map": "model.device_map",
    "attn_implementation": "model.attention",
}
_FOR_ALL_FILES = ("trust_remote_code", "token", "subfolder", "cache_dir")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, ready to run; ``label`` names it in records and reports."""

    model: Any
    tokenizer: Any
    label: str
    revision: str | None

    @cached_property
    def shape(self) -> ModelShape:
        """Cache shape of the model."""
        return ModelShape.of(self.model.config)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation: all that any of the model's files names."""
        told = end_tokens(self.model, self.tokenizer)
        if len({ids for ids in told.values() if ids}) > 1:
            log.warning(
                "%s: end tokens differ (%s); an answer ends at any of them",
                self.label,
                ", ".join(f"{source} {list(ids)}" for source, ids in told.items() if ids),
            )
        return tuple(sorted(set().union(*told.values())))

    @cached_property
    def decoder(self) -> Any:
        """What turns token ids into hidden states: the model without its head."""
        from semkv_bench.models.architecture import decoder_of

        return decoder_of(self.model)

    @cached_property
    def cache_keyword(self) -> str:
        """Name of the forward argument that takes the cache; it changed between transformers releases."""
        return "cache" if "cache" in signature(type(self.model).forward).parameters else "past_key_values"

    @cached_property
    def later_calls(self) -> "LaterCalls":
        """What the model needs where it is called again with its cache."""
        from semkv_bench.models.later_calls import later_calls

        return later_calls(self.decoder, self.cache_keyword, self.model.config, self.device)

    @property
    def device(self) -> "torch.device":
        """Device that takes the token ids."""
        return input_device(self.model)

    @property
    def dtype(self) -> "torch.dtype":
        """Type of the weights, and of the reference cache."""
        return self.model.dtype


@dataclass(frozen=True)
class PretrainedModel:
    """A model by hub name, local folder or local GGUF file.

    ``dtype`` is ``auto`` (as stored) or a torch type name; ``device_map`` is passed to transformers: ``null``
    puts the model on the GPU where there is one, else on the CPU; ``auto`` spreads a model that is larger than
    one GPU over all of them, then the CPU. ``attention``: null takes SDPA where the class has it, else eager.
    ``kwargs``: more arguments of ``from_pretrained``, for example a ``quantization_config``.
    """

    path: str | None
    label: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device_map: Any = None
    attention: str | None = None
    kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise UsageError("model.path is not given: name a hub model, a local folder or a GGUF file")
        if self.dtype not in _DTYPES:
            raise UsageError(f"model.dtype={self.dtype} is not one of {', '.join(_DTYPES)}")
        if self.attention is not None and self.attention not in _ATTENTION:
            raise UsageError(f"model.attention={self.attention} is not one of {', '.join(_ATTENTION)}")
        check_device_map(self.device_map)
        if not isinstance(self.kwargs or {}, Mapping):
            raise UsageError(
                f"model.kwargs={self.kwargs} must be names with values: model.kwargs={{name: value}}"
            )
        if taken := sorted(_OWN_KEYS.keys() & (self.kwargs or {}).keys()):
            raise UsageError(f"model.kwargs.{taken[0]}: give {_OWN_KEYS[taken[0]]} instead")

    @property
    def name(self) -> str:
        """Name for records and reports: the label, else the hub name, the folder's, or the file's without ending."""
        if self.label or not self.local:
            return self.label or self.path
        path = Path(os.path.abspath(Path(self.path).expanduser()))
        # A dot in a folder's name is part of a version: Qwen2.5-7B-Instruct.
        return path.stem if path.is_file() else path.name

    def shape(self) -> ModelShape:
        """Cache shape, from the configuration alone.

        Raises:
            UsageError: a model of this kind cannot be swept.
        """
        from semkv_bench.models.architecture import check_architecture, check_attention

        config = self.config()
        check_architecture(config, self.name, remote=bool(self._given("trust_remote_code")))
        check_attention(config, self.attention)
        return ModelShape.of(config)

    def config(self) -> Any:
        """The transformers configuration, a copy of its own for every caller."""
        return copy.deepcopy(self._config)

    @cached_property
    def _config(self) -> Any:
        # Of a GGUF file with a large vocabulary, reading it takes half a minute.
        with self._explained():
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(**self._location(), **self._trust())

    def weights(self) -> dict[str, Any]:
        """What the weights are known by: the content of local files, the commit of a hub model."""
        path = Path(self.path).expanduser()
        if path.exists():
            return local_weights(path)
        return {"hub": self.path, "revision": getattr(self.config(), "_commit_hash", None) or self.revision}

    def generation_config(self) -> dict[str, Any]:
        """What the model says of how it generates, its end tokens among it."""
        from transformers import GenerationConfig

        location = self._location()
        config = self.config()
        with self._explained():
            try:
                found = GenerationConfig.from_pretrained(
                    location.pop("pretrained_model_name_or_path"),
                    **{name: value for name, value in location.items() if name != "gguf_file"},
                )
            except OSError:
                found = GenerationConfig.from_model_config(config)
        return generation_settings(found.to_diff_dict())

    def check_packages(self) -> None:
        """Raise MissingError where a package that reads the model's quantized weights is not here."""
        described = getattr(self.config(), "quantization_config", None)
        check_weight_format(self.name, described, self._given("quantization_config"))

    def vocabulary(self) -> int | None:
        """Rows of the embedding, as the configuration tells; None where it does not."""
        return getattr(self.config().get_text_config(decoder=True), "vocab_size", None)

    def skeleton(self) -> Any:
        """The model without its weights (on the meta device), to count and name them."""
        import torch
        from transformers import AutoModelForCausalLM

        config = self.config()
        with self._explained(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    def tokenizer(self) -> Any:
        """The tokenizer alone, no weights; read once for prompts and engine.

        Raises:
            UsageError: it is that of a GGUF file, and transformers tokenizes otherwise than the file says.
        """
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        with self._explained():
            from transformers import AutoTokenizer

            from semkv_bench.models.gguf_tokenizer import misread

            found = AutoTokenizer.from_pretrained(**self._location(), **self._trust())
            file = Path(self.path).expanduser()
            wrong = misread(found, file) if file.is_file() else None
        if wrong is not None:
            raise UsageError(
                f"{self.name}: transformers tokenizes otherwise than this GGUF file says ({wrong}); use "
                "engine=llamacpp, which tokenizes by itself, or a folder with the model's own tokenizer"
            )
        return found

    def gguf_file(self) -> Path:
        """The model's GGUF file, of a split one its first part, for engines that read such files.

        Raises UsageError where the model is given by something else.
        """
        path = Path(self.path).expanduser()
        found = [path] if path.is_file() else sorted(path.glob("*.gguf")) if path.is_dir() else []
        first = [file for file in found if not _LATER_PART.search(file.name)]
        if len(first) != 1 or first[0].suffix != ".gguf":
            held = f"{len(first)} GGUF files" if first else "no GGUF file"
            raise UsageError(
                f"model.path={self.path} names {held}; this engine reads one: model.path=FILE.gguf"
            )
        return first[0]

    def load(self) -> LoadedModel:
        """Load weights and tokenizer.

        Raises:
            MissingError: the files are neither here nor to be had.
            UsageError: ``device_map`` names what the machine or the model does not have.
        """
        from semkv_bench.models.architecture import supported_attention

        check_devices_present(self.device_map)
        config = self.config()
        self.check_packages()
        if isinstance(self.device_map, Mapping):
            check_modules(self.device_map, self.skeleton())
        with self._explained():
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(
                **self._location(),
                dtype=self.dtype,
                device_map=_default_device() if self.device_map is None else self.device_map,
                attn_implementation=supported_attention(config, self.attention),
                **(self.kwargs or {}),
            )
        model.eval()
        revision = getattr(model.config, "_commit_hash", None) or self.revision
        return LoadedModel(model, self.tokenizer(), self.name, revision)

    @property
    def local(self) -> bool:
        """Is it given by a file or folder that is there?"""
        return Path(self.path).expanduser().exists()

    def check_place(self) -> None:
        """Raise MissingError for a path that is no hub name and leads nowhere."""
        if not self.local and (self.path.startswith((".", "/", "~")) or self.path.count("/") > 1):
            raise MissingError(f"model.path={self.path} does not exist")

    def _given(self, name: str) -> Any:
        return (self.kwargs or {}).get(name)

    def _trust(self) -> dict[str, Any]:
        """What of ``kwargs`` configuration and tokenizer must be told, too."""
        return {name: value for name, value in (self.kwargs or {}).items() if name in _FOR_ALL_FILES}

    def _location(self) -> dict[str, Any]:
        path = Path(self.path).expanduser()
        if path.is_file():
            if path.suffix != ".gguf":
                raise UsageError(
                    f"model.path={self.path} is a file but not a .gguf; give a folder or a GGUF file"
                )
            return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        if path.is_dir():
            _refuse_adapter(path)
            return {"pretrained_model_name_or_path": str(path)}
        self.check_place()
        return {
            "pretrained_model_name_or_path": self.path,
            "revision": self.revision or "main",
            "local_files_only": not hub_reachable(),
        }

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what transformers and the hub raise into one sentence that says what to fetch."""
        try:
            with quiet_transformers():
                yield
        except (TypeError, AttributeError) as error:
            if not self.kwargs:
                raise
            raise UsageError(f"model.kwargs={dict(self.kwargs)}: {first_line(error)}") from error
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            if type(error).__name__ == "OutOfMemoryError":
                raise SemkvError(
                    f"{self.name} does not fit the memory of one GPU: model.device_map=auto spreads it over several "
                    "and the CPU; semkv-bench plan tells what it needs"
                ) from error
            reason = first_line(error)
            if self.local:
                raise MissingError(f"cannot load the model in {self.path}: {reason}") from error
            raise MissingError(
                f"cannot load {self.path} from the hub and no copy is here ({reason}); fetch it on a machine with "
                f"network by `hf download {self.path}` (gated models need `hf auth login` first), "
                "or give a local copy: model=custom model.path=FOLDER"
            ) from error


def _refuse_adapter(folder: Path) -> None:
    """Raise UsageError for a folder that holds an adapter and not the model that it changes."""
    described = folder / "adapter_config.json"
    if not described.is_file() or (folder / "config.json").is_file():
        return
    try:
        told = json.loads(described.read_text())
        kind, base = told.get("peft_type", "PEFT"), told.get("base_model_name_or_path") or "its base model"
    except (OSError, ValueError, AttributeError):
        kind, base = "PEFT", "its base model"
    raise UsageError(
        f"model.path={folder} is a {kind} adapter of {base} and no model: merge it into the base (merge_and_unload of "
        "peft, then save_pretrained) and give that folder"
    )


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def first_line(error: BaseException) -> str:
    """What an error says, without the lines that follow and the point."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Neither warnings nor progress bars of transformers."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        # The bar over GGUF tensors obeys no switch.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
