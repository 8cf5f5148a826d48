"""llama.cpp as it is deployed: its server, one a cache type, in a process of ours or by the user's command."""

import importlib.util
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from semkv_bench.checks import whole
from semkv_bench.engine.backend import Backend
from semkv_bench.engine.served.client import Client, LlamaServer
from semkv_bench.engine.served.process import ServerProcess, free_port
from semkv_bench.engine.served.session import Served, ServedSession
from semkv_bench.engine.served.setting import (
    FULL_TYPES,
    GGML_BITS,
    ServedSetting,
    served_setting,
    served_shape,
)
from semkv_bench.engine.served.tokenizer import LlamaTokenizer
from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.models.shape import ModelShape
from semkv_bench.protocols import Protocol
from semkv_bench.protocols.engine import EngineProtocol
from semkv_bench.settings.setting import Setting

__all__ = ["LlamaCppBackend", "stored_caches"]

_PACKAGE = "xllamacpp"
# Run by its path, so that it imports nothing of ours.
_CHILD = Path(__file__).with_name("llamacpp_child.py")
# llama_kv_cache: size = 18.28 MiB ( 2048 cells, 30 layers, 1/1 seqs), K (q4_0): 6.33 MiB, V (q8_0): 11.95 MiB
_CACHE = re.compile(
    r"size\s*=\s*[\d.]+ MiB \(\s*(?P<cells>\d+) cells,\s*(?P<layers>\d+) layers.*?\), "
    r"K \((?P<k>\w+)\):\s*(?P<k_mib>[\d.]+) MiB, V \((?P<v>\w+)\):\s*(?P<v_mib>[\d.]+) MiB"
)
_ROTATION = re.compile(r"n_rot_k\s*=\s*(\d+), n_embd_head_k")
_BUILD = re.compile(r"build_info:\s*(\S+)")
# MiB are printed with two decimals.
_ROUNDED_MIB = 0.005
_CLOSE = 0.01
_CELLS = 256
_BUILD_ROOM = 64


@dataclass(frozen=True)
class LlamaCppBackend(Backend):
    """The llama.cpp server, one a cache type, with the same prompts by token ids, greedy, without prompt cache.

    types: cache types, the first of which is ``full`` and must be of 16 bits; ``KEYS/VALUES`` sets the sides apart.
    rotation: null leaves llama.cpp's own Hadamard rotation of quantized caches as it is, false switches it off.
    command: a llama-server of the user's instead of the packaged one. together: examples that are asked of a server
    before the next type's server starts; what an interruption loses. teacher_tokens: tokens of the reference answer
    along which KL and agreement are measured, on the ``top`` likeliest tokens; logprobs: of the answer's own tokens.
    """

    types: Sequence[str] = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "q2_0")
    rotation: bool | None = None
    command: str | None = None
    threads: int | None = None
    together: int = 50
    concurrency: int = 1
    teacher_tokens: int = 8
    top: int = 200
    logprobs: int = 5
    start_seconds: float = 120.0
    request_seconds: float = 600.0
    temperature: float = 0.0
    noise_examples: int = 8

    name: ClassVar[str] = "llama.cpp"
    free: ClassVar[tuple[str, ...]] = ("threads", "together", "start_seconds", "request_seconds")

    def __post_init__(self) -> None:
        if self.temperature:
            raise UsageError("engine=llamacpp answers greedily; leave engine.temperature out")
        for key in ("together", "concurrency", "top"):
            whole(f"engine.{key}", getattr(self, key), 1)
        whole("engine.threads", self.threads, 1, or_null=True)
        if isinstance(self.types, str | Mapping):
            raise UsageError(f"engine.types={self.types} must be a list: engine.types=[f16,q8_0,q4_0]")
        if not self.types or str(self.types[0]) not in FULL_TYPES:
            raise UsageError(
                f"engine.types={list(self.types)} must begin with the reference, f16 or bf16: "
                "engine.types=[f16,q8_0,q4_0]"
            )
        for spelled in self.types:
            kinds = str(spelled).split("/")
            if len(kinds) > 2:
                raise UsageError(f"engine.types: {spelled} must be TYPE or KEYS/VALUES, such as q8_0/q4_0")
            for kind in kinds:
                if kind not in GGML_BITS:
                    raise UsageError(
                        f"llama.cpp has no cache type {kind!r}; choose from {', '.join(GGML_BITS)}"
                    )

    def settings(self, simulated: Any) -> Sequence[Setting]:
        """See ``Backend``: one setting a cache type."""
        first, *others = [str(spelled) for spelled in self.types]
        full = served_setting("full", first, self.name, None, GGML_BITS)
        rest = [served_setting(spelled, spelled, self.name, None, GGML_BITS) for spelled in others]
        names = [setting.name for setting in rest]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"engine.types names {', '.join(repeated)} more than once")
        return (full, *sorted(rest, key=lambda setting: -setting.bits))

    def protocol(self, given: Protocol) -> Protocol:
        """See ``Backend``."""
        if given.name != "prefill":
            raise UsageError(f"llama.cpp codes while it prefills; leave protocol={given.name} out")
        return EngineProtocol()

    def shape(self, source: Any) -> ModelShape:
        """See ``Backend``."""
        return served_shape(source.shape())

    def tokenizer(self, source: Any) -> LlamaTokenizer:
        """See ``Backend``: the engine's own, so that a prompt's ids are what it would make of its text."""
        return LlamaTokenizer(self.serving(source, "f16", "f16", _CELLS))

    def check(self, source: Any, settings: Sequence[Setting], protocol: Protocol) -> None:
        """See ``Backend``."""
        if self.command is None and importlib.util.find_spec(_PACKAGE) is None:
            raise MissingError(
                'engine=llamacpp needs the package xllamacpp: pip install "semkv-bench[llamacpp]", or give a server of '
                'your own by engine.command="llama-server"'
            )
        self.gguf(source)

    def open(self, source: Any) -> "LlamaCppSession":
        """See ``Backend``."""
        return LlamaCppSession(source, self)

    def gguf(self, source: Any) -> Path:
        """The model's GGUF file."""
        return source.gguf_file()

    @contextmanager
    def serving(
        self, source: Any, keys: str, values: str, tokens: int, log: Path | None = None
    ) -> Iterator["_Up"]:
        """A server of ``source`` for sequences of ``tokens`` tokens, up until the context ends.

        Raises:
            MissingError: package, program or file that is not there.
            SemkvError: it does not come up.
        """
        port = free_port()
        # The context is divided into slots, and a slot needs room for what the server itself puts in.
        cells = -(-(tokens + _BUILD_ROOM) // _CELLS) * _CELLS
        with tempfile.TemporaryDirectory(prefix="semkv-llamacpp-") as scratch:
            process = ServerProcess(
                self._started(self.gguf(source), keys, values, cells, port),
                log or Path(scratch) / "log",
                {} if self.rotation is not False else {"LLAMA_ATTN_ROT_DISABLE": "1"},
                f"xllamacpp, {keys}/{values}" if self.command is None else None,
            )
            with process:
                dialect = LlamaServer(Client(f"http://127.0.0.1:{port}", seconds=self.request_seconds))
                process.wait_until(dialect.ready, self.start_seconds)
                yield _Up(dialect, process)

    def _started(self, gguf: Path, keys: str, values: str, cells: int, port: int) -> list[str]:
        threads = self.threads or len(os.sched_getaffinity(0))
        slots = self.concurrency
        if self.command is None:
            options = {
                "model": str(gguf), "port": port, "cells": cells * slots, "slots": slots, "keys": keys,
                "values": values, "threads": threads,
            }  # fmt: skip
            return [sys.executable, str(_CHILD), json.dumps(options)]
        return [
            *shlex.split(self.command),
            *("--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)),
            *("--ctx-size", str(cells * slots), "--parallel", str(slots), "--threads", str(threads)),
            *("--cache-type-k", keys, "--cache-type-v", values, "--flash-attn", "on", "--no-warmup"),
            *("--log-verbosity", "4"),
        ]


@dataclass(frozen=True)
class _Up:
    dialect: LlamaServer
    process: ServerProcess


class LlamaCppSession(ServedSession):
    """llama.cpp's server, one cache type after another."""

    def __init__(self, source: Any, backend: LlamaCppBackend):
        super().__init__(source.name, backend.tokenizer(source), backend, backend.shape(source))
        self.revision = getattr(source, "revision", None)
        self._source = source

    @contextmanager
    def serving(self, setting: ServedSetting, longest: int) -> Iterator[Served]:
        """See ``ServedSession``: what the server's log says of its cache must be what was asked for."""
        log = self.logs / f"{setting.name.replace('/', '-')}.log"
        log.write_bytes(b"")
        with self.options.serving(self._source, setting.key_type, setting.value_type, longest, log) as up:
            printed = up.process.printed()
            caches = stored_caches(printed)
            check_caches(setting, caches)
            says = _says(setting, printed, caches)
            if self.options.command is None:
                # The package's server does not know the build that it is of.
                says["build"] = f"{_PACKAGE} {version(_PACKAGE)}"
            check_bytes(setting, says, self.said.get("full"))
            yield Served(up.dialect, says)

    def close(self) -> None:
        """See ``Session``."""
        self.tokenizer.close()
        super().close()


@dataclass(frozen=True)
class StoredCache:
    """One cache as llama.cpp's log tells it: types, and MiB of both sides for ``cells`` tokens in ``layers`` layers."""

    cells: int
    layers: int
    key_type: str
    key_mib: float
    value_type: str
    value_mib: float


def stored_caches(printed: str) -> list[StoredCache]:
    """The caches that a server's log names, one for each kind of layer."""
    return [
        StoredCache(
            int(match["cells"]),
            int(match["layers"]),
            match["k"],
            float(match["k_mib"]),
            match["v"],
            float(match["v_mib"]),
        )
        for match in _CACHE.finditer(printed)
    ]


def check_caches(setting: ServedSetting, caches: Sequence[StoredCache]) -> None:
    """Raise SemkvError where the engine says that it stores another type, or another size, than was asked for."""
    if not caches:
        raise SemkvError(
            f"{setting.name}: the server does not say how it stores its cache (no llama_kv_cache line in its log)"
        )
    for cache in caches:
        said, asked = (cache.key_type, cache.value_type), (setting.key_type, setting.value_type)
        if said != asked:
            raise SemkvError(
                f"{setting.name}: asked for {'/'.join(asked)}, the server stores {'/'.join(said)}"
            )
        sizes = [(cache.key_mib, GGML_BITS[said[0]]), (cache.value_mib, GGML_BITS[said[1]])]
        for (mib, bits), (other_mib, other_bits) in pairwise([*sizes, sizes[0]]):
            room = 2 * _ROUNDED_MIB / bits + _CLOSE * mib / bits
            if abs(mib / bits - other_mib / other_bits) > room and cache.key_mib and cache.value_mib:
                raise SemkvError(
                    f"{setting.name}: the server's {mib:g} MiB and {other_mib:g} MiB do not agree with {bits:g} and "
                    f"{other_bits:g} bits a value"
                )


def check_bytes(setting: ServedSetting, says: Mapping[str, Any], full: Mapping[str, Any] | None) -> None:
    """Raise SemkvError where the bytes of a token do not shrink from those of ``full`` as the bits do."""
    if setting.name == "full" or full is None or not full["mib"]:
        return
    bits = 16 * (says["mib"] / says["cells"]) / (full["mib"] / full["cells"])
    if abs(bits - setting.bits) > setting.bits * (2 * _CLOSE + 4 * _ROUNDED_MIB / says["mib"]):
        raise SemkvError(
            f"{setting.name}: the server's {says['mib']:g} MiB for {says['cells']} tokens are {bits:.2f} bits a value "
            f"beside those of full, not {setting.bits:g}: it does not store what was asked for"
        )


def _says(setting: ServedSetting, printed: str, caches: Sequence[StoredCache]) -> dict[str, Any]:
    rotation, build = _ROTATION.search(printed), _BUILD.search(printed)
    mib = sum(cache.key_mib + cache.value_mib for cache in caches)
    return {
        "keys": setting.key_type,
        "values": setting.value_type,
        "mib": round(mib, 3),
        "cells": max(cache.cells for cache in caches),
        "layers": sum(cache.layers for cache in caches),
        "rotated": None if rotation is None else int(rotation[1]) > 0,
        "build": None if build is None else build[1],
    }
