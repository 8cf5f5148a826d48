import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from semkv_bench.errors import STOPPED, one_line_on_interrupt

ROOT = str(Path(__file__).resolve().parents[1])


def test_elsewhere_it_is_a_keyboard_interrupt():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), one_line_on_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        signal.sigtimedwait([], 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_changes_nothing():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter():
        with one_line_on_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_inside_an_import_it_is_one_line(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    signal.sigtimedwait([], 5)\n"
        "except BaseException:\n    print('half imported')\n"
    )
    code = (
        "from semkv_bench.errors import one_line_on_interrupt\nwith one_line_on_interrupt():\n    import slow"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", f"{STOPPED}\n")
