"""What clients of conversations speak, one module each: a body becomes a request, a finished turn an answer."""

from __future__ import annotations

from gyre.lazy_exports import lazy

_EXPORTS = {"COUNT_TOKENS": "all", "DIALECTS": "all", "Dialect": "dialect"}

__all__ = ["COUNT_TOKENS", "DIALECTS", "Dialect"]

__getattr__ = lazy(__name__, _EXPORTS)
