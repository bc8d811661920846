"""The REST interface: `create_app` makes the app, `RestServer` serves it on a thread of its own."""

from gyre.api.rest.app import PREFIX, create_app
from gyre.api.rest.serve import RestServer

__all__ = ["PREFIX", "RestServer", "create_app"]
