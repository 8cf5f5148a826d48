"""Models: their cache's shape, loading, devices, and what can be loaded here."""

from typing import TYPE_CHECKING

from semkv_bench.lazy import on_demand

if TYPE_CHECKING:
    from semkv_bench.models.embedded import EmbeddedModel
    from semkv_bench.models.load import LoadedModel, PretrainedModel
    from semkv_bench.models.shape import ModelShape

__all__ = ["EmbeddedModel", "LoadedModel", "ModelShape", "PretrainedModel"]

__getattr__ = on_demand(__name__)
