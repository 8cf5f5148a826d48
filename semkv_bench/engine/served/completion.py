"""What a server answers to one prompt, and what of it must be distrusted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from semkv_bench.errors import SemkvError

__all__ = [
    "Asked",
    "Completion",
    "LogProbs",
    "check_completion",
    "check_effect",
    "coarse_kl",
    "same_answers",
]

LogProbs = Mapping[int | str, float]

_FLOOR = 1e-9


@dataclass(frozen=True)
class Asked:
    """One request: token ids of the prompt, and the limits of the answer.

    text: the prompt in words, for servers that take no ids. top: how many log-probabilities a token should come with.
    reuse: may the server keep what it computed of an earlier prompt?
    """

    ids: tuple[int, ...]
    text: str
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    top: int = 0
    reuse: bool = False


@dataclass(frozen=True)
class Completion:
    """The answer.

    tokens: ids without the one that ended it, None where the server tells none; ended: did it end by itself?
    logprobs: by token of the answer the likeliest ids (or texts) with their log-probabilities. prompt_tokens and
    cached_tokens: as the server counts them, None where it does not say. truncated: did it cut the prompt?
    """

    text: str
    tokens: tuple[int, ...] | None
    ended: bool
    logprobs: tuple[LogProbs, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    truncated: bool = False


def check_completion(name: str, asked: Asked, answer: Completion) -> None:
    """Raise SemkvError where the server did not answer this prompt, whole and anew."""
    if answer.truncated:
        raise SemkvError(
            f"{name}: the server cut a prompt of {len(asked.ids)} tokens; give it a longer context or set "
            "max_prompt_tokens=..."
        )
    if answer.prompt_tokens is not None and answer.prompt_tokens != len(asked.ids):
        raise SemkvError(
            f"{name}: the server counts {answer.prompt_tokens} tokens in a prompt of {len(asked.ids)}; it has another "
            "tokenizer, or adds to the prompt or cuts it"
        )
    if answer.cached_tokens and not asked.reuse:
        raise SemkvError(
            f"{name}: the server took {answer.cached_tokens} tokens from its prompt cache, which were not computed "
            "under this setting's conditions; switch prefix caching off"
        )
    for logprobs in answer.logprobs:
        if any(not math.isfinite(value) for value in logprobs.values()):
            raise SemkvError(f"{name}: the server gave a log-probability that is not finite")


def same_answers(one: Sequence[Completion], other: Sequence[Completion]) -> bool | None:
    """Are all answers and all log-probabilities equal? None where answers are and there are no log-probabilities."""
    equal = all(
        a.tokens == b.tokens and a.text == b.text and a.ended == b.ended
        for a, b in zip(one, other, strict=True)
    )
    if not equal:
        return False
    if not any(answer.logprobs for answer in one):
        return None
    return all(
        [dict(p) for p in a.logprobs] == [dict(p) for p in b.logprobs]
        for a, b in zip(one, other, strict=True)
    )


def check_effect(name: str, full: Sequence[Completion], answers: Sequence[Completion]) -> bool:
    """Raise SemkvError where a setting changed nothing at all; returns whether that could be told."""
    same = same_answers(full, answers)
    if same:
        raise SemkvError(
            f"{name}: all {len(answers)} answers and their log-probabilities equal those of full to the last digit: "
            "the engine did not store its cache as it was asked to"
        )
    return same is not None


def coarse_kl(reference: LogProbs, other: LogProbs) -> float:
    """KL(reference || other) in nats over the tokens that both name, and all others as one: a lower bound.

    Joining outcomes never raises a divergence, so what is left out can only make the true one larger.
    """
    shared = sorted(set(reference) & set(other), key=str)
    p = [math.exp(reference[token]) for token in shared]
    q = [math.exp(other[token]) for token in shared]
    p.append(max(_FLOOR, 1 - sum(p)))
    q.append(max(_FLOOR, 1 - sum(q)))
    return max(0.0, sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0))
