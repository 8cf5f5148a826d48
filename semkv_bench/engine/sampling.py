"""Choosing the next token: greedy, or with random numbers that all rows share."""

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from semkv_bench.engine.outcome import Request

__all__ = ["Choose", "chooser"]

Choose = Callable[[Tensor, Sequence[int]], Tensor]
"""From logits [rows, vocabulary] and the step that each row is at to token ids [rows]."""


def chooser(request: Request, number: int, temperature: float) -> Choose:
    """Picks the next token of every row in turn ``number``; a step is the number of tokens answered before.

    Sampling adds Gumbel noise that belongs to the step and is the same in all rows, so that settings differ by their
    logits and not by luck, whenever each of them comes to that step.
    """
    turn = request.turns[number]
    stops = torch.tensor(sorted(turn.stop_ids), dtype=torch.int64)
    # A stream for every prompt: examples of one seed must not share their luck.
    drawn_by = repr((request.seed, list(request.input_ids), number)).encode()
    noise: dict[int, Tensor] = {}

    def gumbel(step: int, vocabulary: int) -> Tensor:
        if step not in noise:
            digest = hashlib.sha256(drawn_by + step.to_bytes(4, "big")).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            uniform = torch.rand(vocabulary, generator=generator).clamp_min(1e-20)
            noise[step] = -(-uniform.log()).log()
        return noise[step]

    def choose(logits: Tensor, steps: Sequence[int]) -> Tensor:
        """Token of every row, int64 [rows], by logits [rows, vocabulary] at its own step."""
        early = [row for row, step in enumerate(steps) if step < turn.min_new_tokens]
        if early and len(stops):
            rows = torch.tensor(early, device=logits.device)
            logits = logits.clone()
            logits[rows[:, None], stops.to(logits.device)] = -math.inf
        if temperature:
            for past in set(noise) - set(range(min(steps), max(steps) + 1)):
                del noise[past]
            drawn = torch.stack([gumbel(step, logits.shape[-1]) for step in steps])
            logits = logits / temperature + drawn.to(logits.device)
        return logits.argmax(-1)

    return choose
