"""`python -m gpulayer` is `gpulayer`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and exit. A Ctrl-C while modules are being read is no traceback."""
    try:
        from gpulayer import cli
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
