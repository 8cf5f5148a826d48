"""A model that is in memory already, swept from Python."""

import copy
import hashlib
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from semkv_bench.errors import UsageError
from semkv_bench.models.architecture import check_architecture, check_attention
from semkv_bench.models.fingerprint import generation_settings
from semkv_bench.models.load import LoadedModel
from semkv_bench.models.shape import ModelShape

__all__ = ["ModelInMemory", "not_in_memory"]

# Tensors up to here are hashed whole, of larger ones so many stretches.
_WHOLE = 2**16
_DTYPES = ("float32", "float16", "bfloat16")
_STRETCHES, _STRETCH = 4, 2**10


@dataclass(frozen=True)
class ModelInMemory:
    """A transformers model and its tokenizer, as the group of models would give them.

    name: in records and reports.

    Raises:
        UsageError: it generates no text; its weights are of a type that is not swept, on the meta device, or on several
            devices without a map of them.
    """

    model: Any
    given_tokenizer: Any
    name: str

    def __post_init__(self) -> None:
        if not (hasattr(self.model, "config") and getattr(self.model, "can_generate", bool)()):
            kind = type(self.model).__name__
            raise UsageError(
                f"{kind} generates no text; give a transformers model with a language-model head"
            )
        if self.dtype not in _DTYPES:
            raise UsageError(
                f"{self.name} is in {self.dtype}; sweeps run in {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}"
            )
        places = sorted({str(weight.device) for weight in self.model.parameters()})
        if "meta" in places:
            raise UsageError(f"{self.name}: weights are on the meta device; load them before the sweep")
        if len(places) > 1 and not getattr(self.model, "hf_device_map", None):
            raise UsageError(
                f"{self.name} lies on {' and '.join(places)}, and nothing moves its tensors between them; put it on "
                "one device, or load it with device_map='auto'"
            )

    @property
    def node(self) -> dict[str, Any]:
        """What stands in place of the model group in configuration and charter."""
        return {
            "_target_": f"{__name__}.{not_in_memory.__name__}",
            "name": self.name,
            "dtype": self.dtype,
            "attention": self.attention,
        }

    @property
    def dtype(self) -> str:
        """Type of the weights, by its name in torch."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def attention(self) -> str | None:
        """Its attention function, as transformers calls it."""
        return self.model.config._attn_implementation

    @property
    def device_map(self) -> Any:
        """Where its parts are."""
        return getattr(self.model, "hf_device_map", None) or str(self.model.device)

    def shape(self) -> ModelShape:
        """Cache shape; UsageError for a kind of model that cannot be swept."""
        config = self.config()
        check_architecture(config, self.name)
        check_attention(config, self.attention)
        return ModelShape.of(config)

    def config(self) -> Any:
        """The transformers configuration, a copy."""
        return copy.deepcopy(self.model.config)

    def weights(self) -> dict[str, Any]:
        """Fingerprint: name, type, shape and samples of every tensor."""
        whole, count, size = hashlib.sha256(), 0, 0
        for name, tensor in sorted(self.model.state_dict().items()):
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            for part in _samples(tensor):
                whole.update(part)
            count, size = count + 1, size + tensor.numel() * tensor.element_size()
        return {"tensors": count, "bytes": size, "sha256": whole.hexdigest()[:32]}

    def generation_config(self) -> dict[str, Any]:
        """What the model says of how it generates."""
        told = getattr(self.model, "generation_config", None)
        return {} if told is None else generation_settings(told.to_diff_dict())

    def check_packages(self) -> None:
        """It is loaded, so what reads its weights is here."""

    def vocabulary(self) -> int | None:
        """Rows of the embedding."""
        return self.model.get_input_embeddings().weight.shape[0]

    def skeleton(self) -> Any:
        """The model itself: it has weights already."""
        return self.model

    def tokenizer(self) -> Any:
        """The tokenizer that was given."""
        return self.given_tokenizer

    def load(self) -> LoadedModel:
        """The model as it stands, without dropout."""
        self.model.eval()
        return LoadedModel(self.model, self.given_tokenizer, self.name, None)


def not_in_memory(name: str, **_: Any) -> NoReturn:
    """Raise UsageError: a run's configuration names a model that only its Python process held."""
    raise UsageError(
        f"{name} was in the memory of the process that swept it; give the model again, by "
        "semkv_bench.sweep(model, ...) or model=FOLDER"
    )


def _samples(tensor: torch.Tensor) -> list[bytes]:
    flat = tensor.detach().reshape(-1)
    count = flat.numel()
    if count <= _WHOLE:
        parts = [flat]
    else:
        starts = [(count - _STRETCH) * number // (_STRETCHES - 1) for number in range(_STRETCHES)]
        parts = [flat[start : start + _STRETCH] for start in starts]
    return [part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
