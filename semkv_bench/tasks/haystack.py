"""Filler text for retrieval prompts: repeated noise, and varied prose from a small grammar; no digits."""

import random
from collections.abc import Callable, Sequence

__all__ = ["FILLERS", "NOISE", "insert_at", "noise", "prose"]

NOISE = (
    "The kettle is on.",
    "The lamp is warm.",
    "Rain taps on the roof.",
    "A cat sleeps by the door.",
    "The street is quiet.",
    "Bread cools on the table.",
    "Now we wait, and then we wait some more.",
)

_PEOPLE = (
    "the baker", "an old sailor", "the youngest sister", "a travelling painter", "the schoolteacher",
    "my neighbour", "the night watchman", "a quiet carpenter", "the ferry captain", "a stubborn gardener",
    "the postman", "her grandfather", "the new librarian", "a visiting doctor", "the shopkeeper",
    "a retired miner", "the choir leader", "a young mechanic", "the beekeeper", "a tired farmer",
)  # fmt: skip
_DEEDS = (
    "mended a broken fence", "carried a basket of pears", "painted the window frames",
    "read aloud from a letter", "swept the stone steps", "tuned a dusty piano", "sorted a box of buttons",
    "planted a row of beans", "told a long story", "fixed the leaking pump", "folded the clean sheets",
    "polished the brass bell", "sharpened every tool in the shed", "cooked a pot of lentils",
    "wrote a note to a friend", "watched the boats come in", "taught the children a song",
    "counted the sheep twice", "forgot an umbrella on the bench", "drew a careful map",
    "shared a loaf of bread", "lit a small fire",
)  # fmt: skip
_PLACES = (
    "near the mill", "behind the church", "at the edge of the market", "beside the slow river",
    "in the old barn", "under the chestnut tree", "on the upper road", "by the empty station",
    "across from the inn", "in a narrow courtyard", "at the top of the hill", "outside the bakery",
    "along the sandy path", "inside the greenhouse", "next to the fountain", "at the far end of the pier",
)  # fmt: skip
_TIMES = (
    "early in the morning", "after the storm", "before supper", "late in the autumn",
    "on the day of the fair", "during the long winter", "as the bells rang", "while the fog was lifting",
    "at the end of the week", "when the harvest was done", "in the first warm days of spring",
    "shortly after sunset",
)  # fmt: skip
_REASONS = (
    "because nobody else would do it", "although the wind was cold", "and did not speak of it again",
    "while the dog looked on", "so that the guests would feel welcome", "and hummed the whole time",
    "without being asked", "in spite of the noise from the road", "as people there have always done",
    "and everyone agreed it was well done", "hoping the weather would hold", "with more patience than skill",
)  # fmt: skip
_MOODS = (
    "The air smelled of {a} and {b}.",
    "Nothing in the village was as familiar as the smell of {a} and {b}.",
    "People spoke about {a}, and then, as usual, about {b}.",
    "There was much talk of {a} that year, and none of {b}.",
    "A letter arrived that mentioned {a} and nothing else.",
    "Some preferred {a}; others would only hear of {b}.",
)
_THINGS = (
    "woodsmoke", "wet leaves", "fresh paint", "cut grass", "warm milk", "honey", "rope", "candle wax",
    "apples", "sea salt", "new leather", "strong coffee", "clean linen", "dry hay", "pine resin",
    "roasted chestnuts",
)  # fmt: skip


def noise(rng: random.Random) -> Callable[[], str]:
    """Sentences of NOISE, over and over in one order, starting anywhere."""
    position = rng.randrange(len(NOISE))

    def sentence() -> str:
        nonlocal position
        position += 1
        return NOISE[position % len(NOISE)]

    return sentence


def prose(rng: random.Random) -> Callable[[], str]:
    """Plain English sentences of a slow village story, each drawn anew."""

    def sentence() -> str:
        if rng.random() < 0.2:
            a, b = rng.sample(_THINGS, 2)
            return rng.choice(_MOODS).format(a=a, b=b)
        who, deed, place, time, reason = (
            rng.choice(words) for words in (_PEOPLE, _DEEDS, _PLACES, _TIMES, _REASONS)
        )
        pattern = rng.choice(_PATTERNS)
        text = pattern.format(who=who, deed=deed, place=place, time=time, reason=reason)
        return text[0].upper() + text[1:]

    return sentence


_PATTERNS = (
    "{time}, {who} {deed} {place}.",
    "{who} {deed} {place} {time}.",
    "{place}, {who} {deed} {reason}.",
    "{who} {deed} {reason}.",
    "{who}, who had just come back, {deed} {place}.",
    "it was {who} who {deed} {time}, {reason}.",
    "{time}, and not for the first time, {who} {deed}.",
)

FILLERS = {"noise": noise, "prose": prose}


def insert_at(filler: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """``filler`` with each needle placed before the sentence at its depth (0 first, 1 after the last).

    The needles keep their order among themselves where two depths fall on the same place.
    """
    places = sorted((round(depth * len(filler)), i) for i, depth in enumerate(depths))
    out: list[str] = []
    start = 0
    for place, i in places:
        out += [*filler[start:place], needles[i]]
        start = place
    return out + list(filler[start:])
