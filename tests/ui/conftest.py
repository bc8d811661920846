"""A real browser on the built page.

The page is served by the mock server in `ui/dev/`, with made-up jobs. `GYRE_PAGE_URL` points the same tests at another
server, and `GYRE_PAGE_JOB` names the job there; what needs the mock's own levers is skipped then.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gyre.api.home import Home
from gyre.api.reader import JobReader
from gyre.api.rest import RestServer
from gyre.api.rest.app import create_store_app
from gyre.api.stored_jobs import StoredJobs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "gyre/api/page"
SOURCES = ROOT / "ui"
AXE = SOURCES / "node_modules/axe-core/axe.min.js"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One at a time in a process, as Playwright wants it: a module of another folder may have the next one."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the page's tests need the package playwright"
    )
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=found, args=list(FLAGS))
        yield launched
        launched.close()


RECORDED = Path(__file__).parent / "recorded.tar.gz"
"""Made by `make recorded`: a demo with kills, and a job of each ending."""


class RecordedHome(NamedTuple):
    """`url`: of `gyre ui` over it. `job`: the name of the demo."""

    home: Path
    url: str
    job: str


@pytest.fixture(scope="package")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedHome]:
    folder = tmp_path_factory.mktemp("home")
    folder.chmod(0o700)
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder, filter="data")
    home = Home(folder)
    with JobReader(home.database_url(), at=home) as reader:
        server = RestServer(create_store_app(StoredJobs(reader), token=None))
        demo = next(one["name"] for one in reader.jobs() if one["name"].startswith("demo-"))
        yield RecordedHome(folder, f"{server.start()}/", demo)
        server.stop()


class Mock:
    """The mock server's levers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def behave(self, **how: Any) -> dict[str, Any]:
        """`away`: it answers nobody. `token`: it wants one. `advance`: a job's name makes one more step."""
        request = urllib.request.Request(f"{self.url}mock", data=json.dumps(how).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


@pytest.fixture(scope="package")
def served() -> Iterator[str]:
    """The address of a mock server; "" where another server is tested."""
    if os.environ.get("GYRE_PAGE_URL"):
        yield ""
        return
    node = shutil.which("node")
    if node is None:
        pytest.skip("the mock server needs Node")
    process = subprocess.Popen(
        [node, str(SOURCES / "dev/server.mjs"), str(PAGE), "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.terminate()
    process.wait(30)
    process.stdout.close()


@pytest.fixture(scope="package")
def base_url(served: str) -> str:
    """Where the page is, with a slash at its end."""
    return served or os.environ["GYRE_PAGE_URL"].rstrip("/") + "/"


@pytest.fixture(scope="package")
def job() -> str:
    return os.environ.get("GYRE_PAGE_JOB", "grpo-math")


@pytest.fixture
def mock(served: str) -> Iterator[Mock]:
    if not served:
        pytest.skip("another server than the mock is tested")
    lever = Mock(served)
    yield lever
    lever.behave(away=False, token="", commands=[])


class Reader:
    """Somebody with the page open, who notices what goes wrong in it."""

    def __init__(self, page: Any, base_url: str) -> None:
        self.page = page
        self.base_url = base_url
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "console",
            lambda said: said.type == "error" and self.errors.append(f"{said.text} {said.location}"),
        )

    def open(self, where: str) -> Any:
        """Open a view, by the part of the address after `#/`, and wait until its data is there."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.base_url}#/{where}")
        try:
            self.page.locator("main h1").first.wait_for(state="attached")
        except Exception as error:  # what the browser has instead says why
            shown = self.page.locator("body").inner_text()[:500]
            raise AssertionError(f"no view at {where}: {shown!r}, and it said {self.errors}") from error
        self.settle()
        return self.page

    def settle(self) -> None:
        """Until nothing loads any more. (A live job's stream stays open, so the network is never idle.)"""
        self.page.wait_for_function(
            "() => ![...document.querySelectorAll('main .empty, main [role=status], main .sentence')]"
            ".some(one => /^(Loading|Looking|…)/.test(one.textContent))"
        )

    def says(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()


@pytest.fixture
def open_reader(browser: Any, base_url: str) -> Iterator[Any]:
    """Makes a reader with a screen of `width` and `height`, and a theme."""
    contexts = []

    def make(width: int = 1280, height: int = 900, theme: str = "light") -> Reader:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
        )
        context.set_default_timeout(30_000)
        contexts.append(context)
        return Reader(context.new_page(), base_url)

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def reader(open_reader: Any) -> Reader:
    made: Reader = open_reader()
    return made
