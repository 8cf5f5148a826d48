"""Where kernels run in these tests, and buffers that notice a stray write.

``test_triton_*`` run on a GPU where there is one. Elsewhere ``test_interpreter`` runs them in a child
process with TRITON_INTERPRET=1, which Triton must see before it is first imported.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS_TRITON = INTERPRETED or torch.cuda.is_available()
collect_ignore_glob = [] if RUNS_TRITON else ["test_triton_*.py"]

_GUARD = 256  # bytes on either side
_POISON = 0xA5


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


@pytest.fixture
def canaries(monkeypatch):
    """Poison every buffer that ``torch.empty`` hands out, and check the bytes around it afterwards."""
    original, handed_out = torch.empty, []

    def guarded(*shape, dtype=torch.float32, device=None, **kwargs):
        if kwargs:
            return original(*shape, dtype=dtype, device=device, **kwargs)
        size = shape[0] if shape and not isinstance(shape[0], int) else shape
        length = original(size, dtype=dtype, device="meta").nbytes
        store = torch.full((length + 2 * _GUARD,), _POISON, dtype=torch.uint8, device=device)
        handed_out.append((store, length))
        return store[_GUARD : _GUARD + length].view(dtype).view(size)

    monkeypatch.setattr(torch, "empty", guarded)
    yield handed_out
    monkeypatch.undo()
    assert handed_out, "no buffer was guarded"
    for store, length in handed_out:
        assert (store[:_GUARD] == _POISON).all(), "written before a buffer"
        assert (store[_GUARD + length :] == _POISON).all(), "written behind a buffer"
