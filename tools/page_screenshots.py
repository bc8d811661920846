"""Makes docs/screenshots: views of the web page over the jobs that the page's tests look at.

    python tools/page_screenshots.py [docs/screenshots]

A real Chromium looks at what `gyre ui` serves, over the home that is unpacked from tests/ui/recorded.tar.gz. Each
picture is a PNG of at most 256 colours: what is left out are shades at the edges of letters. It needs the package
playwright.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import struct
import sys
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gyre.api.home import Home  # noqa: E402
from gyre.api.reader import JobReader  # noqa: E402
from gyre.api.rest import RestServer  # noqa: E402
from gyre.api.rest.app import create_store_app  # noqa: E402
from gyre.api.stored_jobs import StoredJobs  # noqa: E402
from tests.ui.conftest import BROWSERS, FLAGS  # noqa: E402

RECORDED = ROOT / "tests/ui/recorded.tar.gz"
COLOURS = 256
MOST_BYTES = 1_500_000
PATIENCE_MS = 120_000
SETTLE_MS = 1000
"""For charts, which draw themselves a frame or two after their data is there."""


@dataclass(frozen=True)
class Shot:
    """A view of the demo, by the part of its address after the job, or of the list, and `until` which element is
    there."""

    name: str
    view: str
    until: str
    theme: str = "light"
    width: int = 1280
    height: int = 800


LIST = "?all=1"

SHOTS = (
    Shot("runs", LIST, "main .spark"),
    Shot("runs-wide", LIST, "main .spark", "dark", width=3840, height=1200),
    Shot("now-wide", "now", "main .sentence", width=3840, height=1600),
    Shot("now", "now", "main .sentence"),
    Shot("curves", "curves", "main .chart canvas"),
    Shot("timeline", "timeline", "main .timeline-frame canvas", "dark"),
    Shot("samples", "samples?at=2", "main .side-by-side li"),
    Shot("tokens", "samples?at=2", "main .side-by-side li a"),
    Shot("replay", "replay?seq=60", "main .react-flow__node", "dark"),
    Shot("incidents", "incidents", "main .card"),
    Shot("account", "account", "main .total", "dark"),
    Shot("now-narrow", "now", "main .sentence", width=360, height=740),
)

PIXELS = """async (png) => {
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  const bytes = context.getImageData(0, 0, image.width, image.height).data;
  let text = '';
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return [image.width, image.height, btoa(text)];
}"""
"""Reads a PNG: its width, its height, and its pixels as RGBA."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs/screenshots")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SystemExit("There is no Chromium on this machine.")
    total = 0
    with tempfile.TemporaryDirectory(prefix="gyre-page-") as unpacked, sync_playwright() as playwright:
        with tarfile.open(RECORDED) as archive:
            archive.extractall(unpacked, filter="data")
        home = Home(Path(unpacked))
        browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        with JobReader(home.database_url(), at=home) as reader:
            server = RestServer(create_store_app(StoredJobs(reader), token=None))
            try:
                demo = next(one["name"] for one in reader.jobs() if one["name"].startswith("demo-"))
                url = f"{server.start()}/#/jobs/{demo}/"
                for shot in SHOTS:
                    png = taken(browser, url, shot)
                    (folder / f"{shot.name}.png").write_bytes(png)
                    total += len(png)
                    print(f"{shot.name}: {len(png):,} bytes", flush=True)
            finally:
                browser.close()
                server.stop()
    if total > MOST_BYTES:
        raise SystemExit(f"The pictures have {total:,} bytes, more than {MOST_BYTES:,}.")


def taken(browser: Any, url: str, shot: Shot) -> bytes:
    context = browser.new_context(
        viewport={"width": shot.width, "height": shot.height},
        color_scheme=shot.theme,
        reduced_motion="reduce",
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(f"{url}{shot.view}" if shot.view != LIST else f"{url.partition('#')[0]}#/jobs{LIST}")
    page.locator(shot.until).first.wait_for()
    if shot.name == "tokens":
        page.locator(shot.until).first.click()
        page.locator("main .token-text .t").first.wait_for()
    page.wait_for_timeout(SETTLE_MS)
    png = page.screenshot()
    page.goto("about:blank")
    width, height, pixels = page.evaluate(PIXELS, base64.b64encode(png).decode())
    context.close()
    rgba = np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(height, width, 4)
    return with_palette(rgba[..., :3])


def with_palette(rgb: NDArray[np.uint8]) -> bytes:
    """A PNG of these pixels, `[height, width, 3]`, in the colours that most of them have."""
    height, width, _ = rgb.shape
    colours, which, counts = np.unique(rgb.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    palette = colours[np.argsort(-counts, kind="stable")[:COLOURS]]
    apart = ((colours[:, None].astype(np.int32) - palette[None].astype(np.int32)) ** 2).sum(axis=2)
    lines = apart.argmin(axis=1).astype(np.uint8)[which.reshape(-1)].reshape(height, width)
    unfiltered = np.concatenate([np.zeros((height, 1), np.uint8), lines], axis=1)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", palette.tobytes()),
            _chunk(b"IDAT", zlib.compress(unfiltered.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


if __name__ == "__main__":
    main()
