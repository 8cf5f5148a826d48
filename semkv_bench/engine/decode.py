"""One batch: rows filled from a prefilled prompt, questions asked, answers decoded together."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from semkv_bench.engine.attention import row_attention
from semkv_bench.engine.coding import RowCoder
from semkv_bench.engine.feed import feed, feed_singly
from semkv_bench.engine.forced import Comparison, Said, forced_limit, verified
from semkv_bench.engine.outcome import Outcome, Request, Turn
from semkv_bench.engine.prefill import Prefilled
from semkv_bench.engine.rows import RowCache
from semkv_bench.engine.sampling import Choose, chooser
from semkv_bench.importance.generated import GeneratedScores
from semkv_bench.models.load import LoadedModel
from semkv_bench.models.rotary import rotary_of
from semkv_bench.protocols.rule import PREFILL, CodingRule
from semkv_bench.settings.setting import Setting

__all__ = ["Decoding", "decode", "fill", "row_room"]


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded.

    own_history: later turns see a row's own answers, or else the reference answers. teacher_tokens, temperature: see
    ``EngineOptions``. uneven: can the model's attention hide places behind shorter rows?
    """

    rule: CodingRule
    own_history: bool = True
    teacher_tokens: int = 32
    temperature: float = 0.0
    uneven: bool = True

    @property
    def forced_limit(self) -> int:
        """Tokens of a reference answer that are forced."""
        return forced_limit(self.teacher_tokens, self.rule)


def row_room(turns: Sequence[Turn], how: Decoding) -> int:
    """Tokens that a row may have to hold besides the first prompt, its last token included."""
    room = 0
    for number, turn in enumerate(turns):
        longest = [turn.max_new_tokens, min(how.forced_limit, len(turn.reference_ids))]
        longest += [] if how.own_history else [len(turn.reference_ids)]
        room += len(turn.input_ids) * (number > 0) + max(longest) + 2
    return room


@torch.inference_mode()
def fill(
    loaded: LoadedModel,
    prefilled: Prefilled,
    settings: Sequence[Setting],
    rows: RowCache,
    room: int,
    seed: int = 0,
    rule: CodingRule = PREFILL,
) -> RowCoder:
    """Give every setting a row that holds the prompt's cache as that setting would return it.

    room: tokens that will follow.
    """
    layers, rotary = loaded.shape.quantized_layers, partial(rotary_of, loaded)
    coding = RowCoder(rows, settings, rule, layers, prefilled.ids, seed, rotary)
    coding.fill(prefilled.cache, room, prefilled.ranks, prefilled.unseen.__getitem__)
    return coding


@torch.inference_mode()
def decode(
    loaded: LoadedModel,
    prefilled: Prefilled,
    request: Request,
    settings: Sequence[Setting],
    how: Decoding,
    rows: RowCache,
    references: dict[int, Tensor],
) -> list[list[Outcome]]:
    """Answer the request under ``settings`` as the rows of one batch: outcomes by setting, then by turn.

    rows: whose buffers are filled. references: log-probabilities of ``full`` by turn, which are taken from the first
    setting and added where they are missing.
    """
    room = row_room(request.turns, how)
    coding = fill(loaded, prefilled, settings, rows, room, request.seed, how.rule)
    batch = _Batch(loaded, coding, request, how, references)
    with ExitStack() as stack:
        stack.enter_context(row_attention(loaded, rows))
        if noted := coding.noted:
            length = len(prefilled.ids)
            coding.notes = GeneratedScores(
                loaded, noted, len(settings), length + room, length - 1, prefilled.hidden
            )
            stack.enter_context(coding.notes.watching())
        return _take_turns(batch, settings)


@dataclass(frozen=True)
class _Batch:
    """What all steps of one batch need."""

    loaded: LoadedModel
    coding: RowCoder
    request: Request
    how: Decoding
    references: dict[int, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> RowCache:
        """The cache that all rows of the batch share."""
        return self.coding.rows


def _take_turns(batch: _Batch, settings: Sequence[Setting]) -> list[list[Outcome]]:
    request, how = batch.request, batch.how
    answered: list[list[Outcome]] = [[] for _ in settings]
    questions = [[request.input_ids[-1]]] * len(settings)
    for number, turn in enumerate(request.turns):
        outcomes = [Outcome(setting, batch_rows=len(settings), turn=number) for setting in settings]
        more = number + 1 < len(request.turns)
        choose = chooser(request, number, how.temperature)
        said, undo = _ask(batch, turn, questions, outcomes, choose, more and not how.own_history)
        _decode(batch, turn, choose, outcomes, said, more)
        for outcome, mine in zip(outcomes, answered, strict=True):
            mine.append(outcome)
        if more:
            batch.rows.unpark()
            if undo is not None:
                undo()
                feed_singly(batch.loaded, batch.coding, turn.reference_ids)
            batch.coding.close(all_open=True)
            following = list(request.turns[number + 1].input_ids)
            questions = [
                [*_unfed(outcomes[row.index], how.own_history), *following] for row in batch.rows.rows
            ]
    return answered


def _ask(
    batch: _Batch,
    turn: Turn,
    questions: Sequence[list[int]],
    outcomes: Sequence[Outcome],
    choose: Choose,
    keep_question: bool,
) -> tuple[list[Said], Callable[[], None] | None]:
    """Feed every row its question, and the forced answer after it to measure KL.

    Returns how each row's own answer begins, which it has been fed so far; and, with ``keep_question``, a function
    that lets the rows end with their questions again.
    """
    coding, rows = batch.coding, batch.rows
    forced = list(turn.reference_ids[: batch.how.forced_limit])
    ends = [length + len(ids) for length, ids in zip(rows.lengths, questions, strict=True)]
    for row, end in zip(rows.rows, ends, strict=True):
        outcomes[row.index].context, row.reads = end, 0
    along = _along(coding, questions, len(forced))
    shortest = min(map(len, questions))
    widest = max(map(len, questions)) + along
    asked = [[*ids, *forced[:along]] for ids in questions]
    logits = feed(batch.loaded, coding, asked, keep=widest - shortest + 1)
    starts = [len(ids) - shortest for ids in questions]
    behind = torch.stack([logits[row, start : start + along + 1] for row, start in enumerate(starts)])
    said = verified(behind, forced, turn, choose, batch.how.uneven)
    begun = [end + one.fed for end, one in zip(ends, said, strict=True)]
    if forced:
        comparison = Comparison(batch.references.get(outcomes[0].turn), outcomes, batch.how.rule, forced)
        comparison.add(behind[:, : len(forced)], rows.rows)
        if along + 1 < len(forced):
            undo = coding.mark(begun)
            feed_singly(batch.loaded, coding, forced[along:-1], comparison.add)
            undo()
        batch.references[outcomes[0].turn] = comparison.finish()
    rows.rewind(begun)
    back = coding.mark(ends) if keep_question else None
    for row, one in zip(rows.rows, said, strict=True):
        # As many reads as if the kept tokens had been fed one by one.
        row.reads += one.fed * len(batch.loaded.shape.quantized_layers) * any(row.coded)
    return said, back


def _along(coding: RowCoder, questions: Sequence[list[int]], tokens: int) -> int:
    """How many of ``tokens`` forced tokens may be fed with the questions and see what single steps would see."""
    if coding.rows.recurrent:
        # A state that has taken a token in cannot give it back.
        return 0
    # Where the questions' tokens are ranked by what they were fed with, forced ones must not be among it.
    if coding.notes is not None or any(coding.due(row, len(ids)) for row, ids in enumerate(questions)):
        return 0
    limits = [coding.fits(row, len(ids)) for row, ids in enumerate(questions)]
    return min([tokens, *(limit for limit in limits if limit is not None)])


def _decode(
    batch: _Batch, turn: Turn, choose: Choose, outcomes: Sequence[Outcome], said: Sequence[Said], more: bool
) -> None:
    """Let every row answer. Rows that have ended leave, or wait aside if there are ``more`` turns."""
    coding, rows = batch.coding, batch.rows
    pending: dict[int, int | None] = {}
    for row, one in zip(rows.rows, said, strict=True):
        outcome = outcomes[row.index]
        outcome.tokens, outcome.ended = list(one.tokens), one.ended
        pending[row.index] = one.pending
    while True:
        leaving = [number for number, row in enumerate(rows.rows) if pending[row.index] is None]
        for number in leaving:
            _note(batch, outcomes[rows.rows[number].index], number)
        if not (rows.park(leaving) if more else rows.drop(leaving)):
            return
        coding.close()
        logits = feed(batch.loaded, coding, [[pending[row.index]] for row in rows.rows], keep=1)
        steps = [len(outcomes[row.index].tokens) for row in rows.rows]
        for row, token in zip(rows.rows, choose(logits[:, -1].float(), steps).tolist(), strict=True):
            outcome = outcomes[row.index]
            outcome.ended = token in turn.stop_ids
            if not outcome.ended:
                outcome.tokens.append(token)
            over = outcome.ended or len(outcome.tokens) == turn.max_new_tokens
            pending[row.index] = None if over else token


def _note(batch: _Batch, outcome: Outcome, number: int) -> None:
    """Write down how the cache of row ``number`` was used in the turn that ends."""
    row = batch.rows.rows[number]
    outcome.reads = row.reads
    coded = 0 if outcome.setting.kind == "full" else sum(row.coded) / 2
    outcome.coded_share = coded / batch.rows.lengths[number]
    prompt = batch.coding.prompt
    held = batch.coding.stored(number)
    outcome.stored = outcome.setting.holding(batch.loaded.shape.cache, held, prompt)
    outcome.read_share = row.read_share


def _unfed(outcome: Outcome, own_history: bool) -> list[int]:
    """The answer's last token, where it was chosen and never fed: an answer that met its limit."""
    return outcome.tokens[-1:] if own_history and not outcome.ended else []
