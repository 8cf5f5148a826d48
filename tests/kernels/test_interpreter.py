"""Runs the Triton tests in Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
MANY = "test_many_random_shapes"


@pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="they run directly"
)
@pytest.mark.parametrize(
    ("which", "named"),
    [
        ("not slow", ""),
        pytest.param("slow", f"not {MANY}", marks=pytest.mark.slow),
        # Minutes each, so that no part of the exhaustive tests has all of them.
        *(pytest.param("slow", f"{MANY} and part{part}", marks=pytest.mark.slow) for part in range(6)),
    ],
)
def test_in_the_interpreter(which, named):
    files = sorted(HERE.glob("test_triton_*.py"))
    command = [sys.executable, "-m", "pytest", "-m", which, "-k", named, "--confcutdir", HERE]
    command += ["-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *files],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
