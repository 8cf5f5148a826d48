"""Engines that serve: llama.cpp in a process of ours, and any server with an OpenAI-compatible interface."""

from semkv_bench.engine.served.answers import AnswersBackend
from semkv_bench.engine.served.llamacpp import LlamaCppBackend
from semkv_bench.engine.served.server import ServerBackend

__all__ = ["AnswersBackend", "LlamaCppBackend", "ServerBackend"]
