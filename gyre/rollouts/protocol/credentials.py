"""Credentials of the rollout plane: secrets, who has which and how one follows from another, and TLS certificates.

| secret | who has it | what it permits |
| --- | --- | --- |
| the job's secret | the job's own processes, by `rollouts.json` | everything: to be the trainer, to publish, to drain |
| a join token | a machine that joins | to be an instance, and to drain the instances that joined with it |
| the weights key | the job's own processes, and instances that were welcomed | to fetch weights, and to pass them on |

The weights key follows from the job's secret and does not lead back to it.

Certificates are files, and nothing is trusted by default but what says so. Instances and trainers that Gyre places find
the manager's very certificate in the job's directory and trust that one alone, whatever name it has. An instance that
joins from elsewhere trusts the authorities of its machine, or the file it is given, and checks the name.

This module must not know about sockets, frames or the store.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
from pathlib import Path

from gyre.errors import ConfigError


def new_secret() -> str:
    """256 random bits, as text that fits a header and a command line."""
    return secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """What is kept of a join token: its SHA-256 in hex. The token has 256 random bits, so nobody can guess it back."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def weights_key(secret: str) -> str:
    return hmac.new(secret.encode(), b"gyre weights", hashlib.sha256).hexdigest()


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """For the manager. Raises ConfigError where the files are not a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"rollouts.tls_cert {cert} and rollouts.tls_key {key} are not a certificate and its key: {error}.",
            hint="Give two PEM files that the rollout manager's machine can read; the key without a password.",
        ) from None
    return context


def joining_context(ca: Path | None) -> ssl.SSLContext:
    """For who dials from elsewhere: `ca` is a PEM file with what to trust, None for the machine's own authorities.
    Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ca {ca}: is not a PEM file with certificates: {error}.") from None


def pinned_context(pem: str) -> ssl.SSLContext:
    """Trusts this one certificate (the first in `pem`), and no authority; its name is not looked at."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=pem)
    return context
