"""The server beside the control loop: uvicorn on a thread and an event loop of its own.

Invariants:
- *no token, no door*: an address that is not loopback is refused without a token, before anything is bound;
- *no token in clear*: such an address is refused without TLS too, unless the user has asked for plain HTTP;
- *bound is listening*: `start` returns only when the socket listens and the server takes requests;
- *a port is never shared*: a port in use is an error, or with `fallback_to_any` another free one is taken: a
  restarting master wants its earlier address back, but must come up without it too;
- *the process's signals are its own*: the server installs no handler;
- *every request has an end*: `gyre.ports` stands before uvicorn, which has no deadline for a head or a body.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from fastapi import FastAPI

from gyre.api.loopback import is_loopback
from gyre.api.rest.guard import is_bearer
from gyre.api.rest.sessions import SessionCookies
from gyre.api.tls import Certificate
from gyre.errors import ConfigError, Unreachable
from gyre.ports.bounds import PortBounds
from gyre.ports.http_gate import Credentials
from gyre.ports.listener import Listener

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0


class _Server(uvicorn.Server):
    """Takes its connections from a `Listener`, and sets an event when it takes requests."""

    def __init__(self, config: uvicorn.Config, listener: Callable[[Callable[[], Any]], Listener]) -> None:
        super().__init__(config)
        self.ready = threading.Event()
        self._listener = listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        listener = self._listener(self._protocol)
        listener.start()
        self.servers = [listener]  # type: ignore[list-item]  # it is closed, and waited for
        self.started = True
        self.ready.set()

    def _protocol(self) -> Any:
        make: Any = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def check_port_is_free(host: str, port: int) -> None:
    """Raises the ConfigError that a server at this address would raise now."""
    server = RestServer(FastAPI(), host, port, token="-", plain_http=True)
    server._bind().close()


class RestServer:
    """`start()` → url, `stop()`. A server is started once."""

    def __init__(
        self,
        app: FastAPI,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        *,
        fallback_to_any: bool = False,
        advertise: str | None = None,
        certificate: Certificate | None = None,
        plain_http: bool = False,
        bounds: PortBounds | None = None,
    ) -> None:
        """`advertise` is the host name in the url; by default `host`, or this machine's name for a wildcard. With a
        `certificate` the server speaks TLS; `plain_http` permits an address off loopback to go without.

        Raises ConfigError for an address off loopback without a token, or without TLS.
        """
        if not token and not is_loopback(host):
            raise ConfigError(
                f"{host or 'all addresses'}: an address off loopback needs a token.",
                hint="Give a token, or bind to 127.0.0.1.",
            )
        if certificate is None and not plain_http and not is_loopback(host):
            raise ConfigError(
                f"{host or 'all addresses'}: an address off loopback needs TLS, or the token is read on the way.",
                hint="Give a certificate, or permit plain HTTP where the network is a tunnel or behind a proxy.",
            )
        self._tls = certificate.context() if certificate is not None else None
        self._token = None if token is None else token.encode()
        self._cookies = None if token is None else SessionCookies(token.encode())
        self._bounds = bounds or PortBounds()
        self._host, self._port = host, port
        self._fallback_to_any = fallback_to_any
        self._advertise = advertise
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self.url = ""

    def start(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Bind, serve, and return the url. Raises ConfigError where the address cannot be had."""
        if self._thread is not None:
            raise RuntimeError("this server was started before")
        listener = self._bind()
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            loop="asyncio",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=max(1, round(self._bounds.keep_alive_s)),
            proxy_headers=False,  # the address is the caller's own; nothing here trusts another
        )
        config.load()
        self._server = server = _Server(config, lambda make: self._listener(listener, make))
        self._thread = threading.Thread(
            target=self._serve, args=(server, listener), name="gyre-rest", daemon=True
        )
        self._thread.start()
        if not server.ready.wait(timeout_s) or self._error is not None:
            self.stop(0.0)
            raise Unreachable(
                f"The REST server did not come up within {timeout_s:g} s: {self._error or 'no answer'}."
            )
        self.url = f"{'https' if self._tls is not None else 'http'}://{self._shown_host()}:{listener.getsockname()[1]}"
        return self.url

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End open streams, let requests in flight end, stop the thread. Harmless when it is not running."""
        if self._thread is None or self._server is None:
            return
        self._server.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._app.state.broadcasters.close)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(1.0)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _listener(self, listener: socket.socket, make: Callable[[], Any]) -> Listener:
        return Listener(
            [listener],
            make,
            self._bounds,
            tls=self._tls,
            tokens=None if self._token is None else self,
        )

    def is_proven(self, shown: Credentials) -> bool:
        """Whether they have the token, or a session's cookie that is good now."""
        if self._token is None or self._cookies is None:
            return False
        return is_bearer(shown.authorization, self._token) or self._cookies.is_valid(
            shown.cookie, time.time()
        )

    def _serve(self, server: _Server, listener: socket.socket) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await server.serve()

        try:
            asyncio.run(serve())
        except BaseException as error:
            self._error = error
        finally:
            server.ready.set()
            listener.close()

    # -- the socket ---------------------------------------------------------------------------------

    def _bind(self) -> socket.socket:
        try:
            return self._listen(self._port)
        except OSError as error:
            if self._fallback_to_any and self._port and error.errno in (errno.EADDRINUSE, errno.EACCES):
                with suppress(OSError):
                    return self._listen(0)
            raise self._unusable(error) from None

    def _listen(self, port: int) -> socket.socket:
        family, kind, protocol, _, address = self._resolve(port)
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)  # here, not later: it is what fails when another one has the port
        except OSError:
            listener.close()
            raise
        return listener

    def _resolve(self, port: int) -> Any:
        found = socket.getaddrinfo(
            self._host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
        return min(found, key=lambda item: item[0] != socket.AF_INET)

    def _unusable(self, error: OSError) -> ConfigError:
        where = f"{self._host or '*'}:{self._port}"
        if error.errno == errno.EADDRINUSE:
            return ConfigError(
                f"Port {self._port} on {self._host or '*'} is in use by another program.",
                hint="Give another port, or 0 for any free one.",
                details={"port": self._port},
            )
        if error.errno == errno.EACCES:
            return ConfigError(
                f"{where}: this user may not listen there.", hint="Give a port of 1024 or above."
            )
        return ConfigError(
            f"{where}: cannot listen there: {error.strerror or error}.",
            hint="Give an address of this machine, such as 127.0.0.1.",
        )

    def _shown_host(self) -> str:
        host = self._advertise or self._host
        if host in ("", "0.0.0.0", "::"):
            host = socket.gethostname()
        return f"[{host}]" if ":" in host else host
