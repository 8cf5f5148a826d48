"""What publishers state of the shipped models, for a machine that has no copy of their configuration."""

from dataclasses import dataclass

from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.load import PretrainedModel
from semkv_bench.models.shape import ModelShape

__all__ = ["CONFIGURATION", "PUBLICATION", "Published", "published"]

# Where a shape is from.
CONFIGURATION, PUBLICATION = "configuration", "publication"


@dataclass(frozen=True)
class Published:
    """A model's cache shape, and the parameters that a download holds."""

    shape: ModelShape
    parameters: int


def _dense(layers: int, kv_heads: int, head_dim: int, positions: int, parameters: int) -> Published:
    return Published(ModelShape.alike(layers, kv_heads, head_dim, positions), parameters)


_PUBLISHED = {
    EmbeddedModel.name: _dense(30, 3, 64, 8192, 134_515_008),
    "meta-llama/Llama-3.1-8B-Instruct": _dense(32, 8, 128, 131_072, 8_030_261_248),
    "mistralai/Mistral-7B-Instruct-v0.3": _dense(32, 8, 128, 32_768, 7_248_023_552),
    "Qwen/Qwen2.5-7B-Instruct": _dense(28, 4, 128, 32_768, 7_615_616_512),
}


def published(source: PretrainedModel | EmbeddedModel) -> Published | None:
    """What is published of ``source``; None for a model of another name, or one that is given by its files."""
    if isinstance(source, PretrainedModel):
        return None if source.local else _PUBLISHED.get(source.path)
    return _PUBLISHED.get(source.name)
