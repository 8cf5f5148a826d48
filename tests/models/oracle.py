"""What a sweep should give, by the plainest means: transformers' own cache, one model call a token, codes by hand."""

import copy
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def coded(x: Tensor, levels: int) -> Tensor:
    """x [..., head_dim] through affine codes of ``levels`` levels, scale and zero in float16."""
    dtype, x = x.dtype, x.float()
    zero = x.amin(-1, keepdim=True).half().float()
    scale = ((x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / (levels - 1)).half().float()
    steps = ((x - zero) / scale.where(scale > 0, torch.ones_like(scale))).round().clamp(0, levels - 1)
    return (steps * scale + zero).to(dtype)


def counts_itself(model: Any) -> bool:
    """Do the model's positions begin behind that of padding, as those of RoBERTa?"""
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())


class Oracle:
    """One sequence on one cache.

    levels: None for full precision; block: of the tail, None leaves it as it is; positions: give them, counted from 0;
    None leaves that to models that count them in another way.
    """

    def __init__(
        self, model: Any, levels: int | None, block: int | None = None, positions: bool | None = None
    ):
        self.model, self.levels, self.block = model, levels, block
        self.cache, self.length, self.done = DynamicCache(config=model.config), 0, 0
        named = signature(type(model).forward).parameters
        self.keyword = "cache" if "cache" in named else "past_key_values"
        # Not every model counts on from its cache.
        self.positions = "position_ids" in named and (
            not counts_itself(model) if positions is None else positions
        )

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Logits [tokens, vocabulary] after ``ids``."""
        given = {self.keyword: self.cache}
        if self.positions:
            given["position_ids"] = torch.arange(self.length, self.length + len(ids))[None]
        with torch.no_grad():
            found = self.model(input_ids=torch.tensor([list(ids)]), use_cache=True, **given)
        self.length += len(ids)
        return found.logits[0].float()

    def keeps_all(self, layer: DynamicLayer) -> bool:
        """Will the layer hold every token, however long the context?"""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        return not layer.is_sliding or (positions is not None and layer.sliding_window >= positions)

    def code_up_to(self, end: int) -> None:
        """Code the tokens up to ``end`` that are not coded yet, in every layer that keeps all of its tokens."""
        for layer in self.cache.layers if self.levels is not None else ():
            if isinstance(layer, DynamicLayer) and self.keeps_all(layer) and layer.keys is not None:
                for states in (layer.keys, layer.values):
                    if states.numel():
                        states[:, :, self.done : end] = coded(states[:, :, self.done : end], self.levels)
        self.done = end

    def prefill(self, ids: Sequence[int]) -> None:
        """All of a prompt but its last token, coded."""
        self.feed(ids[:-1])
        self.code_up_to(self.length)

    def step(self, ids: Sequence[int]) -> Tensor:
        """Logits [vocabulary] after ``ids``, fed after what is due was coded."""
        if self.block is not None:
            self.code_up_to(self.done + (self.length - self.done) // self.block * self.block)
        if any(getattr(layer, "number_of_states", 0) for layer in self.cache.layers):
            # Several models begin with an empty state in a call of more than one token.
            return [self.feed([token]) for token in ids][-1][-1]
        return self.feed(ids)[-1]

    def answer(self, logits: Tensor, new: int, stop: int | None = None) -> tuple[list[int], bool]:
        """The greedy answer that begins where ``logits`` say, and whether ``stop`` ended it before ``new`` tokens."""
        tokens: list[int] = []
        while (token := int(logits.argmax())) != stop:
            tokens.append(token)
            if len(tokens) == new:
                return tokens, False
            logits = self.step([token])
        return tokens, True

    def forced(self, ids: Sequence[int], first: Tensor) -> Tensor:
        """Log-probabilities [tokens, vocabulary] at the forced ``ids``; the cache stays as it was."""
        aside = copy.deepcopy((self.cache, self.length, self.done))
        logits = [first, *(self.step([token]) for token in ids[:-1])]
        self.cache, self.length, self.done = aside
        return torch.stack(logits).log_softmax(-1)


def divergence(full: Tensor, other: Tensor) -> float:
    """Mean KL(full || other) of log-probabilities [tokens, vocabulary], in nats."""
    return float((full.exp() * (full - other)).sum(-1).mean())


def converse(
    model: Any,
    turns: Sequence[Sequence[int]],
    forced: Sequence[Sequence[int]],
    new: int,
    levels: int | None,
    block: int | None,
    stop: int | None = None,
    positions: bool | None = None,
) -> list[tuple[list[int], Tensor]]:
    """Answers and forced log-probabilities of every turn. block: of the tail, which is coded whole between turns."""
    oracle, found = Oracle(model, levels, block, positions), []
    oracle.prefill(turns[0])
    asked = list(turns[0][-1:])
    for number, reference in enumerate(forced):
        logits = oracle.step(asked)
        log_probs = oracle.forced(reference, logits)
        tokens, ended = oracle.answer(logits, new, stop)
        found.append((tokens, log_probs))
        if number + 1 < len(turns):
            oracle.code_up_to(oracle.length)
            # The last token of an answer that met its limit was never fed.
            asked = [*([] if ended else tokens[-1:]), *turns[number + 1]]
    return found
