"""What the caches of a plan will cost, computed as the engine computes it from what its rows held."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from semkv_bench.grid.cost import Cost
from semkv_bench.models.shape import ModelShape
from semkv_bench.protocols import Protocol
from semkv_bench.settings.setting import Setting
from semkv_bench.tasks import Example

__all__ = ["CONTEXTS", "cost_at", "costs_at_contexts", "mean_cache_bits", "tails_of", "typical_tails"]

CONTEXTS = (8192, 32768, 131072)


def tails_of(example: Example, own_history: bool) -> tuple[int, ...]:
    """Tokens that follow the coded prompt, turn by turn, every answer at its limit."""
    turns = (example, *example.follow_ups)
    tails = []
    for number, turn in enumerate(turns):
        # What begins a tail is the prompt's last token, or the last one of an answer, which was not fed yet.
        asked = len(turn.input_ids) if number else 0
        last = number + 1 == len(turns)
        answer = turn.max_new_tokens if own_history or last else len(turn.target_ids) + 1
        tails.append(asked + answer)
    return tuple(tails)


def typical_tails(examples: Sequence[Example], own_history: bool) -> tuple[int, ...]:
    """The tails of the example in the middle, by how many tokens they are."""
    tails = sorted((tails_of(example, own_history) for example in examples), key=lambda t: (sum(t), t))
    return tails[(len(tails) - 1) // 2]


def cost_at(
    setting: Setting, shape: ModelShape, protocol: Protocol, tokens: int, tails: Sequence[int]
) -> Cost:
    """What a cache of ``tokens`` tokens costs, of which ``tails`` follow the coded prompt."""
    prompt = max(0, tokens - sum(tails))
    held = protocol.rule.stored(setting, prompt, tails)
    return setting.cost(setting.holding(shape.cache, held, prompt))


def costs_at_contexts(
    setting: Setting, shape: ModelShape, protocol: Protocol, tails: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Bits per value and bytes of a whole cache under the protocol, by the number of tokens that it holds."""
    found = {}
    for tokens in CONTEXTS:
        cost = cost_at(setting, shape, protocol, tokens, tails)
        found[str(tokens)] = {
            "cache_bits": cost.cache_bits,
            "compression": cost.compression,
            "cache_bytes": cost.nbytes,
            "full_bytes": cost.full_bytes,
        }
    return found


def mean_cache_bits(
    setting: Setting, shape: ModelShape, protocol: Protocol, examples: Sequence[Example]
) -> float:
    """Mean over the examples of the bits per value that their caches end with, every answer at its limit."""
    cases = Counter((len(e.input_ids) - 1, tails_of(e, protocol.own_history)) for e in examples)
    bits = (
        times * cost_at(setting, shape, protocol, prompt + sum(tails), tails).cache_bits
        for (prompt, tails), times in cases.items()
    )
    return sum(bits) / len(examples)
