"""TLS of the REST interface: the master's certificate, and what its clients trust.

A master that listens off loopback and was given no certificate signs one for itself, once for a job: its successors
show the same. Programs that find the job's directory trust that certificate alone; others are given its fingerprint, or
the authority that signed it.

Invariants:
- *nothing is trusted by default but this machine's authorities*: without a certificate, a fingerprint or a file there
  is no other trust;
- *checked before anything is said*: no token goes to a server whose certificate is not trusted.

This module must not know routes or jobs.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gyre.api.home import CERTIFICATE_FILE
from gyre.errors import ConfigError, Unauthorized, Unreachable

OWN_FILE = "rest-own.pem"
"""The certificate that the master signed for itself, with its key; its owner's alone."""

NAME = "gyre-rest"
"""The subject of such a certificate. Nobody checks it: the certificate itself is what is trusted."""

PREFIX = "sha256:"
FETCH_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files; the key may be in the same one, and has no password."""

    cert: Path
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """For a server: TLS 1.3. Raises ConfigError where the files are not a certificate and its key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{self.cert} and {self.key or self.cert} are not a certificate and its key: {error}.",
                hint="Give two PEM files that the master's machine can read; the key without a password.",
            ) from None
        return context


def own_certificate(directory: Path) -> Certificate:
    """The certificate that the job's masters have signed for themselves, made where there is none yet."""
    from gyre.weights.transfer.encryption import self_signed

    path = directory / OWN_FILE
    if not path.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(b"".join(self_signed(NAME)))
        partial.rename(path)
    return Certificate(path)


def tell_certificate(directory: Path, certificate: Certificate) -> str:
    """Put the certificate, without its key, where the job's clients find it. Returns its fingerprint."""
    shown = ssl.DER_cert_to_PEM_cert(_first(certificate.cert.read_text()))
    path = directory / CERTIFICATE_FILE
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(shown)
    partial.rename(path)
    return fingerprint_of(shown)


def fingerprint_of(pem: str) -> str:
    """`sha256:` and the SHA-256 of the certificate in DER, in hex."""
    return PREFIX + hashlib.sha256(_first(pem)).hexdigest()


def trust_of(
    url: str, *, ca: Path | None = None, fingerprint: str | None = None, known: Path | None = None
) -> ssl.SSLContext | None:
    """What to trust of the master at this url: the certificate with this fingerprint, or those in the file `ca`, or the
    very one in the file `known`, where it exists. None leaves it to this machine's authorities.

    Raises ConfigError; with a fingerprint also Unauthorized where the server shows another certificate, and
    Unreachable.
    """
    from gyre.rollouts.protocol.credentials import joining_context, pinned_context

    parts = urlsplit(url)
    if parts.scheme != "https":
        if fingerprint is not None:
            raise ConfigError(f"{url} is not https: there is no certificate with a fingerprint.")
        return None
    if fingerprint is not None:
        return pinned_context(_shown_by(parts.hostname or "", parts.port or 443, fingerprint, url))
    if ca is not None:
        return joining_context(ca)
    if known is not None and known.is_file():
        return pinned_context(known.read_text())
    return None


def anybody() -> ssl.SSLContext:
    """Trusts whoever answers: for a probe that says nothing secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _shown_by(host: str, port: int, fingerprint: str, url: str) -> str:
    """The certificate that the server shows, in PEM, if it has this fingerprint."""
    digits = fingerprint.lower().removeprefix(PREFIX).replace(":", "")
    if len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise ConfigError(
            f"{fingerprint!r} is not a fingerprint.", hint=f"Give {PREFIX} and 64 digits in hex."
        )
    try:
        shown = ssl.get_server_certificate((host, port), timeout=FETCH_WITHIN_S)
    except (OSError, ssl.SSLError) as error:
        raise Unreachable(f"No master answers at {url}: {error}.") from None
    if fingerprint_of(shown) != PREFIX + digits:
        raise Unauthorized(
            f"The master at {url} is not who it should be: its certificate is {fingerprint_of(shown)}.",
            hint="Compare with the fingerprint that `gyre submit` told. Nothing was sent to it.",
        )
    return shown


def _first(pem: str) -> bytes:
    """The first certificate in DER. Raises ConfigError where there is none."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    start, stop = pem.find(begin), pem.find(end)
    if start < 0 or stop < 0:
        raise ConfigError("there is no certificate in the file.", hint="Give a PEM file.")
    return ssl.PEM_cert_to_DER_cert(pem[start : stop + len(end)])
