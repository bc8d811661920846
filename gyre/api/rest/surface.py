"""The function that a master calls to be served: it passes itself as a MasterApi and gets the url."""

from __future__ import annotations

from gyre.api.rest.app import create_app
from gyre.api.rest.serve import RestServer
from gyre.master.master_api import MasterApi


def serve_master(master: MasterApi, *, host: str, port: int, token: str | None, restarted: bool) -> str:
    """Start the server on its own thread. A restarted master asks for its earlier port, but starts without it if it is
    taken."""
    server = RestServer(create_app(master, token=token), host, port, token, fallback_to_any=restarted)
    return server.start()
