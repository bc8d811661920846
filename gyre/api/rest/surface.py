"""The function that a master calls to be served: it passes itself as a MasterApi and gets the url."""

from __future__ import annotations

from pathlib import Path

from gyre.api.loopback import is_loopback
from gyre.api.rest.app import create_app
from gyre.api.rest.serve import RestServer
from gyre.api.tls import Certificate, own_certificate, tell_certificate
from gyre.master.master_api import MasterApi


def serve_master(
    master: MasterApi,
    *,
    host: str,
    port: int,
    token: str | None,
    restarted: bool,
    directory: Path,
    tls_cert: str = "",
    tls_key: str = "",
    plain_http: bool = False,
) -> str:
    """Start the server on its own thread. A restarted master asks for its earlier port, but starts without it if it is
    taken. Off loopback it speaks TLS: with the certificate that is given, else with one that it signs itself."""
    certificate = None
    if tls_cert:
        certificate = Certificate(Path(tls_cert), Path(tls_key))
    elif not plain_http and not is_loopback(host):
        certificate = own_certificate(directory)
    server = RestServer(
        create_app(master, token=token),
        host,
        port,
        token,
        fallback_to_any=restarted,
        certificate=certificate,
        plain_http=plain_http,
    )
    if certificate is not None:
        print(f"the certificate of REST is {tell_certificate(directory, certificate)}", flush=True)
    return server.start()
