"""TLS 1.3 between the publisher and the instances, without a certificate authority.

Each process signs a certificate for itself. Nobody vouches for it: the proofs of the job's token that both ends give
after the handshake cover the fingerprint of the certificate that the handshake used (RFC 5929, `tls-server-end-point`).
A process in between that lacks the token has to show a certificate of its own, so its callers prove the token for
another fingerprint than the real source expects, and both ends hang up. The rollout manager's certificate protects the
token itself on its way to the instances.

Invariants:
- *no fallback*: an end that encrypts says nothing to an end that does not;
- *one handshake, one connection*: no session is resumed, so every connection agrees on keys of its own.

This module must not know what is sent.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
import tempfile
from pathlib import Path

VALID_DAYS = 3650
"""Nobody checks when a process's certificate ends: its fingerprint is what counts. It outlasts any job."""

NAME = "gyre-weights"
"""The certificate's subject. Nobody checks that either."""


class Encryption:
    """The certificate of one process, for its connections in both directions."""

    def __init__(self) -> None:
        certificate, key = self_signed(NAME)
        self.fingerprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode())).digest()
        """SHA-256 of this process's certificate in DER, 32 bytes."""
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER)
        self._accepting.num_tickets = 0
        with tempfile.TemporaryDirectory(prefix="gyre-tls-") as folder:  # `ssl` takes paths only; mode 0700
            path = Path(folder) / "both.pem"
            path.touch(0o600)
            path.write_bytes(certificate + key)
            self._accepting.load_cert_chain(path)
        self._dialling = _context(ssl.PROTOCOL_TLS_CLIENT)

    def accept(self, link: socket.socket, timeout_s: float) -> ssl.SSLSocket:
        """The encrypted side of an accepted connection. `link` is used up. Raises OSError."""
        return _wrapped(self._accepting, link, timeout_s, server_side=True)

    def dial(self, link: socket.socket, timeout_s: float) -> ssl.SSLSocket:
        """The encrypted side of a connection that this process opened. `link` is used up. Raises OSError."""
        return _wrapped(self._dialling, link, timeout_s, server_side=False)

    def binding(self, link: ssl.SSLSocket) -> bytes:
        """The fingerprint of the certificate that the accepting end of `link` has shown: 32 bytes, the same for both
        ends unless somebody stands in between."""
        if link.server_side:
            return self.fingerprint
        return hashlib.sha256(link.getpeercert(binary_form=True) or b"").digest()


def self_signed(common_name: str) -> tuple[bytes, bytes]:
    """A new certificate of this subject and its P-256 key, both PEM. About 1 ms."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(int.from_bytes(os.urandom(16), "big") >> 1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _context(side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = (
        ssl.CERT_NONE
    )  # no authority has signed it: the token's proofs cover its fingerprint
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _wrapped(
    context: ssl.SSLContext, link: socket.socket, timeout_s: float, *, server_side: bool
) -> ssl.SSLSocket:
    link.settimeout(timeout_s)
    try:
        wrapped = context.wrap_socket(link, server_side=server_side, do_handshake_on_connect=False)
    except BaseException:
        link.close()
        raise
    try:
        wrapped.do_handshake()
    except BaseException:
        wrapped.close()
        raise
    return wrapped
