"""Why a test may be skipped where everything that CI installs is there: on Linux without a GPU, as root, with what
`make install`, `make ui` and the environments of their own bring, and Debian's PostgreSQL, Chromium, Node, OpenSSL,
iproute2, libibverbs1, libnuma1 and libcurl4. A skip for any other reason is a test that did not run.

What an environment brings must not be in the table: a test that lacks it there has failed.
"""

from __future__ import annotations

import re

ALLOWED_SKIPS: dict[str, str] = {
    r"needs a GPU": "kernels of CUDA run on no CPU; a GPU's machine runs tests/megatron/test_gpu.py by hand",
    r"the extra (tensorboard|wandb|mlflow) is not installed": (
        "`make install` leaves these three out; the sink of each is written for its own library"
    ),
    r"the extra otel is not installed": (
        "`make install` leaves it out: spans are sent as JSON then, which the tests beside these prove"
    ),
    r"(skyrl-gym|reasoning-gym|verifiers|verifiers 0\.3) is not installed": (
        "an adapter of a package whose requirements are not Gyre's; it is tried in an environment of its own"
    ),
    r"PostgreSQL chooses by its statistics": "the same test on SQLite proves that the index is there and used",
    r"this kernel cannot be asked for a port out of one": (
        "IP_LOCAL_PORT_RANGE came with Linux 6.3; that the port is kept for its engine is proved below it"
    ),
}
"""By a regular expression that all of a reason matches: why nothing else proves it here."""


def is_allowed(reason: str) -> bool:
    """`reason` is pytest's, with or without its `Skipped: `."""
    said = reason.strip().removeprefix("Skipped: ")
    return any(re.fullmatch(allowed, said) for allowed in ALLOWED_SKIPS)
