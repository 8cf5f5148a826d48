"""Answers that were made elsewhere: prompts go out to a file, and an engine without an adapter answers them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from semkv_bench.checks import is_number
from semkv_bench.engine.backend import Answers, Backend, Session
from semkv_bench.engine.outcome import Outcome
from semkv_bench.engine.served.setting import GGML_BITS, served_setting, served_shape
from semkv_bench.errors import UsageError
from semkv_bench.files import json_lines
from semkv_bench.models.shape import ModelShape
from semkv_bench.protocols import Protocol
from semkv_bench.protocols.engine import EngineProtocol
from semkv_bench.settings.setting import Setting
from semkv_bench.tasks import Example

__all__ = ["AnswersBackend", "prompt_id"]

FULL = "full"


def prompt_id(example: Example) -> str:
    """Name of an exported prompt, which its answers carry."""
    return f"{example.task}/{example.example_id}/{example.seed}"


@dataclass(frozen=True)
class AnswersBackend(Backend):
    """A JSONL file with ``id, setting, text`` a line, and perhaps ``bits, tokens, ended, prompt_hash``.

    bits: bits a value by setting, where the lines do not say. Every prompt must be answered under every setting,
    ``full`` among them.
    """

    path: str | None = None
    bits: Mapping[str, float] | None = None
    temperature: float = 0.0
    noise_examples: int = 0

    name: ClassVar[str] = "answers"

    def __post_init__(self) -> None:
        if not self.path:
            raise UsageError("engine=answers needs the file of answers: engine.path=FILE.jsonl")

    @cached_property
    def lines(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The answers by setting and id; UsageError naming the line that is wrong."""
        path = Path(self.path).expanduser()
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for number, row in json_lines(path, self.path):
            where = f"{path}, line {number}"
            _check_line(row, where)
            mine = found.setdefault(row["setting"], {})
            if row["id"] in mine:
                raise UsageError(f"{where}: {row['id']} is answered twice under {row['setting']}")
            mine[row["id"]] = row
        if FULL not in found:
            raise UsageError(f"{path} has no answers of the reference: setting {FULL}")
        return found

    def settings(self, simulated: Any) -> Sequence[Setting]:
        """See ``Backend``."""
        made = []
        for name, rows in self.lines.items():
            said = {row["bits"] for row in rows.values() if row.get("bits") is not None}
            if len(said) > 1:
                raise UsageError(f"{self.path}: setting {name} has lines of different bits")
            bits = next(iter(said), (self.bits or {}).get(name))
            if name == FULL and bits not in (None, 16):
                raise UsageError(
                    f"{self.path}: {FULL} is the reference, which has 16 bits a value, not {bits}"
                )
            made.append(served_setting(name, name, self.name, bits, GGML_BITS))
        first = [setting for setting in made if setting.name == FULL]
        return (*first, *sorted((s for s in made if s.name != FULL), key=lambda setting: -setting.bits))

    def protocol(self, given: Protocol) -> Protocol:
        """See ``Backend``."""
        if given.name != "prefill":
            raise UsageError(f"answers made elsewhere follow their engine; leave protocol={given.name} out")
        return EngineProtocol()

    def shape(self, source: Any) -> ModelShape:
        """See ``Backend``."""
        return served_shape(source.shape())

    def check_prompts(self, settings: Sequence[Setting], examples: Sequence[Example]) -> None:
        """See ``Backend``."""
        if several := next((example for example in examples if example.turns > 1), None):
            raise UsageError(
                f"{several.task} asks {several.turns} questions in turn, which answers cannot follow"
            )
        for setting in settings:
            missing = [name for name in map(prompt_id, examples) if name not in self.lines[setting.name]]
            if missing:
                raise UsageError(
                    f"{self.path} has no answer to {len(missing)} of {len(examples)} prompts under {setting.name}, the "
                    f"first {missing[0]}; every prompt needs one under every setting"
                )

    def open(self, source: Any) -> "_AnswersSession":
        """See ``Backend``."""
        return _AnswersSession(source.name, self)


class _AnswersSession(Session):
    def __init__(self, label: str, backend: AnswersBackend):
        self.label = label
        self.tracks = True  # there is nothing to wait for
        self._lines = backend.lines
        self._path = backend.path

    def describe(self) -> dict[str, Any]:
        """See ``Session``."""
        return {"answers": Path(self._path).name}

    def answers(
        self,
        examples: Sequence[Example],
        settings: Sequence[Setting],
        protocol: Protocol,
        alone: Sequence[bool],
    ) -> Iterator[Answers]:
        """See ``Session``."""
        for example in examples:
            yield Answers([[self._outcome(setting, example) for setting in settings]])

    def _outcome(self, setting: Setting, example: Example) -> Outcome:
        row = self._lines[setting.name][prompt_id(example)]
        tokens = row.get("tokens")
        return Outcome(
            setting,
            tokens=None if tokens is None else list(tokens),
            ended=bool(row.get("ended", tokens is None or len(tokens) < example.max_new_tokens)),
            context=len(example.input_ids),
            text=row["text"],
        )


def _check_line(row: dict[str, Any], where: str) -> None:
    for name in ("id", "setting", "text"):
        if not isinstance(row.get(name), str):
            raise UsageError(f"{where}: {name} must be a text; an answer needs id, setting and text")
    bits = row.get("bits")
    if bits is not None and not (is_number(bits) and 0 < bits <= 32):
        raise UsageError(f"{where}: bits must be a number above 0 and of at most 32")
    tokens = row.get("tokens")
    if tokens is not None and not (isinstance(tokens, list) and all(isinstance(t, int) for t in tokens)):
        raise UsageError(f"{where}: tokens must be a list of token ids")
