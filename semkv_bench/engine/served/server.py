"""Any server with an OpenAI-compatible interface, running already or started by a command of the user's."""

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from semkv_bench.checks import is_number, whole
from semkv_bench.engine.backend import Backend
from semkv_bench.engine.served.client import Client, Dialect, LlamaServer, OpenAIServer
from semkv_bench.engine.served.presets import PRESETS, Preset, Said, describe, preset_of
from semkv_bench.engine.served.process import ServerProcess, free_port
from semkv_bench.engine.served.session import Served, ServedSession
from semkv_bench.engine.served.setting import ServedSetting, served_setting, served_shape
from semkv_bench.errors import MissingError, SemkvError, UsageError
from semkv_bench.models.shape import ModelShape
from semkv_bench.protocols import Protocol
from semkv_bench.protocols.engine import EngineProtocol
from semkv_bench.settings.setting import Setting

__all__ = ["ServerBackend"]

log = logging.getLogger(__name__)

FULL = "full"
_TYPE, _PORT = "{type}", "{port}"
_KEYS, _VALUES = "{keys}", "{values}"
# A capacity may be rounded to blocks, and weights that do not shrink take their part.
_CAPACITY_ROOM = 0.15
_MOST_BITS = 32
_AS_IN = {
    "servers": "{full: http://127.0.0.1:8000, fp8: {url: http://127.0.0.1:8001, bits: 8}}",
    "types": "{full: bfloat16, fp8: fp8_e4m3}",
    "bits": "{fp8: 8}",
}


@dataclass(frozen=True)
class ServerBackend(Backend):
    """OpenAI-compatible servers, one a setting.

    servers: running ones by the setting's name, an address or ``{url, bits, type}``. Or command: what starts one,
    with ``{type}`` for the cache type (``{keys}`` and ``{values}`` where they may be apart) and ``{port}``, and types:
    the cache type by the setting's name. ``full`` must be among them and of 16 bits by its own word, or where it has
    none by the user's. bits: bits a value by setting, where the preset does not know them.
    preset: kind of server, told by the command where null. takes_ids: prompts by token ids; false sends text. headers:
    of every request, such as an authorization.
    """

    servers: Mapping[str, Any] | None = None
    command: str | None = None
    types: Mapping[str, str] | None = None
    bits: Mapping[str, float] | None = None
    preset: str | None = None
    served_model: str | None = None
    takes_ids: bool = True
    headers: Mapping[str, str] | None = None
    together: int = 200
    concurrency: int = 4
    teacher_tokens: int = 0
    top: int = 20
    logprobs: int = 5
    start_seconds: float = 900.0
    request_seconds: float = 600.0
    attempts: int = 6
    temperature: float = 0.0
    noise_examples: int = 8

    name: ClassVar[str] = "server"
    free: ClassVar[tuple[str, ...]] = (
        "together",
        "start_seconds",
        "request_seconds",
        "attempts",
        "headers",
        "servers",
    )

    def __post_init__(self) -> None:
        if self.temperature:
            raise UsageError("engine=server answers greedily; leave engine.temperature out")
        if self.preset is not None and self.preset not in PRESETS:
            raise UsageError(f"engine.preset={self.preset} is not known; choose from {', '.join(PRESETS)}")
        if (self.servers is None) == (self.command is None):
            raise UsageError(
                "engine=server needs one of engine.servers={full: URL, fp8: {url: URL, bits: 8}} and "
                'engine.command="... {type} ... {port}" with engine.types={full: bfloat16, fp8: fp8_e4m3}'
            )
        for key in ("together", "concurrency", "top", "attempts"):
            whole(f"engine.{key}", getattr(self, key), 1)
        for key in ("teacher_tokens", "logprobs", "noise_examples"):
            whole(f"engine.{key}", getattr(self, key), 0)
        for key in ("start_seconds", "request_seconds"):
            seconds = getattr(self, key)
            if not is_number(seconds) or seconds <= 0:
                raise UsageError(f"engine.{key}={seconds} must be a number of seconds above 0")
        if self.headers is not None and not (
            isinstance(self.headers, Mapping) and all(isinstance(v, str) for v in self.headers.values())
        ):
            raise UsageError(
                f"engine.headers={self.headers} must name headers and their texts: "
                "engine.headers={Authorization: 'Bearer KEY'}"
            )
        for key in ("servers", "types", "bits"):
            value = getattr(self, key)
            if value is not None and not isinstance(value, Mapping):
                raise UsageError(f"engine.{key}={value} must name settings: engine.{key}={_AS_IN[key]}")
        if self.command is not None:
            self._check_command()
        if FULL not in (self.servers or self.types):
            raise UsageError("engine=server needs the reference: a server or type named full")

    def _check_command(self) -> None:
        apart = _KEYS in self.command and _VALUES in self.command
        missing = [
            mark for mark in (_TYPE, _PORT) if mark not in self.command and not (apart and mark == _TYPE)
        ]
        if missing or not self.types:
            raise UsageError(
                f"engine.command needs {' and '.join(missing) or 'engine.types={full: TYPE, NAME: TYPE}'}"
            )
        for name, kind in self.types.items():
            if "/" in str(kind) and not apart:
                raise UsageError(
                    f"engine.types.{name}={kind} sets keys and values apart, which engine.command can only do by "
                    f"{_KEYS} and {_VALUES} in place of {_TYPE}"
                )
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise UsageError(f"engine.command={self.command} is no command line: {error}") from error

    @cached_property
    def kind(self) -> Preset:
        """What is known of this kind of server."""
        return PRESETS[self.preset] if self.preset else preset_of(self.command)

    def settings(self, simulated: Any) -> Sequence[Setting]:
        """See ``Backend``: bits are those of the user, or else the preset's."""
        given, made = dict(self.bits or {}), []
        for name, value in (self.servers or self.types).items():
            url, kind, bits = None, str(value), given.get(name)
            if self.servers is not None:
                node = value if isinstance(value, Mapping) else {"url": value}
                url, kind = node.get("url"), str(node.get("type", name))
                bits = node.get("bits", bits)
                if not str(url or "").startswith(("http://", "https://")):
                    raise UsageError(f"engine.servers.{name} has no url such as http://127.0.0.1:8000")
            if bits is not None and not (is_number(bits) and 0 < bits <= _MOST_BITS):
                raise UsageError(
                    f"the bits of {name}, {bits}, must be a number above 0 and of at most {_MOST_BITS}"
                )
            native = self.kind.native_layers.get(kind, 0)
            made.append(
                served_setting(
                    name, kind, self.kind.name, bits, self.kind.bits, url=url, native_layers=native
                )
            )
        first = [setting for setting in made if setting.name == FULL]
        return (*first, *sorted((s for s in made if s.name != FULL), key=lambda setting: -setting.bits))

    def protocol(self, given: Protocol) -> Protocol:
        """See ``Backend``."""
        if given.name != "prefill":
            raise UsageError(f"a server codes while it prefills; leave protocol={given.name} out")
        return EngineProtocol()

    def shape(self, source: Any) -> ModelShape:
        """See ``Backend``."""
        return served_shape(source.shape())

    def open(self, source: Any) -> "ServerSession":
        """See ``Backend``."""
        return ServerSession(source, self)


class ServerSession(ServedSession):
    """Servers of one kind, one after another."""

    def __init__(self, source: Any, backend: ServerBackend):
        super().__init__(source.name, source.tokenizer(), backend, backend.shape(source))
        self._full: Said | None = None

    @contextmanager
    def serving(self, setting: ServedSetting, longest: int) -> Iterator[Served]:
        """See ``ServedSession``: the effective type is read back where the kind of server tells it."""
        if setting.url is not None:
            client = Client(setting.url.rstrip("/").removesuffix("/v1"), **self._limits)
            if client.get("/health") is None and client.get("/v1/models") is None:
                raise MissingError(
                    f"{setting.name}: no server answers at {client.url}; start it, or mend "
                    f"engine.servers.{setting.name}"
                )
            yield self._checked(setting, client, "")
            return
        port = free_port()
        marks = {
            _TYPE: setting.key_type,
            _KEYS: setting.key_type,
            _VALUES: setting.value_type,
            _PORT: str(port),
        }
        command = self.options.command
        for mark, value in marks.items():
            command = command.replace(mark, value)
        log = self.logs / f"{setting.name.replace('/', '-')}.log"
        log.write_bytes(b"")
        client = Client(f"http://127.0.0.1:{port}", **self._limits)
        with ServerProcess(shlex.split(command), log) as process:
            process.wait_until(lambda: client.get("/health") is not None, self.options.start_seconds)
            yield self._checked(setting, client, process.printed())

    @property
    def _limits(self) -> dict[str, Any]:
        return {
            "seconds": self.options.request_seconds,
            "attempts": self.options.attempts,
            "headers": self.options.headers,
        }

    def _checked(self, setting: ServedSetting, client: Client, printed: str) -> Served:
        with client.understood():
            said = self.options.kind.reads_back(client, printed)
        vouched = FULL in (self.options.bits or {})
        check_said(setting, said, self._full, self.options.kind, layers=self.shape.layers, vouched=vouched)
        if setting.name == FULL:
            self._full = said
            if said.kind is None:
                log.warning(
                    "full: the server does not tell how it stores its cache; it is taken to be in 16 bits"
                )
        return Served(self._dialect(client), {**describe(said), "version": _version(client)})

    def _dialect(self, client: Client) -> Dialect:
        if self.options.kind.speaks_llama:
            return LlamaServer(client)
        with client.understood():
            model = self.options.served_model or _model_of(client)
        return OpenAIServer(client, model, self.options.takes_ids)


def check_said(
    setting: ServedSetting,
    said: Said,
    full: Said | None,
    kind: Preset,
    *,
    layers: int,
    vouched: bool = False,
) -> None:
    """Raise SemkvError where the server says that it stores something else than was asked for.

    The type that it names must be the one; ``full`` must be of 16 bits by its own word, or where it has none by the
    type that was asked for or the user's word (``vouched``); and the tokens that it has room for must grow as the bits
    of all ``layers`` shrink, against those of ``full``.
    """
    asked = setting.key_type
    if setting.value_type != asked:
        asked = f"{asked}/{setting.value_type}"
    if setting.name == FULL:
        # A running server has no type but the one that it tells.
        named = said.kind or (None if setting.url is not None and asked == FULL else asked)
        if named is None or named in kind.full or (said.kind is None and vouched):
            return
        if named == "auto":
            raise SemkvError(
                "full: the server decides by itself how it stores its cache (auto); name float16 or bfloat16"
            )
        raise SemkvError(
            f"full: the server stores {named}, which is not of 16 bits; name float16 or bfloat16"
            + ("" if said.kind else ", or vouch for it by engine.bits={full: 16}")
        )
    # The name of a running server's setting need not be that of a type.
    named = setting.url is None or asked != setting.name or asked in kind.bits
    if said.kind is not None and named and not _same_format(said.kind, asked):
        raise SemkvError(f"{setting.name}: asked for {asked}, the server stores {said.kind}")
    takes = kind.bits.get(said.kind or "", setting.bits)
    if abs(takes - setting.bits) > _CAPACITY_ROOM * takes:
        raise SemkvError(
            f"{setting.name}: the server stores {said.kind}, of {takes:g} bits a value, not {setting.bits:g}"
        )
    if said.capacity and full is not None and full.capacity:
        native = min(setting.native_layers, layers) / layers
        bits = 16 * native + setting.bits * (1 - native)
        grown, due = said.capacity / full.capacity, 16 / bits
        if grown < 1 + (due - 1) * (1 - _CAPACITY_ROOM) - _CAPACITY_ROOM:
            raise SemkvError(
                f"{setting.name}: the server has room for {grown:.2f} times the tokens of full, where {bits:g} "
                f"bits would give {due:.2f} times: it does not store what was asked for"
            )


def _same_format(one: str, other: str) -> bool:
    """Names that mean one format: fp8 is fp8_e4m3."""
    alike = {"fp8": "fp8_e4m3", "half": "float16", "bf16": "bfloat16", "f16": "float16"}
    return alike.get(one, one) == alike.get(other, other)


def _model_of(client: Client) -> str:
    listed = (client.get("/v1/models") or {}).get("data") or []
    if len(listed) != 1:
        names = ", ".join(str(model.get("id")) for model in listed) or "none"
        raise SemkvError(f"{client.url} serves {names}; name one by engine.served_model=NAME")
    return str(listed[0].get("id"))


def _version(client: Client) -> str | None:
    return (client.get("/version") or {}).get("version")
