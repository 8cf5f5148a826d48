import json
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from semkv_bench.cli import main
from semkv_bench.doctor import checks, kernel_check, report
from semkv_bench.doctor.finding import MISSING, NOTE, OK
from semkv_bench.kernels import affine_reference
from semkv_bench.models import quantized


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Only the checks of places, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checks, "CHECKS", (checks._places,))
    return tmp_path


def test_this_machine_is_fit_for_the_tests(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "hub_reachable", lambda: False)
    monkeypatch.setattr(checks, "_SELFCHECK_S", 3000)
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, [check for check in report["checks"] if check["state"] == MISSING]
    found = {check["name"]: check for check in report["checks"]}
    assert report["ok"] is True
    assert {"python", "packages", "torch", "kernels", "self-test", "memory", "results", "LongBench"} <= set(
        found
    )
    assert found["self-test"]["state"] == OK and "equal to the reference" in found["self-test"]["found"]
    assert all(check["mend"] for check in report["checks"] if check["state"] != OK)
    assert not list(tmp_path.iterdir())


def test_quantized_weights_are_named_with_what_reads_them(monkeypatch, capsys):
    present: set[str] = set()
    monkeypatch.setattr(checks, "CHECKS", (checks._weight_formats,))
    monkeypatch.setattr(quantized, "_present", lambda module: module in present)
    wanted = {
        "gptq": "pip install gptqmodel optimum",
        "awq": "pip install gptqmodel",
        "bitsandbytes": "pip install bitsandbytes accelerate",
        "compressed-tensors": "pip install compressed-tensors",
    }

    def said() -> dict[str, tuple[str, str | None]]:
        # What nobody needs who has no such checkpoint makes no machine unfit.
        assert main(["doctor", "--json"]) == 0
        found = [c for c in json.loads(capsys.readouterr().out)["checks"] if c["name"] == "weights"]
        return {c["found"].split()[2]: (c["state"], c["mend"]) for c in found}

    assert said() == {method: (NOTE, mend) for method, mend in wanted.items()}
    present |= {"optimum", "accelerate", "compressed_tensors"}
    after = said()
    assert after["gptq"] == (NOTE, "pip install gptqmodel") and after["bitsandbytes"][1].endswith(
        " bitsandbytes"
    )
    assert after["compressed-tensors"] == (OK, None)


def test_what_cannot_be_written_is_missing(few, capsys):
    (few / "results").write_text("a file where the folder should be")
    assert main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert "missing: results" in out and "give out=DIR" in out


def test_an_old_and_an_absent_package(few, monkeypatch, capsys):
    def fake(name: str) -> str:
        if name == "jieba":
            raise PackageNotFoundError(name)
        return "2.0" if name == "torch" else version(name)

    monkeypatch.setattr(report, "version", fake)
    assert main(["doctor", "--json"]) == 3
    wrong = [c for c in json.loads(capsys.readouterr().out)["checks"] if c["state"] == MISSING]
    assert [(c["name"], c["found"]) for c in wrong] == [
        ("torch", "2.0 is too old"),
        ("jieba", "not installed"),
    ]
    assert wrong[0]["mend"] == "pip install 'torch>=2.6'"


def test_every_dependency_is_looked_for():
    project = Path(__file__).parents[2] / "pyproject.toml"
    wanted = tomllib.loads(project.read_text())["project"]["dependencies"]
    assert len(report._requirements()) == len(wanted)


def test_a_check_that_breaks_is_a_finding(few, monkeypatch, capsys):
    def _gone():
        raise RuntimeError("driver gone")
        yield

    monkeypatch.setattr(checks, "CHECKS", (_gone,))
    assert main(["doctor"]) == 3
    assert "cannot be checked: RuntimeError: driver gone" in capsys.readouterr().out


def test_a_full_disk_is_told(few, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: Usage)
    states = {finding.name: finding.state for finding in checks._places()}
    assert states == {"results": NOTE, "cache folder": NOTE}


def test_a_forbidden_backend_is_missing(monkeypatch):
    monkeypatch.setenv("SEMKV_KERNELS", "cudnn")
    (finding,) = checks._kernels()
    assert finding.state == MISSING and finding.mend == "unset SEMKV_KERNELS"


def test_the_self_test_sees_wrong_codes(monkeypatch):
    assert kernel_check.check(use_triton=False) == "reference"
    monkeypatch.setattr(affine_reference, "affine_quantize_dequantize", lambda x, levels, group: x.clone())
    with pytest.raises(AssertionError, match="the reference gives"):
        kernel_check.check(use_triton=False)


def test_options_and_usage(capsys):
    assert main(["doctor", "now"]) == 2
    assert "doctor takes --json only" in capsys.readouterr().err
    for command, flag in (
        ("doctor", "--json"),
        ("models", "--json"),
        ("plan", "--calibrate"),
        ("sweep", "-m"),
    ):
        assert main([command, "--help"]) == 0
        assert flag in capsys.readouterr().out
