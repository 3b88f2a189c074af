"""`python -m gpulayer` is `gpulayer`."""

from __future__ import annotations

import sys

from gpulayer.signals import Interrupted, end_by_exception


def main() -> None:
    """Run the command line of this process and exit. A Ctrl-C while modules are being read is no traceback."""
    end_by_exception()
    try:
        from gpulayer import cli
    except Interrupted as interrupted:
        sys.exit(interrupted.exit_code)
    cli.main()


if __name__ == "__main__":
    main()
