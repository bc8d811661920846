"""The error of a check, and the words for it: what was called, what was promised, what came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gyre.errors import GyreError


class ContractBroken(GyreError, AssertionError):
    """A class does not keep its role's contract. `details` has `call`, `promised` and `came`."""

    code = "contract_broken"


def broken(call: str, promised: str, came: Any) -> ContractBroken:
    """`call` is what was done, as one would write it; `promised` follows "must"."""
    text = came if isinstance(came, str) else repr(came)
    return ContractBroken(
        f"{call} must {promised}; {text[:500]}.",
        hint="See gyre.workloads.protocols.",
        details={"call": call, "promised": promised, "came": text},
    )


def promise(kept: bool, call: str, promised: str, came: Any) -> None:
    """Raises ContractBroken unless `kept`."""
    if not kept:
        raise broken(call, promised, came)


@contextmanager
def refused(call: str, why: str) -> Iterator[None]:
    """What is inside must raise. Raises ContractBroken where it does not."""
    try:
        yield
    except ContractBroken:
        raise
    except Exception:  # which one is the class's own choice
        return
    raise broken(call, f"raise, {why}", "it returned")
