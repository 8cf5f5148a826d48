"""The report of a run: verdict sentence, tables, figures, and the files that carry them.

``write`` makes report.json, report.md, report.html and the figures; ``show`` prints the same to a terminal.
Called, as ``semkv_bench.report(run)``, it is ``python.report``.
"""

from typing import TYPE_CHECKING

from semkv_bench.lazy import called, on_demand

if TYPE_CHECKING:
    from semkv_bench.report.output import write
    from semkv_bench.report.terminal import show
    from semkv_bench.report.verdict import headline, limits

__all__ = ["headline", "limits", "show", "write"]

__getattr__ = on_demand(__name__)
called(__name__, "semkv_bench.report.python")
