"""Kernels compile ahead of time for GPUs that are not here, and the committed table is theirs."""

import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from attended import piece

from semkv_bench.kernels import attention_triton

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_kernels.py"
TABLE = ROOT / "results" / "kernels" / "compilation.json"
EVERY_CASE = ("cuda:90", "hip:gfx942")
BASE_CASES = ("cuda:80", "cuda:100")
QUICK = ("unpack affine values",)
SAMPLE = (
    "affine codes head_dim=80 group=80 bfloat16",
    "codebook values head_dim=128",
    "pack head_dim=128 two limbs",
    "unpack grouped head_dim=128 two-level bfloat16",
    "attention affine uniform head_dim=80",
)


@pytest.fixture
def script(monkeypatch):
    """The script as a module; what it does to the environment is undone."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("check_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "check_kernels", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_case_of_each_kernel_compiles_to_what_the_table_says(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = tmp_path / "table.json"
    command = [sys.executable, SCRIPT, "--only", *SAMPLE, "--targets", *EVERY_CASE, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = json.loads(out.read_text())
    assert len(table["rows"]) == len(SAMPLE) * len(EVERY_CASE)
    if table["triton"] != committed()["triton"]:
        pytest.skip("the committed table is of another Triton")
    assert [row for row in table["rows"] if row not in committed()["rows"]] == []


def committed():
    if not TABLE.exists():
        pytest.skip("no committed table in this installation")
    return json.loads(TABLE.read_text())


def test_the_committed_table_is_of_these_kernels(script):
    assert committed()["source"] == script.source_digest(), (
        "kernels changed since results/kernels/compilation.json: "
        "run python scripts/check_kernels.py --out results/kernels/compilation.json"
    )


def test_the_committed_table_has_every_case(script):
    rows = [(row["kernel"], row["target"]) for row in committed()["rows"]]
    cases = [(name, target) for name, target, _ in script.compilations(script.TARGETS)]
    assert rows == cases
    kernels = {name.split()[0] for name, _ in cases}
    assert kernels == {"affine", "codebook", "pack", "unpack", "attention"}
    assert set(SAMPLE) <= {name for name, _ in cases}
    counts = Counter(target for _, target in cases)
    assert counts[EVERY_CASE[0]] == counts[EVERY_CASE[1]] > counts[BASE_CASES[0]] == counts[BASE_CASES[1]]


def test_a_growing_cache_is_of_one_code(script):
    """Counts of tokens and of parts are read at run time, whether 1, a multiple of 16 or neither."""
    query, codes, counts = torch.zeros(1, 2, 16, dtype=torch.bfloat16), set(), set()
    rows = [piece(1, 50, 16, (6, 5), (6, 5))]
    for tokens in range(1, 18):
        work = attention_triton.attention_work([rows])
        for opened in (1, 9, 16, 300):
            held = torch.zeros(2, 1, 1, -(-opened // 8) * 8, 16, dtype=torch.bfloat16)[:, :, :, :opened]
            call = partial(attention_triton.packed_attention, query, query, work, [tuple(held)], 0.1)
            (launch,) = script.capture(call, "cuda")
            codes.add(script.source_of(launch).hash())
            counts.add((launch.arguments["coded_parts"], launch.arguments["parts"]))
        rows.append(piece(1, tokens, 16, (6, 5), (6, 5)))
    assert len(codes) == 1 and {16, 31} <= {coded for coded, _ in counts} | {parts for _, parts in counts}


def test_the_digest_is_of_code_and_not_of_comments(script):
    code = 'def f(x):\n    """Say."""\n    return x  # why\n'
    assert script._code_of(code) == script._code_of("def f(x):\n    return x\n")
    assert script._code_of(code) != script._code_of("def f(x):\n    return x + 1\n")


def test_the_committed_table_hardly_spills():
    # The assembler spills a few registers by choice, to fit more programs on a processor.
    allowed = {"attention": 128, "unpack": 128}
    rows = committed()["rows"]
    assert not [row for row in rows if row["spilled"] > allowed.get(row["kernel"].split()[0], 0)]


STATIC = ROOT / "results" / "kernels" / "static.json"
SLACK = 1.02


def committed_static():
    if not STATIC.exists():
        pytest.skip("no committed table in this installation")
    table = json.loads(STATIC.read_text())
    if table["triton"] != pytest.importorskip("triton").__version__:
        pytest.skip("the committed table is of another Triton")
    return table


def worse(row, before):
    """The figures of ``row`` that are worse than they were."""
    larger = [name for name in ("spilled", "instructions", "bytes") if row[name] > before[name] * SLACK]
    return larger + ["blocks"] * (row["blocks"] < before["blocks"])


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))], ids=str
)
def test_no_static_figure_is_worse_than_committed(part, script, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = {(row["kernel"], row["target"]): row for row in committed_static()["rows"]}
    cases = [(case, target) for case in script.static_cases() for target in case.targets]
    assert sorted(before) == sorted((case.name, target) for case, target in cases)
    quick = [(case, target) for case, target in cases if target == "cuda:90" and case.name in QUICK]
    rest = [pair for pair in cases if pair not in quick]
    for case, target in rest[part - 1 :: 5] if part else quick:
        row = script.static_row(case, target)
        assert worse(row, before[case.name, target]) == [], (row, before[case.name, target])


def test_a_machine_with_a_gpu_times_the_same_cases(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("kernel_bandwidth")
    device, calls = torch.device("cpu"), {}
    for made in (benchmark.coding, benchmark.packed, benchmark.attention):
        calls |= made(2, 70, 64, device)
    assert {row["kernel"] for row in committed_static()["rows"]} <= set(calls)
    for name, (call, moved) in calls.items():
        call()
        assert moved > 0, name


def test_the_page_says_what_the_static_report_says():
    """Rows of the table of attention: case, target, instructions a value, registers, bound."""
    rows = {(row["kernel"], row["target"]): row for row in committed_static()["rows"]}
    targets, named = {"sm_80": "cuda:80", "sm_90": "cuda:90", "sm_100": "cuda:100", "gfx942": "hip:gfx942"}, 0
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5 or cells[1] not in targets:
            continue
        row, named = rows[f"attention {PAGE_CASES[cells[0]]}", targets[cells[1]]], named + 1
        if cells[2]:
            assert float(cells[2]) == pytest.approx(row["instructions"], abs=0.051), line
        assert int(re.match(r"\d+", cells[3])[0]) == row["registers"], line
        spilled = re.search(r"(\d+) bytes spilled", cells[3])
        assert int(spilled[1] if spilled else 0) == row["spilled"], line
        assert ("one block" in cells[3]) == (row["blocks"] == 1), line
        # The H100's bound comes first.
        if bound := re.match(r"\d+", cells[4]):
            assert int(bound[0]) == pytest.approx(next(iter(row["microseconds"].values())), abs=0.51), line
    assert named > 20


PAGE = ROOT / "docs" / "kernels.md"
PAGE_CASES = {
    "6/5, half of the tokens each": "affine 6/5",
    "6/5": "affine 6/5",
    "uniform 5": "affine 5",
    "uniform 4": "affine 4",
    "TurboQuant at 4": "codebook 4",
    "fp8, e4m3": "e4m3",
    "mxfp4": "mxfp4",
    "q4_0": "q4_0",
    "nvfp4": "nvfp4",
    "6/5 with tokens in 16 bits in the launch": "affine 6/5 and 16 bits",
}


def test_attention_over_codes_can_win():
    """On an H100, of which one layer's float16 cache of 131,072 tokens takes 160 microseconds."""
    rows = {row["kernel"]: row for row in committed_static()["rows"] if row["target"] == "cuda:90"}
    for name, most in (("6/5", 6), ("5", 6), ("4", 4)):
        row = rows[f"attention affine {name}"]
        assert row["instructions"] <= most and row["spilled"] == 0 and row["blocks"] >= 2
        assert 3 * row["microseconds"]["H100"] < 160
    beside = rows["attention affine 6/5 and 16 bits"]
    assert beside["spilled"] == 0 and beside["blocks"] >= 2


def test_attention_over_blocks_of_channels_can_win():
    """As above, and at most a few registers are spilled."""
    rows = {row["kernel"]: row for row in committed_static()["rows"] if row["target"] == "cuda:90"}
    for name, most in (("mxfp4", 6), ("q4_0", 6), ("nvfp4", 7)):
        row = rows[f"attention {name}"]
        assert row["instructions"] <= most and row["spilled"] <= 64 and row["blocks"] >= 2
        assert 2 * row["microseconds"]["H100"] < 160


def test_a_worse_figure_is_seen():
    row = committed_static()["rows"][0]
    assert worse(row, row) == []
    assert worse({**row, "instructions": 1.1 * row["instructions"]}, row) == ["instructions"]
    assert worse({**row, "spilled": 4, "blocks": 0}, {**row, "spilled": 0}) == ["spilled", "blocks"]


def test_the_static_report_is_of_these_kernels(script):
    assert committed_static()["source"] == script.source_digest(), (
        "kernels changed since results/kernels/static.json: run python scripts/check_kernels.py --static"
    )


PTX = "ptx", "\tdiv.rn.f32 %f3, %f1, %f2;\n\tcvt.rzi.u16.f32 %rs1, %f3;\n@%p1 st.global.b8 [%rd1], %rs1;\n"
GFX = (
    "amdgcn",
    "\tv_div_scale_f32 v1, vcc, v2, v3\n\tv_div_scale_f32 v4, vcc, v2, v3\n\tv_rcp_f32_e32 v5, v4\n"
    "\tv_div_fixup_f32 v6, v5, v4, v1\n\tv_mad_u64_u32 v[0:1], s[0:1], v2, v3, v[4:5]\n"
    "\t.amdhsa_float_round_mode_32 0\n\t.amdhsa_float_round_mode_16_64 0\n"
    "\t.amdhsa_float_denorm_mode_32 3\n\t.amdhsa_float_denorm_mode_16_64 3\n",
)


@pytest.mark.parametrize(
    ("kernel", "base", "change", "said"),
    [
        ("affine_kernel", PTX, "\tmul.ftz.f32 %f1, %f2, %f3;\n", "mul.ftz.f32 flushes subnormals"),
        ("affine_kernel", PTX, "\tcvt.rz.f16.f32 %rs1, %f1;\n", "cvt.rz.f16.f32 rounds to zero"),
        ("affine_kernel", PTX, "@!%p2 add.rp.f32 %f1, %f2, %f3;\n", "add.rp.f32 rounds up or down"),
        ("codebook_kernel", PTX, "\tdiv.full.f32 %f1, %f2, %f3;\n", "div.full.f32 is approximate"),
        ("codebook_kernel", PTX, "\tex2.approx.ftz.f32 %f1, %f2;\n", "ex2.approx.ftz.f32 flushes subnormals"),
        ("attention_kernel", PTX, "\tex2.approx.ftz.f32 %f1, %f2;\n\tdiv.full.f32 %f1, %f2, %f3;\n", None),
        ("attention_kernel", PTX, "\tcvt.rn.ftz.f16.f32 %rs1, %f1;\n", "cvt.rn.ftz.f16.f32 flushes subnormals"),
        ("attention_kernel", PTX, "\tcvt.rz.f16x2.f32 %r1, %f1, %f2;\n", "cvt.rz.f16x2.f32 rounds to zero"),
        ("affine_kernel", GFX, ("denorm_mode_32 3", "denorm_mode_32 0"), "float_denorm_mode_32 is 0 and not 3"),
        ("attention_kernel", GFX, ("denorm_mode_16_64 3", "denorm_mode_16_64 0"), "float_denorm_mode_16_64 is 0"),
        ("pack_kernel", GFX, ("round_mode_32 0", "round_mode_32 3"), "float_round_mode_32 is 3 and not 0"),
        ("affine_kernel", GFX, "\tv_cvt_pkrtz_f16_f32 v1, v2, v3\n", "v_cvt_pkrtz_f16_f32 rounds to zero"),
        ("attention_kernel", GFX, "\ts_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\n", "changes the mode"),
        ("attention_kernel", GFX, "\ts_denorm_mode 0\n", "s_denorm_mode 0 changes the mode"),
        ("affine_kernel", GFX, "\tv_mac_f32_e32 v1, v2, v3\n", "v_mac_f32_e32 flushes subnormals"),
        ("affine_kernel", GFX, "\tv_exp_f32_e32 v1, v2\n", "v_exp_f32_e32 is approximate"),
        ("attention_kernel", GFX, "\tv_exp_f32_e32 v1, v2\n", None),
        ("codebook_kernel", GFX, ("\tv_div_fixup_f32 v6, v5, v4, v1\n", ""), "a division is not IEEE"),
    ],
)  # fmt: skip
def test_flushed_and_directed_numbers_are_seen(kernel, base, change, said, script):
    from kernel_numerics import numeric_faults

    name, text = base
    assert numeric_faults(kernel, {name: text}) == []
    text = text + change if isinstance(change, str) else text.replace(*change)
    found = numeric_faults(kernel, {name: text})
    assert found == [] if said is None else said in "; ".join(found), found


def test_a_loop_counts_as_often_as_it_runs(script):
    from static_figures import MACHINES, instructions

    loop = ["a", "outer:", "b", "inner:", "c", "bra inner", "d", "bra outer", "e", "end:", "bra end"]
    assert instructions(loop, ()) == 8
    assert instructions(loop, (10,)) == 3 + 10 * 5
    assert instructions(loop, (10, 7)) == 3 + 10 * (3 + 7 * 2)
    (h100, _) = MACHINES["cuda:90"]
    assert [h100.resident(*given) for given in ((174, 4096, 8), (64, 0, 4), (32, 100_000, 4))] == [1, 8, 2]
    # A float16 cache of this size is read in 160 microseconds.
    assert 160 < h100.microseconds(0, 2) < 161
