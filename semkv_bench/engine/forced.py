"""The reference answer, forced on all rows: how far each is from ``full``, and how much of it each says itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv_bench.engine.outcome import Outcome, Turn
from semkv_bench.engine.row_layer import Row
from semkv_bench.engine.sampling import Choose
from semkv_bench.errors import SemkvError
from semkv_bench.protocols.rule import CodingRule

__all__ = ["Comparison", "Said", "forced_limit", "verified"]

_FORCED_BLOCKS = 4


def forced_limit(teacher_tokens: int, rule: CodingRule) -> int:
    """Tokens of the reference answer that are forced: several blocks of them, where blocks are coded."""
    return max(teacher_tokens, _FORCED_BLOCKS * rule.block * rule.codes_tail)


@dataclass(frozen=True)
class Said:
    """How a row's own answer begins.

    fed: of its tokens, those that the row has been fed; pending: the one to feed next, None where the answer is over;
    ended: by a stop token.
    """

    tokens: list[int]
    fed: int
    pending: int | None
    ended: bool = False


def verified(
    logits: Tensor, forced: Sequence[int], turn: Turn, choose: Choose, uneven: bool = True
) -> list[Said]:
    """What each row says by itself, as far as it says what it was fed, and the token after that.

    logits [rows, fed + 1, vocabulary]: behind the question and behind each of the ``forced`` tokens that were fed
    after it. Where a row's own choice is the token that it was fed, its cache is the one that decoding token by token
    would have made, and the next choice is its own too. uneven: may the rows differ in how many tokens they keep?
    """
    rows, places = logits.shape[:2]
    chosen = torch.stack(
        [
            choose(logits[:, place].float(), [place] * rows)
            for place in range(min(places, turn.max_new_tokens))
        ],
        dim=1,
    )
    said = [_said(own, forced, turn) for own in chosen.tolist()]
    if uneven:
        return said
    fed = min(one.fed for one in said)
    return [one if one.fed == fed else Said(one.tokens[: fed + 1], fed, one.tokens[fed]) for one in said]


def _said(own: Sequence[int], forced: Sequence[int], turn: Turn) -> Said:
    tokens: list[int] = []
    for place, token in enumerate(own):
        if token in turn.stop_ids:
            return Said(tokens, place, None, ended=True)
        tokens.append(token)
        if len(tokens) == turn.max_new_tokens:
            return Said(tokens, place, None)
        if place + 1 == len(own) or token != forced[place]:
            return Said(tokens, place, token)
    raise ValueError("an answer has at least one token")


class Comparison:
    """Gathers KL and agreement of a turn's forced tokens, row by row.

    reference: log-probabilities of ``full`` [forced, vocabulary]; None: of the row among these that is ``full``.
    forced: the tokens themselves.
    """

    def __init__(
        self, reference: Tensor | None, outcomes: Sequence[Outcome], rule: CodingRule, forced: Sequence[int]
    ):
        self._known = reference
        self._forced = torch.tensor(list(forced))
        self._outcomes = outcomes
        self._always = rule.codes_prompt
        self._found: list[Tensor] = []
        self._done = 0
        self._kl: list[list[Tensor]] = [[] for _ in outcomes]
        self._same: list[list[Tensor]] = [[] for _ in outcomes]
        self._likely: list[list[Tensor]] = [[] for _ in outcomes]

    def add(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """The next forced tokens: logits [rows, tokens, vocabulary]."""
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        if self._known is None:
            full = next(number for number, row in enumerate(rows) if row.index == 0)
            self._found.append(log_probs[full].clone())
        here = slice(self._done, self._done + log_probs.shape[1])
        reference = self._found[-1] if self._known is None else self._known[here]
        self._done = here.stop
        best = reference.argmax(-1)
        tokens = self._forced[here].to(log_probs.device)[:, None]
        for row, found in zip(rows, log_probs, strict=True):
            if self._always or any(row.coded):
                kl = torch.nn.functional.kl_div(found, reference, log_target=True, reduction="none")
                self._kl[row.index].append(kl.sum(-1).clamp_min(0))
                self._same[row.index].append((found.argmax(-1) == best).float())
                self._likely[row.index].append(found.gather(-1, tokens)[:, 0])

    def finish(self) -> Tensor:
        """Fill in the outcomes; returns the reference."""
        measured = zip(self._outcomes, self._kl, self._same, self._likely, strict=True)
        for outcome, kl, same, likely in measured:
            if kl:
                values = torch.cat(kl)
                outcome.kl, outcome.kl_first = values.mean().item(), values[0].item()
                outcome.top1_agreement = torch.cat(same).mean().item()
                outcome.nll = -torch.cat(likely).mean().item()
                if not math.isfinite(outcome.kl):
                    name = outcome.setting.name
                    raise SemkvError(f"the model gave NaN or infinite logits under setting {name}")
        return torch.cat(self._found) if self._known is None else self._known
