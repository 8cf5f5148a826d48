"""Parameters that only ``make test-all`` goes through, because they are like others."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

# Mistral without a window and Qwen 2 go through the cache as Llama does.
OWN_WAY, LIKE_LLAMA = ("gemma3", "llama"), ("mistral", "qwen2")


def thinned(values: Iterable[Any], *often: Any) -> list[Any]:
    """The values, all but ``often`` marked slow."""
    return [value if value in often else pytest.param(value, marks=pytest.mark.slow) for value in values]


def of_models(cases: Sequence[tuple], *often: tuple) -> list[Any]:
    """Parameters of the fixture ``tiny`` and of each case: all cases of the models that go their own way.

    Of those that are like Llama, the last case alone. All but ``often`` are marked slow, and all of the latter; with
    a model's name before a case it is often of that model alone.
    """
    slow = pytest.mark.slow
    own = [(name, case) for name in OWN_WAY for case in cases]
    return [
        *(
            pytest.param(name, *case, marks=[] if case in often or (name, *case) in often else [slow])
            for name, case in own
        ),
        *(pytest.param(name, *cases[-1], marks=slow) for name in LIKE_LLAMA),
    ]
