"""What a master calls to be seen: it gives itself as a MasterApi and gets the url that it is served under."""

from __future__ import annotations

from gyre.api.rest.app import create_app
from gyre.api.rest.serve import RestServer
from gyre.master.master_api import MasterApi


def serve_master(master: MasterApi, *, host: str, port: int, token: str | None, restarted: bool) -> str:
    """Start the server on its own thread. A restarted master wants its earlier port, but comes up without it."""
    server = RestServer(create_app(master, token=token), host, port, token, fallback_to_any=restarted)
    return server.start()
