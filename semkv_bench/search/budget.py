"""Choosing one option for every part so that the loss is small and the bits stay within a budget."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Option", "cheapest", "choose", "spread"]


@dataclass(frozen=True)
class Option:
    """What one choice for one part takes and loses. bits: of the whole part; loss: what choosing it adds."""

    bits: float
    loss: float


def cheapest(parts: Sequence[Sequence[Option]]) -> list[int]:
    """The option of every part that takes the fewest bits."""
    return [min(range(len(options)), key=lambda i: options[i].bits) for options in parts]


def choose(parts: Sequence[Sequence[Option]], budget: float) -> list[int]:
    """One option of every part, of small total loss, whose bits sum up to at most ``budget``.

    From the cheapest options upwards along the lower convex hull of each part, the step first that saves the most loss
    for a bit; then whatever still fits and saves most for a bit. With losses that add up, the sum is above the best
    possible by less than the loss that the first step which did not fit would have saved.

    Raises ValueError where even the cheapest options take more than the budget.

    >>> choose([[Option(1, 8), Option(2, 1)], [Option(1, 3), Option(2, 2)]], budget=3)
    [1, 0]
    """
    hulls = [_hull(options) for options in parts]
    chosen = [hull[0] for hull in hulls]
    left = budget - sum(options[at].bits for options, at in zip(parts, chosen, strict=True))
    if left < -_rounding(budget):
        raise ValueError("the cheapest options take more than the budget")
    steps = [
        (-_gain(parts[number][low], parts[number][high]), number, low, high)
        for number, hull in enumerate(hulls)
        for low, high in itertools.pairwise(hull)
    ]
    for _, number, low, high in sorted(steps):
        more = parts[number][high].bits - parts[number][low].bits
        # Steps of a part come in order, so one whose first did not fit stays where it is.
        if chosen[number] == low and more <= left + _rounding(budget):
            chosen[number], left = high, left - more
    while best := max(_still_fitting(parts, chosen, left + _rounding(budget)), default=None):
        _, number, at = best
        left -= parts[number][at].bits - parts[number][chosen[number]].bits
        chosen[number] = at
    return chosen


def _still_fitting(
    parts: Sequence[Sequence[Option]], chosen: Sequence[int], left: float
) -> Iterator[tuple[float, int, int]]:
    """Gain for a bit, part and option of every choice that saves loss and takes at most ``left`` bits more."""
    for number, (options, now) in enumerate(zip(parts, chosen, strict=True)):
        for at, option in enumerate(options):
            more = option.bits - options[now].bits
            if 0 < more <= left and option.loss < options[now].loss:
                yield _gain(options[now], option), number, at


def spread(
    parts: Sequence[Sequence[Option]], low: Sequence[int], high: Sequence[int], budget: float
) -> list[int]:
    """The option ``low`` of every part, and ``high`` of as many as the budget allows, evenly over the parts."""
    chosen = list(low)
    left = budget - sum(parts[number][at].bits for number, at in enumerate(low))
    # Multiples of the golden section fall evenly, wherever they end.
    order = sorted(range(len(parts)), key=lambda number: number * 0.6180339887498949 % 1)
    for number in order:
        more = parts[number][high[number]].bits - parts[number][low[number]].bits
        if more <= left + _rounding(budget):
            chosen[number], left = high[number], left - more
    return chosen


def _hull(options: Sequence[Option]) -> list[int]:
    """Options from few bits to many, each of which saves less loss for a bit than the one before it."""
    hull: list[int] = []
    for at in sorted(range(len(options)), key=lambda i: (options[i].bits, options[i].loss)):
        if hull and options[at].loss >= options[hull[-1]].loss:
            continue
        while len(hull) > 1 and _gain(options[hull[-1]], options[at]) >= _gain(
            options[hull[-2]], options[hull[-1]]
        ):
            hull.pop()
        hull.append(at)
    return hull


def _gain(low: Option, high: Option) -> float:
    """Loss that a step saves for a bit."""
    return (low.loss - high.loss) / (high.bits - low.bits)


def _rounding(budget: float) -> float:
    return 1e-9 * max(1.0, abs(budget))
