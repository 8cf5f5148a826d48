import sys
from pathlib import Path

import pytest

from semkv_bench.importance import Metric

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_modules_are_forgotten(tmp_path_factory, monkeypatch):
    """A module that a guide shows is imported anew in every test, and its metric unknown to tests elsewhere."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(Metric, "_by_name", dict(Metric._by_name))
    yield
    base = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(base):
            del sys.modules[name]
