"""Exceptions of the user's, from the worker that raised them to whoever called it.

A caller catches what the method raised, by its class: `except KeyError` in a trainer catches the KeyError of a rollout.
It is one of Gyre's UserCodeErrors too, with the traceback of the worker, and has the attributes of the original.

Invariant *read by the caller alone*: an exception passes the trainer as bytes. Where they cannot be made or read, the
caller gets a UserCodeError with the text.

This module must not import Ray or torch.
"""

from __future__ import annotations

import contextlib
import pickle
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from gyre.errors import ConfigError, GyreError, NotFound, UserCodeError

_PICKLED = "pickled"
"""Where the bytes are among the error's details."""


class Mistake(ConfigError, ValueError):
    """A mistake in what the user wrote, where DLRover raises a ValueError. It repeats surely, so it ends the job."""


class Missing(NotFound, ValueError):
    """What is not there, or not yet, where DLRover raises a ValueError."""


def packed(error: BaseException) -> bytes | None:
    """The exception as bytes; None where it cannot be pickled, or is no Exception."""
    if not isinstance(error, Exception):
        return None
    try:
        return pickle.dumps(error)
    except Exception:  # whatever the user's objects raise: the text is told
        return None


def with_cause(error: GyreError, pickled: bytes | None) -> GyreError:
    """The error, with the user's exception for `unpacked`."""
    if pickled is not None and isinstance(error, UserCodeError):
        error.details[_PICKLED] = pickled
    return error


def unpacked(error: BaseException) -> BaseException:
    """What the caller is to see."""
    pickled = error.details.pop(_PICKLED, None) if isinstance(error, UserCodeError) else None
    if pickled is None:
        return error
    assert isinstance(error, UserCodeError)
    try:
        return _as_both(error, pickle.loads(pickled))
    except Exception:  # a class that is not here, or one that cannot be made of bytes
        return error


def _as_both(error: UserCodeError, cause: Exception) -> UserCodeError:
    """Raises TypeError for a class that none can be made of."""
    if isinstance(cause, UserCodeError):
        return error
    kind = type(f"UserCodeError({type(cause).__name__})", (_Raised, type(cause)), {})
    made: UserCodeError = kind(error, cause)
    return made


class _Raised(UserCodeError):
    """The first base of the class that is made for an exception's class."""

    def __init__(self, error: UserCodeError, cause: Exception) -> None:
        # The user's class has an __init__ of its own, which wants whatever it wants.
        BaseException.__init__(self, *cause.args)
        self.message, self.hint, self.details = error.message, error.hint, error.details
        self.cause = cause
        for name in _fields_of_builtins(type(cause)):
            with contextlib.suppress(AttributeError):  # one that was never set
                setattr(self, name, getattr(cause, name))

    def __getattr__(self, name: str) -> Any:
        if name == "cause":  # asked for before it is set
            raise AttributeError(name)
        return getattr(self.cause, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_both, (UserCodeError(self.message, hint=self.hint, details=self.details), self.cause)


def _fields_of_builtins(kind: type[BaseException]) -> list[str]:
    """What is in no `__dict__`, such as an OSError's `errno`."""
    return [
        name
        for base in kind.__mro__
        for name, field in vars(base).items()
        if isinstance(field, GetSetDescriptorType | MemberDescriptorType) and not name.startswith("__")
    ]
