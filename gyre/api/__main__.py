"""The `gyre` command, and `python -m gyre.api` where it is not on the path.

Invariants:
- *Ctrl-C is quiet from the first line to the last*: while the command line is loaded there is nothing to clean up, and
  an interrupt ends the process at once; an exception could fail the import that it cuts short with any error. When the
  command has ended, what is left to do ends by itself, and an interrupt is ignored;
- *the command's code is the process's*: once Python has ended, no destructors of C++ libraries run. A thread of Ray's
  that still reports metrics would meet what they destroy, and the process would die of SIGSEGV.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import NoReturn

from gyre.api.terminal.signals import INTERRUPTED, ended_at_once


def main() -> NoReturn:
    """Run the command line, and exit with the code of its outcome."""
    code = 0
    try:
        with ended_at_once():
            from gyre.api.cli import main as command_line

        command_line()
    except KeyboardInterrupt:  # just before the command line notes them, or just after
        code = INTERRUPTED
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _pass_over_destructors(code)
    sys.exit(code)


def _pass_over_destructors(code: int) -> None:
    """Have the C library leave with `code` before the functions that are registered with it already."""
    libc = ctypes.CDLL(None)
    leave = ctypes.cast(libc["_exit"], ctypes.c_void_p)
    libc["__cxa_atexit"](leave, ctypes.c_void_p(code), None)  # what is registered last is called first


if __name__ == "__main__":
    main()
