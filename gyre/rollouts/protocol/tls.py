"""TLS between the rollout manager and who dials it: certificates in files, and nothing trusted by default but what
says so.

Instances and trainers that Gyre places find the manager's very certificate in the job's directory and trust that one
alone, whatever name it has. Who joins from elsewhere trusts the authorities of its machine, or the file it is given,
and checks the name.

This module must not know about sockets or frames.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from gyre.errors import ConfigError


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
