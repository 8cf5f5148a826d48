"""What the engine is asked, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from semkv_bench.grid.cost import Stored
from semkv_bench.settings.setting import Setting
from semkv_bench.tasks import Example, FollowUp

__all__ = ["Outcome", "Request", "Turn", "request_of"]


@dataclass(frozen=True)
class Turn:
    """One question of a conversation.

    input_ids: what is fed before the answer; reference_ids: the reference answer, forced on the model to
    measure KL; stop_ids end an answer, but not before ``min_new_tokens``.
    """

    input_ids: Sequence[int]
    reference_ids: Sequence[int]
    max_new_tokens: int
    stop_ids: frozenset[int]
    min_new_tokens: int = 0


@dataclass(frozen=True)
class Request(Turn):
    """One prompt to answer under every setting; with ``follow_ups``, a conversation that begins with it.

    context: tokens before the question; None where nobody asks. document: equal for requests about one document, whose
    prompts begin alike; empty: the request stands alone.
    """

    seed: int = 0
    context: int | None = None
    document: str = ""
    follow_ups: tuple[Turn, ...] = ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All questions, in order."""
        return (self, *self.follow_ups)


@dataclass
class Outcome:
    """What one setting answered in one turn. ``tokens`` leaves out the stop token; ``ended`` says that there was one.
    Tokens are None where an engine tells only text.

    text: the answer in words. Every witness below is None where the engine cannot give it.
    kl: mean KL(full || setting) of the next-token distributions, in nats, over the forced reference answer;
    kl_first the same for its first token; top1_agreement: share of those tokens where both rank the
    same token first. Where only generated tokens are coded, tokens before the first coded block are left out,
    and all three are None if the answer ends with it. The forced answer is coded by the same rule as a generated one.
    nll: mean negative log-likelihood of the same tokens, in nats.
    reads: how often attention was handed quantized layers; coded_share: share of the tokens given to the model
    by the end of the answer that are stored as the setting says. batch_rows: settings that were decoded together.
    context: tokens before the answer. stored: what the cache holds at the end of the answer. read_share: of the blocks
    of the prompt, the part that a step read, as a mean; None where steps read all.
    """

    setting: Setting
    tokens: list[int] | None = field(default_factory=list)
    ended: bool = False
    kl: float | None = None
    kl_first: float | None = None
    top1_agreement: float | None = None
    nll: float | None = None
    reads: int | None = None
    batch_rows: int | None = None
    turn: int = 0
    context: int = 0
    coded_share: float | None = None
    stored: Stored | None = None
    read_share: float | None = None
    text: str = ""


def request_of(example: Example, eos_ids: Sequence[int] = ()) -> Request:
    """What an example asks; ``eos_ids`` are the model's own stop tokens."""
    return Request(
        **_asked(example, eos_ids),
        seed=example.seed,
        context=example.context_tokens,
        document=f"{example.task}/{example.cluster}" if example.cluster else "",
        follow_ups=tuple(Turn(**_asked(later, eos_ids)) for later in example.follow_ups),
    )


def _asked(asked: Example | FollowUp, eos_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "input_ids": asked.input_ids,
        "reference_ids": asked.target_ids,
        "max_new_tokens": asked.max_new_tokens,
        "stop_ids": frozenset((*eos_ids, *asked.stop_token_ids)),
        "min_new_tokens": asked.min_new_tokens,
    }
