"""The check of the kernels that the doctor runs: a small launch against the reference."""

import importlib
import json
import os
import sys

import torch

__all__ = ["check"]


def check(use_triton: bool) -> str:
    """Quantize a small tensor with the reference and, if asked for, with the Triton kernel, on every GPU in turn.

    Returns what was compared; raises AssertionError where a result is wrong.
    """
    from semkv_bench.kernels import affine_reference

    # 0, 1 and 2.5 at three levels between 0 and 2.5: scale 1.25, codes 0, 1 (0.8 rounds up) and 2.
    known = torch.tensor([[[0.0, 1.0, 2.5, 0.0]]])
    back = affine_reference.affine_quantize_dequantize(known, torch.tensor([[3]]), 4)
    assert back.flatten().tolist() == [0.0, 1.25, 2.5, 0.0], f"the reference gives {back.flatten().tolist()}"
    if not use_triton:
        return "reference"
    kernels = importlib.import_module("semkv_bench.kernels.affine_triton")
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    levels = torch.tensor([[2], [5]])
    expected = affine_reference.affine_quantize_dequantize(x, levels, 64)
    gpus = torch.cuda.device_count()
    # The first GPU is current all the while: a launch must find the one that holds its tensor.
    for device in [torch.device("cuda", number) for number in range(gpus)] or [torch.device("cpu")]:
        mine = kernels.affine_quantize_dequantize(x.to(device), levels.to(device), 64)
        assert torch.equal(mine.cpu(), expected), f"on {device} the Triton kernel and its reference differ"
    where = torch.cuda.get_device_name() if gpus else "the CPU, interpreted"
    each = f" and {gpus - 1} more, each launch on the GPU of its tensor" if gpus > 1 else ""
    return f"Triton on {where}{each}, equal to the reference"


if __name__ == "__main__":
    if not torch.cuda.is_available():
        # Triton must see it before it is first imported.
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        print(json.dumps({"ok": True, "found": check(use_triton="--triton" in sys.argv)}))
    except Exception as error:
        print(json.dumps({"ok": False, "found": f"{type(error).__name__}: {error}"[:300]}))
