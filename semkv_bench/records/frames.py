"""``semkv_bench.read_records(path)``: records as a data frame, wherever they come from."""

from pathlib import Path

import pandas as pd

from semkv_bench.records import foreign
from semkv_bench.records.folder import read_run

__all__ = ["read_records"]


def read_records(path: str | Path, model: str | None = None) -> pd.DataFrame:
    """Records of a run folder, or of a file of scores: one row per task, example, seed, turn and setting.

    model: of a file that holds several, the one to read.

    Raises:
        MissingError: there is no such folder or file.
        UsageError: it cannot be used; one line that names the row, column or setting.
    """
    path = Path(path).expanduser()
    if path.suffix in foreign.FORMATS and not path.is_dir():
        return foreign.read_records(path, model=model)
    return read_run(path)[0]
