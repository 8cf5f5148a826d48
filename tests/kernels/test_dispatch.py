"""Which implementation runs."""

from types import SimpleNamespace

import pytest
import torch

from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.kernels import affine_quantize, affine_reference, backend, dispatch


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("SEMKV_KERNELS", raising=False)


def test_triton_on_gpus_and_the_reference_elsewhere(monkeypatch):
    assert backend("cuda") == backend("cuda:1") == "triton"
    assert backend("cpu") == backend("mps") == "reference"
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    assert backend("cuda") == "reference"


def test_override(monkeypatch):
    monkeypatch.setenv("SEMKV_KERNELS", "reference")
    assert backend("cuda") == "reference"
    monkeypatch.setenv("SEMKV_KERNELS", "triton")
    assert backend("cuda") == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend("cpu") == "triton"


def test_impossible_overrides_say_what_to_do(monkeypatch):
    monkeypatch.setenv("SEMKV_KERNELS", "cuda")
    with pytest.raises(UsageError, match="SEMKV_KERNELS=cuda is not known; use reference or triton"):
        backend("cpu")
    monkeypatch.setenv("SEMKV_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="needs a GPU"):
        backend("cpu")


def test_a_wrong_value_stops_the_work_itself(monkeypatch):
    x, levels = torch.randn(1, 3, 8), torch.tensor([[4]])
    assert torch.equal(affine_quantize(x, levels, 8)[0], affine_reference.affine_quantize(x, levels, 8)[0])
    monkeypatch.setenv("SEMKV_KERNELS", "fast")
    with pytest.raises(UsageError):
        affine_quantize(x, levels, 8)


def test_attention_over_codes_is_refused_where_codes_would_read_as_zero(monkeypatch):
    jobs = pytest.importorskip("semkv_bench.kernels.attention_jobs")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name, refused in (("gfx90a:sramecc+:xnack-", True), ("gfx942:sramecc+:xnack-", False)):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _, name=name: SimpleNamespace(gcnArchName=name)
        )
        if refused:
            with pytest.raises(SemkvError, match="attention='dequantize'"):
                jobs.check_subnormals(torch.device("cuda", 0))
        else:
            jobs.check_subnormals(torch.device("cuda", 0))
    jobs.check_subnormals(torch.device("cpu"))
