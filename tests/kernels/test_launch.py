"""Every launch happens on the GPU that holds the tensor."""

import ast
from pathlib import Path

import pytest
import torch
from attended import piece

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from semkv_bench import kernels
from semkv_bench.errors import SemkvError
from semkv_bench.kernels import (
    AlignedLayout,
    affine_triton,
    attention_triton,
    codebook_triton,
    packing_triton,
)
from semkv_bench.kernels.launch import launch
from semkv_bench.kernels.packed import PackedLayout, PackedVectors
from semkv_bench.quantizers.turboquant import codebook_tables

FOLDER = Path(kernels.__file__).parent


class Device:
    """Stands in for ``torch.cuda.device_of`` and remembers which tensor's GPU is current."""

    def __init__(self):
        self.current = []

    def __call__(self, tensor):
        return Guard(self, tensor)


class Guard:
    def __init__(self, device, tensor):
        self.device, self.tensor = device, tensor

    def __enter__(self):
        self.device.current.append(self.tensor)

    def __exit__(self, *_):
        self.device.current.pop()


class Kernel:
    """Stands in for a kernel and notes which tensor's GPU was current at each launch."""

    def __init__(self, device, error=None):
        self.device, self.error, self.launched_on = device, error, []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.launched_on.append(list(self.device.current))
            self.arguments = arguments
            if self.error:
                raise self.error

        return run


@pytest.fixture
def device(monkeypatch):
    stand_in = Device()
    monkeypatch.setattr(torch.cuda, "device_of", stand_in)
    return stand_in


def layout():
    return PackedLayout.build(torch.tensor([5, 6, 5, 6] * 8), heads=2, head_dim=16)


def vectors():
    scale = torch.zeros(2, 32, 1, dtype=torch.float16)
    return PackedVectors(layout(), torch.zeros(layout().words, dtype=torch.int32), scale, zero=scale)


CALLS = {
    "affine": (
        affine_triton,
        "affine_kernel",
        lambda x: affine_triton.affine_quantize(x, torch.tensor([[5]]), 16),
    ),
    "codebook": (
        codebook_triton,
        "codebook_kernel",
        lambda x: codebook_triton.codebook_quantize(
            x, torch.tensor([[5]]), codebook_tables(16, 16, x.device)
        ),
    ),
    "pack": (packing_triton, "pack_kernel", lambda x: packing_triton.pack(x.to(torch.uint8), layout())),
    "unpack": (packing_triton, "unpack_kernel", lambda x: packing_triton.unpack(vectors().words, layout())),
    "values": (packing_triton, "unpack_kernel", lambda x: packing_triton.unpack_dequantize(vectors())),
    "attention": (
        attention_triton,
        "attention_kernel",
        lambda x: attention_triton.packed_attention(
            x[:1, :4], x[:1, :4], attention_triton.attention_work([[piece(2, 9, 16, (5,), (5,))]]), [], 0.1
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_is_launched_within_the_guard_of_its_tensor(name, device, monkeypatch):
    module, kernel, call = CALLS[name]
    stand_in = Kernel(device)
    monkeypatch.setattr(module, kernel, stand_in)
    call(torch.zeros(2, 32, 16))
    (guards,) = stand_in.launched_on
    assert len(guards) == 1
    # What the kernel reads, and not a tensor that may lie elsewhere.
    assert any(guards[0] is argument for argument in stand_in.arguments if isinstance(argument, torch.Tensor))
    assert device.current == []


def test_the_guard_is_left_when_a_launch_fails(device):
    with pytest.raises(RuntimeError, match="out of resources"):
        launch(Kernel(device, RuntimeError("out of resources")), (1,), torch.zeros(1))
    assert device.current == []


def test_a_block_that_does_not_fit_is_one_clear_line(device):
    kernel = Kernel(device, OutOfResources(300_000, 232_448, "shared memory"))
    kernel.__name__ = "attention_kernel"
    line = (
        "attention_kernel needs 300000 of shared memory and this GPU has 232448: set SEMKV_KERNELS=reference"
    )
    with pytest.raises(SemkvError, match=line):
        launch(kernel, (1,), torch.zeros(1))
    assert device.current == []


def test_more_programs_than_a_grid_has_are_refused(device):
    kernel = Kernel(device)
    launch(kernel, (2**31 - 1, 65535), torch.zeros(1))
    for grid in ((2**31,), (1, 65536)):
        with pytest.raises(
            SemkvError, match=r"a kernel would need \d+ programs side by side: set SEMKV_KERNELS"
        ):
            launch(kernel, grid, torch.zeros(1))
    assert len(kernel.launched_on) == 1


def test_more_than_a_million_tokens_have_their_programs(device, monkeypatch):
    """Blocks of 16 tokens: more of them than any axis of a grid but the first has programs."""
    kernel, grids = Kernel(device), []
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: lambda *args, **options: grids.append(grid))
    tokens = 16 * 65536 + 1
    wide = PackedLayout.build(torch.full((tokens,), 5), heads=1, head_dim=2, block=16)
    for name in ("pack_kernel", "unpack_kernel"):
        monkeypatch.setattr(packing_triton, name, kernel)
    words = packing_triton.pack(torch.zeros(1, tokens, 2, dtype=torch.uint8), wide)
    packing_triton.unpack(words, wide)
    monkeypatch.setattr(attention_triton, "attention_kernel", kernel)
    aligned = AlignedLayout.build(torch.full((tokens,), 5), heads=1, head_dim=2)
    scale = torch.zeros(1, tokens, 1, dtype=torch.float16)
    side = PackedVectors(aligned, torch.zeros(aligned.words, dtype=torch.int32), scale, zero=scale)
    work = attention_triton.attention_work([[(side, side)]])
    attention_triton.packed_attention(torch.zeros(1, 4, 2), torch.zeros(1, 4, 2), work, [], 1.0)
    assert [grid[1] for grid in grids[:2]] == [65520, 17] and grids[2] == (65537, 1) and len(grids) == 4
    # Jobs are neighbours that end with the last token, and few enough to be merged.
    starts, ends = work.jobs[0, :, 9].tolist(), work.jobs[0, :, 10].tolist()
    assert ends == [*starts[1:], tokens] and starts[0] == 0 and len(starts) <= 1536


def test_codes_beyond_offsets_of_32_bits_are_one_clear_line():
    levels = torch.full((1,), 256).expand(1 << 20)
    for build in (PackedLayout.build, AlignedLayout.build):
        with pytest.raises(
            SemkvError, match=r"codes of 1048576 tokens take \d+ words of one layer and side, .*shorter"
        ):
            build(levels, heads=128, head_dim=64)


def test_nothing_is_launched_elsewhere():
    """A kernel indexed by a grid is a launch; only ``launch.launch`` does it."""
    for path in FOLDER.glob("*.py"):
        launches = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
            and "kernel" in node.func.value.id
        ]
        assert len(launches) == (path.name == "launch.py"), path.name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_the_second_of_two_gpus():
    x = torch.randn(2, 64, 32, device="cuda:1")
    levels = torch.tensor([[5]], device="cuda:1")
    with torch.cuda.device(0):
        codes, _, _ = affine_triton.affine_quantize(x, levels, 32)
        assert torch.cuda.current_device() == 0
    expected, _, _ = kernels.affine_reference.affine_quantize(x.cpu(), levels.cpu(), 32)
    assert codes.cpu().equal(expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_decoding_step_can_be_captured():
    """Attention reads nothing back and brings nothing to the GPU, so that a CUDA graph can hold it."""
    work = attention_triton.attention_work([[piece(2, 400, 64, (6, 5), (6, 5), device="cuda")]])
    query = torch.randn(1, 8, 64, device="cuda")
    open_ = tuple(torch.randn(2, 1, 2, 33, 64, device="cuda", dtype=torch.float16))

    def step():
        coded, plain = attention_triton.packed_attention(query, query, work, [open_], 0.125)
        return kernels.merge_attention(
            *(torch.stack(pair, dim=1) for pair in zip(coded, plain, strict=True))
        )[0]

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    query.copy_(torch.randn_like(query))
    graph.replay()
    torch.testing.assert_close(captured, step())
