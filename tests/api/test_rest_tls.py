"""REST over TLS, on real sockets: what off loopback is refused without, and whom a client trusts."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gyre.api.cli import main
from gyre.api.client import GyreClient
from gyre.api.home import Home
from gyre.api.orphaned_jobs import master_answers
from gyre.api.reader import JobReader
from gyre.api.rest import RestServer, create_app, surface
from gyre.api.submit import Rest
from gyre.api.tls import Certificate, fingerprint_of, own_certificate, tell_certificate, trust_of
from gyre.errors import ConfigError, Unauthorized, Unreachable
from gyre.store import open_store
from tests.doubles.standing_job import StandingJob
from tests.rollouts.protocol.test_tls import certificate

TOKEN = "t"

Serve = Callable[..., str]


@pytest.fixture
def directory(home: Home) -> Path:
    return home.job_directory("golden-1")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RestServer]]:
    """The servers that a master starts."""
    made: list[RestServer] = []

    class Noted(RestServer):
        def start(self, timeout_s: float = 60.0) -> str:
            made.append(self)
            return super().start(timeout_s)

    monkeypatch.setattr(surface, "RestServer", Noted)
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def serve(golden: StandingJob, servers: list[RestServer], directory: Path) -> Serve:
    """Serve as a master does, on every address. Returns the url on loopback, whose port this is."""

    def start(**options: str | bool) -> str:
        url = surface.serve_master(
            golden.master,
            **{
                "host": "0.0.0.0",
                "port": 0,
                "token": TOKEN,
                "restarted": False,
                "directory": directory,
                **options,
            },
        )
        scheme, _, rest = url.partition("://")
        return f"{scheme}://127.0.0.1:{rest.rpartition(':')[2]}"

    return start


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "gyre.example"])
def test_off_loopback_needs_tls_or_a_plain_word(golden: StandingJob, host: str) -> None:
    app = create_app(golden.master, token=TOKEN)
    with pytest.raises(ConfigError, match="needs TLS"):
        RestServer(app, host, 0, TOKEN)
    RestServer(app, host, 0, TOKEN, plain_http=True)


def test_a_master_off_loopback_signs_a_certificate_and_its_successor_shows_the_same(
    serve: Serve, directory: Path
) -> None:
    first = serve()
    assert first.startswith("https://")
    told = (directory / "rest-cert.pem").read_text()
    again = serve()
    assert (directory / "rest-cert.pem").read_text() == told
    assert "PRIVATE KEY" not in told
    assert (directory / "rest-own.pem").stat().st_mode & 0o777 == 0o600
    for url in (first, again):
        trust = trust_of(url, known=directory / "rest-cert.pem")
        with GyreClient(url, TOKEN, trust=trust) as client:
            assert client.jobs()[0]["job_id"] == "golden-1"


def test_loopback_and_the_plain_word_stay_plain(serve: Serve) -> None:
    for options in ({"host": "127.0.0.1"}, {"plain_http": True}):
        url = serve(**options)
        assert url.startswith("http://")
        with GyreClient(url, TOKEN) as client:
            client.jobs()


def test_a_client_says_nothing_to_who_is_not_trusted(
    serve: Serve, golden: StandingJob, tmp_path: Path
) -> None:
    url = serve()
    stranger = own_certificate(tmp_path / "another")
    for trust in (None, trust_of(url, known=stranger.cert)):
        with GyreClient(url, TOKEN, trust=trust) as client:
            for call in (
                client.jobs,
                lambda: next(client.stream("golden-1")),
                lambda: client.command("x", "pause"),
            ):
                with pytest.raises(Unauthorized, match="not who it should be"):
                    call()
    assert golden.view()["seq"] == 8


def test_a_fingerprint_names_the_one_certificate(serve: Serve, directory: Path, tmp_path: Path) -> None:
    url = serve()
    told = fingerprint_of((directory / "rest-cert.pem").read_text())
    colons = ":".join(told.removeprefix("sha256:").upper()[at : at + 2] for at in range(0, 64, 2))
    for given in (told, told.removeprefix("sha256:"), colons):
        with GyreClient(url, TOKEN, trust=trust_of(url, fingerprint=given)) as client:
            client.jobs()
    another = fingerprint_of(own_certificate(tmp_path / "another").cert.read_text())
    with pytest.raises(Unauthorized, match="not who it should be"):
        trust_of(url, fingerprint=another)
    with pytest.raises(ConfigError, match="not a fingerprint"):
        trust_of(url, fingerprint="sha256:12")
    with pytest.raises(ConfigError, match="not https"):
        trust_of("http://127.0.0.1:1", fingerprint=told)
    with pytest.raises(Unreachable):
        trust_of("https://127.0.0.1:1", fingerprint=told)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")
def test_the_users_own_certificate_is_trusted_by_ca_and_in_the_home(
    serve: Serve, directory: Path, tmp_path: Path
) -> None:
    cert, key = certificate(tmp_path, "mine")
    url = serve(tls_cert=str(cert), tls_key=str(key))
    for trust in (trust_of(url, ca=cert), trust_of(url, known=directory / "rest-cert.pem")):
        with GyreClient(url, TOKEN, trust=trust) as client:
            client.jobs()
    with pytest.raises(ConfigError, match="not a certificate and its key"):
        Certificate(cert, cert).context()


def test_no_older_tls_is_spoken(serve: Serve) -> None:
    url = serve()
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as link,
        pytest.raises(ssl.SSLError),
    ):
        older.wrap_socket(link)


def test_the_command_line_trusts_the_jobs_own_master_by_its_home_and_others_by_fingerprint(
    serve: Serve, seed: Callable[..., str], directory: Path, home: Home, tmp_path: Path
) -> None:
    url = serve()
    store = seed("undisturbed", live=True, url=url)

    def gyre(*arguments: str) -> int:
        return int(CliRunner().invoke(main, arguments).exit_code)

    assert gyre("pause", "golden-1", "--token", TOKEN) == 0
    told = fingerprint_of((directory / "rest-cert.pem").read_text())
    assert gyre("--url", url, "--token", TOKEN, "--fingerprint", told, "resume", "golden-1") == 0
    assert gyre("--url", url, "--token", TOKEN, "resume", "golden-1") == 3
    elsewhere = Home(tmp_path / "elsewhere")
    with JobReader(store, token=TOKEN, at=elsewhere) as reader:
        assert not reader.view("golden-1")["master"]["answering"]
    with open_store(store) as opened:
        assert master_answers(opened.job("golden-1")), "a job whose master answers would be taken for lost"


def test_what_contradicts_itself_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        Rest("0.0.0.0", 0, TOKEN, "cert.pem", "", False).check(here=True)
    with pytest.raises(ConfigError, match="plain_http"):
        Rest("0.0.0.0", 0, TOKEN, "cert.pem", "key.pem", True).check(here=True)
    with pytest.raises(ConfigError, match="not a certificate"):
        Rest("0.0.0.0", 0, TOKEN, str(tmp_path / "no"), str(tmp_path / "no"), False).check(here=True)


def test_a_file_without_a_certificate_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ConfigError, match="no certificate"):
        tell_certificate(tmp_path, Certificate(tmp_path / "empty.pem"))
