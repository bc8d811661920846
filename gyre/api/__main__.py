"""The `gyre` command, and `python -m gyre.api` where it is not on the path.

Invariant *Ctrl-C is quiet from the first line to the last*: while the command line is loaded there is nothing to clean
up, and an interrupt ends the process at once; an exception could fail the import that it cuts short with any error.
When the command has ended, what is left to do ends by itself, and an interrupt is ignored.
"""

from __future__ import annotations

import signal
import sys

from gyre.api.terminal.signals import INTERRUPTED, ended_at_once


def main() -> None:
    """Run the command line, and exit with the code of its outcome."""
    try:
        with ended_at_once():
            from gyre.api.cli import main as command_line

        command_line()
    except KeyboardInterrupt:  # just before the command line notes them, or just after
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
