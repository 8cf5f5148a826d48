import sys
from pathlib import Path

import pytest

from semkv_bench.importance import choice

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_modules_are_forgotten(tmp_path_factory, monkeypatch):
    """A module that a guide shows is imported anew in every test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    choice._of_file.cache_clear()
    yield
    base = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(base):
            del sys.modules[name]
