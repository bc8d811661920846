"""Modules of a user's file, under a name of Gyre's, which processes that the user's code starts can import too.

A process that `multiprocessing` spawns has nothing of its parent's but `sys.path`, and imports what it is given by the
module's name. So there is a folder on that path in which a file of this name leads to the user's.

This module must not know what is in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import stat
import sys
import tempfile
from pathlib import Path
from types import ModuleType

_LEADS_TO = """# Written by Gyre, so that processes of a pool find the module of a user's file.
import importlib.util
import sys

_spec = importlib.util.spec_from_file_location(__name__, {file!r})
sys.modules[__name__] = _module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
"""


def module_of_file(name: str, file: Path) -> ModuleType:
    """The module of the file, executed anew. Raises ImportError where it is no Python file, and whatever it raises."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    # Without a place for it everything else works.
    with contextlib.suppress(OSError):
        _let_others_import(name, file)
    return module


def _let_others_import(name: str, file: Path) -> None:
    """Put a folder with a file of the name last on `sys.path`. It stays, for whoever loads the same file next. Raises
    OSError where there is no place that is this user's alone."""
    content = _LEADS_TO.format(file=str(file.resolve()))
    root = Path(tempfile.gettempdir()) / f"gyre-modules-{os.getuid()}"
    folder = root / hashlib.sha256(f"{name} {content}".encode()).hexdigest()[:16]
    for path in (root, folder):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise OSError(f"{path} is another user's")
    partial = folder / f".{name}.{os.getpid()}"
    partial.write_text(content)
    partial.rename(folder / f"{name}.py")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
