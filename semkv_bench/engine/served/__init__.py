"""Engines that serve: llama.cpp in a process of ours, and any server with an OpenAI-compatible interface."""

from typing import TYPE_CHECKING

from semkv_bench.lazy import on_demand

if TYPE_CHECKING:
    from semkv_bench.engine.served.answers import AnswersBackend
    from semkv_bench.engine.served.llamacpp import LlamaCppBackend
    from semkv_bench.engine.served.server import ServerBackend

__all__ = ["AnswersBackend", "LlamaCppBackend", "ServerBackend"]

__getattr__ = on_demand(__name__)
