"""A process that stands in for an engine: it takes a while, serves `/ready`, and can be told to be difficult.

    python stand_in.py --port N [--say TEXT] [--exit-soon CODE] [--never-ready] [--lose WORDS]
        [--stubborn] [--children] [--segment FILE]

On SIGUSR2 it does what `--lose` says, or exits with status 3.

It prints `pid N` for itself and each process that it starts.
"""

from __future__ import annotations

import argparse
import http.server
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def lose(words: str) -> None:
    for part in (words[:5], words[5:]):
        sys.stderr.write(part)
        sys.stderr.flush()
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--say", default="")
    parser.add_argument("--exit-soon", type=int, metavar="CODE", help="after a tenth of a second")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--lose", metavar="WORDS", help="on SIGUSR2 say them, in two parts, and go on")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--segment", help="map this file, and leave it behind")
    parser.add_argument("--children", action="store_true", help="start two, one in a session of its own")
    asked = parser.parse_args()

    print(f"pid {os.getpid()}", flush=True)
    if asked.say:
        sys.stderr.write(asked.say)
        sys.stderr.flush()
    if asked.segment:
        with open(asked.segment, "w+b") as file:
            file.truncate(4096)
            mapped = mmap.mmap(file.fileno(), 4096)
        threading.Thread(target=lambda: (time.sleep(3600), mapped), daemon=True).start()
    if asked.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if asked.children:
        for apart in (False, True):
            # The one apart has lost its parent, as a daemon has.
            starter = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], "
            starter += f"start_new_session={apart}); print('pid', p.pid, flush=True)"
            subprocess.run([sys.executable, "-c", starter], check=True)
    if asked.exit_soon is not None:
        threading.Thread(target=lambda: (time.sleep(0.1), os._exit(asked.exit_soon)), daemon=True).start()
    signal.signal(signal.SIGUSR2, lambda *_: lose(asked.lose) if asked.lose else os._exit(3))

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503 if asked.never_ready else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http.server.ThreadingHTTPServer((asked.host, asked.port), Answers).serve_forever()


if __name__ == "__main__":
    main()
