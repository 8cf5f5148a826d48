"""``python -m semkv_bench`` is the ``semkv-bench`` command."""

import sys

from semkv_bench.errors import one_line_on_interrupt

__all__ = ["main"]


def main() -> int:
    """Run the command line; a Ctrl-C is heard from here on."""
    with one_line_on_interrupt():
        from semkv_bench import cli

        cli.complete()
        return cli.main()


if __name__ == "__main__":
    sys.exit(main())
