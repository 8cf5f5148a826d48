"""Parameters that only ``make test-all`` goes through, because they are like others."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], *often: Any) -> list[Any]:
    """The values, all but ``often`` marked slow."""
    return [value if value in often else pytest.param(value, marks=pytest.mark.slow) for value in values]
