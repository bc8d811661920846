"""TLS between publisher, instances and each other, with no certificate of its own.

Each connection agrees on keys that nobody else has (ephemeral Diffie-Hellman over RFC 7919's group, TLS 1.2), and the
proofs of the job's token that both ends give afterwards cover what the handshake was (RFC 5929, `tls-unique`). So who
sits in between and does not know the token has another handshake with either end, and neither believes him. The
certificate's key stays on the rollout manager's machine: it protects the token on its way to the instances.

Invariants:
- *no fallback*: an end that is to encrypt says nothing to one that does not;
- *one handshake, one connection*: nothing is resumed or renegotiated, which `tls-unique` rests on.

This module must not know what is said.
"""

from __future__ import annotations

import os
import socket
import ssl
import tempfile

from gyre.errors import ConfigError

CIPHER = "ADH-AES128-GCM-SHA256"
"""Anonymous, for who is there is proven by the token: `gyre.weights.transfer.protocol`."""

_GROUP = """\
-----BEGIN DH PARAMETERS-----
MIIBiAKCAYEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEfz9zeNVs7ZRkDW7w09N75nAI4YbRvydbmyQd62R0mkff3
7lmMsPrBhtkcrv4TCYUTknC0EwyTvEN5RPT9RFLi103TZPLiHnH1S/9croKrnJ32
nuhtK8UiNjoNq8Uhl5sN6todv5pC1cRITgq80Gv6U93vPBsg7j/VnXwl5B0rZsYu
N///////////AgEC
-----END DH PARAMETERS-----
"""
"""ffdhe3072."""


class Encryption:
    """Of one process, for its connections in both directions. Raises ConfigError where this machine's OpenSSL does
    not offer it."""

    def __init__(self) -> None:
        try:
            self._accepting = _context(ssl.PROTOCOL_TLS_SERVER)
            self._dialling = _context(ssl.PROTOCOL_TLS_CLIENT)
        except ssl.SSLError as error:
            raise ConfigError(
                f"weights.encrypt: this machine's OpenSSL ({ssl.OPENSSL_VERSION}) does not offer {CIPHER}: {error}.",
                hint="Set weights.encrypt to false on a private network, or permit the cipher.",
            ) from None

    def accept(self, link: socket.socket, timeout_s: float) -> ssl.SSLSocket:
        """`link` is used up. Raises OSError."""
        return _wrapped(self._accepting, link, timeout_s, server_side=True)

    def dial(self, link: socket.socket, timeout_s: float) -> ssl.SSLSocket:
        return _wrapped(self._dialling, link, timeout_s, server_side=False)


def binding(link: socket.socket) -> bytes:
    """What both ends of this very connection know of its handshake; empty where it is not encrypted."""
    return (link.get_channel_binding("tls-unique") or b"") if isinstance(link, ssl.SSLSocket) else b""


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
        if not wrapped.get_channel_binding("tls-unique"):
            raise ConnectionAbortedError("the handshake has nothing to be known by")
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def _context(side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # there is none: see the proofs
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_ciphers(f"{CIPHER}:@SECLEVEL=0")
    if side == ssl.PROTOCOL_TLS_SERVER:
        descriptor, path = tempfile.mkstemp(prefix="gyre-dh-")  # it takes a path only
        try:
            os.write(descriptor, _GROUP.encode())
            context.load_dh_params(path)
        finally:
            os.close(descriptor)
            os.unlink(path)
    return context
