import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest

from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.files import check_writable


def test_what_can_be_made_is_not_made_yet(tmp_path):
    check_writable(tmp_path)
    check_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


def test_a_file_in_its_place(tmp_path):
    (tmp_path / "f").touch()
    with pytest.raises(UsageError, match="f is a file; give a folder"):
        check_writable(tmp_path / "f")
    with pytest.raises(UsageError, match=r"out=.*/f/b cannot be made: .*f is a file"):
        check_writable(tmp_path / "f" / "b")


def _as_nobody(folder: Path, told) -> None:
    if os.getuid() == 0:
        os.setuid(65534)
    try:
        check_writable(folder, "baseline", "baseline=FILE")
        told.put("writable")
    except SemkvError as error:
        told.put(f"{error.exit_code} {error}")


@pytest.mark.parametrize("below", [".", "a/b"])
@pytest.mark.parametrize("mode", [0o555, 0o644, 0o000])
def test_a_folder_that_may_not_be_written_to(mode, below):
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        folder = Path(place) / "closed"
        folder.mkdir()
        folder.chmod(mode)
        child = context.Process(target=_as_nobody, args=(folder / below, told))
        child.start()
        outcome = told.get()
        child.join()
        folder.chmod(0o755)
    assert outcome.startswith(f"3 cannot write baseline={folder / below}: {folder} may not be written to")
    assert outcome.endswith("choose another place by baseline=FILE")
