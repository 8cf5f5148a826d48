"""Tensors that say they are on a GPU and count each time that the host must wait to read one; their values are real.

Kernels do not run on them: ``launch`` is left out while they are used, so outputs of kernels are zeros. What is made on
the GPU from numbers of Python (``torch.tensor(..., device=GPU)``), which waits, too, has no values and fails.
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

READS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.unique_consecutive.default",
    "aten.masked_select.default",
    "aten.bincount.default",
    "aten.equal.default",
    "aten.repeat_interleave.Tensor",
}
GPU = torch.device("meta")  # a device that every build of torch knows; the tensors' own values are real


class OnGPU(torch.Tensor):
    """A tensor of a GPU that lies in the host's memory."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            dtype=held.dtype,
            device=GPU,
            storage_offset=held.storage_offset(),
        )

    def __init__(self, held):
        self.held = held

    def data_ptr(self):
        return self.held.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside of HostReads")


class HostReads(TorchDispatchMode):
    """Counts reads by operation while it is active, and copies to the GPU that wait for all work before them."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.waiting_copies = 0

    @property
    def total(self):
        return self.counts.total()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.to.device:  # in inference mode, its device by position
            names = ("device", "dtype", "non_blocking", "copy")
            kwargs |= dict(zip(names, args[1:], strict=False))
            func, args = torch.ops.aten.to.dtype_layout, args[:1]
        seen = []
        tree_map_only(OnGPU, seen.append, (args, kwargs))
        wanted = kwargs.get("device")
        to_gpu = wanted is not None and torch.device(wanted).type == "meta"
        to_host = bool(seen) and wanted is not None and not to_gpu
        if to_gpu:
            kwargs["device"] = torch.device("cpu")
        if seen and (str(func) in READS or to_host):
            self.counts[str(func)] += 1
        if any(isinstance(index, OnGPU) and index.dtype == torch.bool for index in _indices(func, args)):
            self.counts["index by a mask"] += 1
        copies = func is torch.ops.aten.copy_.default
        waits = not (kwargs.get("non_blocking") or (copies and args[2:] == (True,)))
        if to_gpu and not seen and args and isinstance(args[0], torch.Tensor):
            self.waiting_copies += waits
        if copies and len(seen) == 1:
            if isinstance(args[0], OnGPU):
                self.waiting_copies += waits
            else:
                self.counts[str(func)] += 1
        inner_args, inner_kwargs = tree_map_only(OnGPU, lambda x: x.held, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        if (seen or to_gpu) and "empty" in func.__name__:
            out.zero_()
        if func is torch.ops.aten._local_scalar_dense.default or to_host:
            return out
        if func._schema.is_mutable and seen and func.__name__.split(".")[0].endswith("_"):
            return args[0]
        return tree_map_only(torch.Tensor, OnGPU, out) if seen or to_gpu else out


def _indices(func, args):
    return args[1] if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) else ()
