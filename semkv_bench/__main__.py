"""``python -m semkv_bench`` is the ``semkv-bench`` command."""

import sys

from semkv_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
