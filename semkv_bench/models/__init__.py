"""Models: their cache's shape, loading, devices, and what can be loaded here."""

from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.load import LoadedModel, PretrainedModel
from semkv_bench.models.shape import ModelShape

__all__ = ["EmbeddedModel", "LoadedModel", "ModelShape", "PretrainedModel"]
