"""Asking a server per setting, one after another, and turning its answers into outcomes."""

import logging
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from semkv_bench.console import ERR, track
from semkv_bench.engine.backend import Answers, Session
from semkv_bench.engine.outcome import Outcome
from semkv_bench.engine.served.client import Dialect, ServerLost
from semkv_bench.engine.served.completion import (
    Asked,
    Completion,
    LogProbs,
    check_completion,
    check_effect,
    coarse_kl,
)
from semkv_bench.engine.served.setting import ServedSetting
from semkv_bench.errors import SemkvError
from semkv_bench.grid.cost import Tokens
from semkv_bench.models.shape import ModelShape
from semkv_bench.protocols import Protocol
from semkv_bench.settings.setting import Setting
from semkv_bench.tasks import Example

__all__ = ["Served", "ServedSession"]

log = logging.getLogger(__name__)

_PROBES = 3


@dataclass(frozen=True)
class Served:
    """A server that is up under one setting; ``says`` is what it tells of itself."""

    dialect: Dialect
    says: dict[str, Any]


@dataclass(frozen=True)
class _Answer:
    """What one example got: a completion by turn, and the likeliest tokens along the reference answer."""

    turns: tuple[Completion, ...]
    contexts: tuple[int, ...]
    forced: tuple[LogProbs, ...] = ()


class ServedSession(Session):
    """A server for every setting, with all examples of a batch asked of each.

    Subclasses say how a server comes up (``serving``) and what a setting has to show (``check_storage``).
    """

    def __init__(self, label: str, tokenizer: Any, options: Any, shape: ModelShape):
        self.label = label
        self.tokenizer = tokenizer
        self.options = options
        self.shape = shape
        self.together = options.together
        self.tracks = self.together > 1
        self.logs = Path(tempfile.mkdtemp(prefix="semkv-served-"))
        self.said: dict[str, dict[str, Any]] = {}

    @abstractmethod
    def serving(self, setting: ServedSetting, longest: int) -> AbstractContextManager[Served]:
        """The server of ``setting``, up, for prompts and answers of ``longest`` tokens together.

        Raises SemkvError where it does not come up or does not store what was asked for.
        """

    def answers(
        self,
        examples: Sequence[Example],
        settings: Sequence[Setting],
        protocol: Protocol,
        alone: Sequence[bool],
    ) -> Iterator[Answers]:
        """See ``Session``: every setting's server answers all ``examples``; errors name the setting."""
        if not examples:
            return
        given: dict[str, list[_Answer]] = {}
        again: dict[int, _Answer] = {}
        for setting in settings:
            once_more = [place for place, flag in enumerate(alone) if flag] if setting.name == "full" else []
            asked = [*range(len(examples)), *once_more]
            found = self._under(setting, [examples[place] for place in asked])
            given[setting.name] = found[: len(examples)]
            again = again or dict(zip(once_more, found[len(examples) :], strict=True))
            self._check_effect(setting, given)
        for place in range(len(examples)):
            mine = [given[setting.name][place] for setting in settings]
            yield Answers(
                [self._outcomes(settings, mine, turn) for turn in range(examples[place].turns)],
                self._alone(settings[0], mine[0], again[place]) if place in again else None,
            )

    def describe(self) -> dict[str, Any]:
        """See ``Session``."""
        return {"engine": self.options.name}

    def notes(self) -> dict[str, Any]:
        """See ``Session``: what every server said of itself."""
        return {"servers": dict(self.said)}

    def _under(self, setting: ServedSetting, examples: Sequence[Example]) -> list[_Answer]:
        """The answers to ``examples``; a server that is lost is started once more and asked for what is left."""
        left, found = dict(enumerate(examples)), {}
        longest = max(map(_longest, examples))
        for chance in range(2):
            try:
                with self.serving(setting, longest) as served:
                    self.said[setting.name] = served.says
                    self._check_tokenizer(setting, served.dialect, list(left.values()))
                    for place, answer in self._asked(setting, served.dialect, left):
                        found[place] = answer
                        del left[place]
                return [found[place] for place in range(len(examples))]
            except ServerLost as error:
                if chance:
                    raise SemkvError(f"{setting.name}: {error}; it was started twice") from error
                log.warning("%s: %s; it is started once more for %d examples", setting.name, error, len(left))
        raise AssertionError("left by return or raise")

    def _asked(
        self, setting: ServedSetting, dialect: Dialect, left: dict[int, Example]
    ) -> Iterator[tuple[int, _Answer]]:
        work = list(left.items())
        with ThreadPoolExecutor(self.options.concurrency) as pool:
            futures = [(place, pool.submit(self._one, setting, dialect, example)) for place, example in work]
            try:
                for place, future in track(futures, len(futures), f"{setting.name}: examples", ERR):
                    yield place, future.result()
            finally:
                for _, future in futures:
                    future.cancel()

    def _one(self, setting: ServedSetting, dialect: Dialect, example: Example) -> _Answer:
        """All turns of one example, each over the answers that were given before."""
        ids: tuple[int, ...] = ()
        turns, contexts = [], []
        forced: tuple[LogProbs, ...] = ()
        for number in range(example.turns):
            turn = example.at(number)
            fed = example.input_ids if number == 0 else example.follow_ups[number - 1].input_ids
            ids = (*ids, *fed)
            asked = self._request(dialect, ids, turn, self.options.logprobs)
            answer = dialect.complete(asked)
            check_completion(setting.name, asked, answer)
            if number == 0:
                forced = self._forced(setting, dialect, ids, turn)
            turns.append(answer)
            contexts.append(len(ids))
            if number + 1 < example.turns:
                if answer.tokens is None:
                    raise SemkvError(
                        f"{setting.name}: the server tells no token ids, which conversations need; use single questions"
                    )
                ids = (*ids, *answer.tokens)
        return _Answer(tuple(turns), tuple(contexts), forced)

    def _request(self, dialect: Dialect, ids: tuple[int, ...], turn: Example, top: int) -> Asked:
        stops = frozenset(turn.stop_token_ids)
        return Asked(
            ids,
            self._text(dialect, ids),
            turn.max_new_tokens,
            stops,
            turn.min_new_tokens,
            top,
        )

    def _text(self, dialect: Dialect, ids: tuple[int, ...]) -> str:
        return "" if dialect.takes_ids else self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def _forced(
        self, setting: ServedSetting, dialect: Dialect, ids: tuple[int, ...], turn: Example
    ) -> tuple[LogProbs, ...]:
        """The likeliest next tokens along the reference answer, of every setting at the same places.

        None where a server without token ids cuts the text with the answer into other tokens.
        """
        if not self.options.teacher_tokens:
            return ()
        found = []
        for place in range(min(self.options.teacher_tokens, len(turn.target_ids))):
            read = (*ids, *turn.target_ids[:place])
            asked = Asked(read, self._text(dialect, read), 1, top=self.options.top, reuse=True)
            answer = dialect.complete(asked)
            if not dialect.takes_ids and answer.prompt_tokens not in (None, len(read)):
                return ()
            check_completion(setting.name, asked, answer)
            if not answer.logprobs or not answer.logprobs[0]:
                return ()
            found.append(answer.logprobs[0])
        return tuple(found)

    def _check_tokenizer(self, setting: ServedSetting, dialect: Dialect, examples: Sequence[Example]) -> None:
        for example in examples[:_PROBES]:
            text = self.tokenizer.decode(list(example.input_ids), skip_special_tokens=False)
            theirs = dialect.tokenize(text)
            ours = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if theirs is not None and list(theirs) != list(ours):
                raise SemkvError(
                    f"{setting.name}: the server makes {len(theirs)} tokens of a prompt that are {len(ours)} here: its "
                    "tokenizer is another; give the model that it serves by model=..."
                )

    def _check_effect(self, setting: Setting, given: dict[str, list[_Answer]]) -> None:
        if setting.name == "full":
            return
        pairs = [[turn for answer in given[name] for turn in answer.turns] for name in ("full", setting.name)]
        told = check_effect(setting.name, *pairs)
        self.said[setting.name]["effect"] = (
            "shown" if told else "not told: no log-probabilities, equal answers"
        )

    def _outcomes(self, settings: Sequence[Setting], answers: Sequence[_Answer], turn: int) -> list[Outcome]:
        full = answers[0]
        return [
            self._outcome(setting, answer, turn, full)
            for setting, answer in zip(settings, answers, strict=True)
        ]

    def _alone(self, setting: Setting, full: _Answer, again: _Answer) -> list[Outcome]:
        return [self._outcome(setting, again, turn, full) for turn in range(len(again.turns))]

    def _outcome(self, setting: Setting, answer: _Answer, turn: int, full: _Answer) -> Outcome:
        said = answer.turns[turn]
        divergence = (
            partial(_compared, full.forced, answer.forced) if turn == 0 else lambda: (None, None, None)
        )
        kl, first, top1 = divergence()
        held = Tokens(kept=answer.contexts[turn] + len(said.tokens or ()))
        return Outcome(
            setting,
            tokens=list(said.tokens) if said.tokens is not None else None,
            ended=said.ended,
            kl=kl,
            kl_first=first,
            top1_agreement=top1,
            turn=turn,
            context=answer.contexts[turn],
            text=said.text,
            stored=setting.holding(self.shape.cache, [held, held], held.total),
        )


def _longest(example: Example) -> int:
    fed = len(example.input_ids) + sum(len(later.input_ids) for later in example.follow_ups)
    return fed + sum(example.at(turn).max_new_tokens for turn in range(example.turns))


def _compared(
    full: Sequence[LogProbs], other: Sequence[LogProbs]
) -> tuple[float | None, float | None, float | None]:
    """Mean KL, KL of the first token, and the share of places with the same likeliest token."""
    if not full or len(full) != len(other):
        return None, None, None
    values = [coarse_kl(a, b) for a, b in zip(full, other, strict=True)]
    same = [max(a, key=a.get) == max(b, key=b.get) for a, b in zip(full, other, strict=True)]
    return sum(values) / len(values), values[0], sum(same) / len(same)
