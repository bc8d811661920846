"""`gyre ui`: the web page over all jobs of a store, those that run and those whose cluster is long gone."""

from __future__ import annotations

import click

from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark

PORT = 8790
"""Free of registered services; a page that somebody has bookmarked is there again."""


@verb()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help=f"Port of the page; 0 takes any free one.  [default: {PORT}, or any free one]",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address that the page listens on; any but loopback needs --token.",
)
@click.option("--plain-http", is_flag=True, help="Allow HTTP without TLS off loopback.")
@click.option("--no-open", is_flag=True, help="Print the address, and open no browser.")
def ui(session: CliContext, port: int | None, host: str, plain_http: bool, no_open: bool) -> None:
    """Show the web page over all jobs of the store, until Ctrl-C.

    It reads the store, and asks the master of a job that runs. Its end costs no job anything.
    """
    import threading
    import webbrowser

    from gyre.api.loopback import is_loopback
    from gyre.api.page_files import FOLDER, is_built
    from gyre.api.rest import RestServer
    from gyre.api.rest.app import create_store_app
    from gyre.api.stored_jobs import StoredJobs
    from gyre.api.tls import own_certificate, tell_certificate
    from gyre.errors import ConfigError, NotFound

    if not is_built():
        raise NotFound(
            f"The page's files are not in {FOLDER}.",
            hint="In a checkout `make ui` builds them; a wheel has them.",
        )
    if session.url is not None:
        raise ConfigError(
            "--url: the master serves its page itself.", hint=f"Open {session.url} in a browser."
        )
    certificate = None
    if not plain_http and not is_loopback(host):
        certificate = own_certificate(session.home.path)
        remark(f"the certificate is {tell_certificate(session.home.path, certificate)}")
    with session.reader() as reader:
        reader.store.verify()  # says in a sentence what is wrong with it, before a browser opens
        server = RestServer(
            create_store_app(StoredJobs(reader), token=session.token),
            host,
            PORT if port is None else port,
            session.token,
            fallback_to_any=port is None,
            certificate=certificate,
            plain_http=plain_http,
        )
        url = server.start()
        try:
            click.echo(url)
            if not no_open:
                webbrowser.open(url)
            remark("Ctrl-C ends it; the jobs go on.")
            threading.Event().wait()
        finally:
            server.stop()
