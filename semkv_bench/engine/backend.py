"""The boundary to engines: answer these examples under these settings; describe yourself.

Everything above (tasks, plan, records, statistics, report) knows an engine by this file alone. An engine is two
classes, and a file in ``conf/engine/`` whose ``_target_`` is the first:

- a ``Backend``: what the configuration says of it. A frozen dataclass whose fields are the keys of the group; it
  loads and starts nothing. It gives the settings that are compared, checks a plan before weights are loaded, and
  opens a session.
- a ``Session``: the engine at work. It says of itself what the run folder should keep and answers examples.

What may be relied on:

- A *setting* is a ``Setting``. One of an engine's own, such as a cache type of a server, is a subclass with
  ``keys`` and ``values`` left None and ``storage`` overridden to tell its own bits; ``full`` is always the first.
- A prompt is token ids (``Example.input_ids``, ``FollowUp.input_ids``), chat template and begun answer included; an
  engine that takes text decodes them with the tokenizer of its source. The limits of an answer are the example's
  ``max_new_tokens``, ``min_new_tokens`` and ``stop_token_ids``, besides the model's own end tokens.
- Answers come as ``Outcome``: tokens and text, whether the answer ended by itself, and witnesses. **A witness that an
  engine cannot give is None, never zero**: KL and agreement, reads of coded state, the share that is coded. An engine
  that cannot count reads must see to it by other means that it did what it was asked for, and raise if not.
- ``together`` examples come in one call, so that an engine which starts a server per setting may go through the
  settings outside and the examples inside; one that needs only one at a time keeps 1. Answers come back in order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from semkv_bench.engine.outcome import Outcome
from semkv_bench.models.shape import ModelShape
from semkv_bench.protocols import Protocol
from semkv_bench.settings.setting import Setting
from semkv_bench.tasks import Example

__all__ = ["Answers", "Backend", "Session"]


@dataclass(frozen=True)
class Answers:
    """What all settings answered to one example.

    turns: outcomes by turn, then in the order of the settings. alone: by turn, those of ``full`` run once more by
    itself, which shows the engine's own noise; None where that was not asked for.
    """

    turns: Sequence[Sequence[Outcome]]
    alone: Sequence[Outcome] | None = None


class Session(ABC):
    """An engine at work: weights loaded, servers up. ``label`` and ``revision`` name the model in records.

    tracks: does it show by itself how far it is with the examples of one call?
    """

    label: str
    revision: str | None = None
    together: int = 1
    tracks: bool = False

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What ``environment.json`` keeps: versions, device, and what the engine says of itself when asked."""

    @abstractmethod
    def answers(
        self,
        examples: Sequence[Example],
        settings: Sequence[Setting],
        protocol: Protocol,
        alone: Sequence[bool],
    ) -> Iterator[Answers]:
        """Answer every example under every setting; ``alone`` says by example whether ``full`` is run once more.

        Raises:
            SemkvError: an answer cannot be had, or is not what was asked for.
        """

    def notes(self) -> dict[str, Any]:
        """What ``environment.json`` keeps besides when all is answered; ``warning`` is also said at the end."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Stop what the session started."""

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Backend(ABC):
    """What the configuration says of an engine; subclasses are frozen dataclasses built by Hydra.

    name: the engine's in charter and report. simulates: does it code as the quantizers say, in rows of this process
    (the grid and the allocation then make the settings, and memory and time can be estimated)? free: fields that
    change no result, which the charter leaves out. temperature and noise_examples are fields of every engine; ``full``
    is run once more on so many examples.
    """

    name: ClassVar[str]
    simulates: ClassVar[bool] = False
    free: ClassVar[tuple[str, ...]] = ()
    temperature: float
    noise_examples: int

    def decided(self) -> dict[str, Any]:
        """The name, and the fields that may change a result: the engine's part of the charter."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.free}
        return {"name": self.name, **kept}

    def settings(self, simulated: Callable[[], Sequence[Setting]]) -> Sequence[Setting]:
        """What is compared, ``full`` first; ``simulated`` makes those of the configured quantizers and grid."""
        return simulated()

    def shape(self, source: Any) -> ModelShape:
        """Shape of the model's cache, known before anything is loaded; ``source`` is the model group's object."""
        return source.shape()

    def tokenizer(self, source: Any) -> Any:
        """What the tasks write prompts with."""
        return source.tokenizer()

    def weights(self, source: Any) -> dict[str, Any]:
        """What the charter keeps of the model, so that another one under the same name is noticed."""
        return {"weights": source.weights(), "generation_config": source.generation_config()}

    def protocol(self, given: Protocol) -> Protocol:
        """What is coded when, of the configured protocol; UsageError where the engine cannot follow it."""
        return given

    def check(self, source: Any, settings: Sequence[Setting], protocol: Protocol) -> None:  # noqa: B027
        """Raise UsageError for what this engine cannot run; called before prompts are written."""

    def check_prompts(self, settings: Sequence[Setting], examples: Sequence[Example]) -> None:  # noqa: B027
        """Raise UsageError for prompts that this engine cannot answer; called before anything is written."""

    @abstractmethod
    def open(self, source: Any) -> Session:
        """Load the model or start the server.

        Raises:
            MissingError: model, program or package that is not there, with the command that gets it.
            UsageError: options that do not fit the machine.
        """
