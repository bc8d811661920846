"""The secrets of the rollout plane: who has which, and how one follows from another.

| secret | who has it | what it permits |
| --- | --- | --- |
| the job's secret | the job's own processes, by `rollouts.json` | everything: to be the trainer, to publish, to drain |
| a join token | a machine that joins | to be an instance, and to drain the instances that joined with it |
| the weights key | the job's own processes, and instances that were welcomed | to fetch weights, and to pass them on |

The weights key follows from the job's secret and does not lead back to it.

This module must not know about sockets or the store.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets


def new_secret() -> str:
    """256 random bits, as text that fits a header and a command line."""
    return secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """What is kept of a join token: its SHA-256 in hex. The token has 256 random bits, so nobody can guess it back."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def weights_key(secret: str) -> str:
    return hmac.new(secret.encode(), b"gyre weights", hashlib.sha256).hexdigest()
