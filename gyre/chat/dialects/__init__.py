"""What clients of conversations speak, one module each: a body becomes a request, a finished turn an answer."""

from __future__ import annotations

from gyre.lazy_exports import lazy

_EXPORTS = {"DIALECTS": "all", "Dialect": "dialect"}

__all__ = ["DIALECTS", "Dialect"]

__getattr__ = lazy(__name__, _EXPORTS)
