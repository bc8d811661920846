"""How a message reaches whom a job notifies: a POST to a webhook, or a run of a command.

Invariants:
- *delivered, or an error*: only an answer 2xx, or an exit code 0, is a delivery; anything else raises, as a sentence in
  which no address, header or argument stands, for it may be secret;
- *bounded*: every wait has an end, and of an answer, or of what a command prints, a few thousand bytes are looked at;
- *where it was sent, and nowhere else*: redirections are not followed, for they would take the headers with them.

This module must not know what a message says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol
from urllib.parse import urlsplit

import httpx

from gyre.errors import Unreachable
from gyre.observe.http_deadline import bounded, within
from gyre.process_identity import ProcessIdentity, signal_group
from gyre.version import __version__

ANSWER_WITHIN_S = 10.0
"""For the whole talk with a webhook: the connection, the request, the answer, however steadily it comes."""
COMMAND_WITHIN_S = 30.0
OUTPUT_BYTES = 4096
"""Of a command's output, or of an answer that refuses, that is looked at."""
SHOWN_CHARS = 200
PIPE_CLOSES_WITHIN_S = 1.0
"""What a command that was ended left behind may hold its output open for good."""


@dataclass(frozen=True, slots=True)
class Notification:
    """`key` names the delivery: the same message, sent again, has the same. `body` is JSON, `text` what of it people
    read."""

    key: str
    body: bytes
    text: str


class Target(Protocol):
    def deliver(self, message: Notification) -> None:
        """Raises Unreachable where it was not delivered, or cannot be known to have been."""
        ...


@dataclass(frozen=True, slots=True)
class Webhook:
    address: str
    headers: Mapping[str, str]
    answer_within_s: float = ANSWER_WITHIN_S

    def deliver(self, message: Notification) -> None:
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"gyre/{__version__}",
            "Accept-Encoding": "identity",
            "Idempotency-Key": message.key,
            **self.headers,
        }
        try:
            with (
                within(self.answer_within_s),
                bounded(httpx.Client(timeout=self.answer_within_s, follow_redirects=False)) as client,
                client.stream("POST", self.address, content=message.body, headers=headers) as answer,
            ):
                if answer.is_success:
                    return
                said = "" if answer.has_redirect_location else _beginning_of(answer)
        except httpx.TimeoutException:
            raise Unreachable(
                f"{self._name} does not answer within {self.answer_within_s:g} s."
            ) from None  # the cause would show the address
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise Unreachable(f"{self._name} cannot be reached: {type(error).__name__}.") from None
        if answer.has_redirect_location:
            raise Unreachable(
                f"{self._name} answers {answer.status_code}: it is elsewhere.",
                hint="Give the address that it redirects to; redirections are not followed.",
            )
        raise Unreachable(f"{self._name} answers {answer.status_code}{': ' if said else ''}{said}.")

    @property
    def _name(self) -> str:
        return f"The webhook of {urlsplit(self.address).hostname}"


def _beginning_of(answer: httpx.Response) -> str:
    """The first bytes of an answer, as they came: it may be endless, or never come."""
    with contextlib.suppress(httpx.HTTPError):
        for part in answer.iter_raw():
            return " ".join(part[:OUTPUT_BYTES].decode("utf-8", "replace").split())[:SHOWN_CHARS]
    return ""


@dataclass(frozen=True, slots=True)
class CommandDelivery:
    """Runs without a shell, in a group of processes of its own, with the body on its standard input."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    within_s: float = COMMAND_WITHIN_S

    def deliver(self, message: Notification) -> None:
        environment = {
            **self.environment,
            "GYRE_NOTIFY_KEY": message.key,
            "GYRE_NOTIFY_TEXT": message.text,
        }
        with tempfile.TemporaryFile() as body:  # a pipe would wait for a command that does not read
            body.write(message.body)
            body.seek(0)
            try:
                process = subprocess.Popen(
                    list(self.arguments),
                    env=environment,
                    stdin=body,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise Unreachable(
                    f"{self._name} cannot be started: {getattr(error, 'strerror', None) or error}."
                ) from None
        assert process.stdout is not None
        leader = ProcessIdentity.of(process.pid)
        printed = _Printed(process.stdout)
        try:
            code = process.wait(self.within_s)
        except subprocess.TimeoutExpired:
            raise Unreachable(
                f"{self._name} did not end within {self.within_s:g} s: it was killed."
            ) from None
        finally:
            if leader is not None:
                signal_group(leader, signal.SIGKILL)  # with what it has left behind
            process.wait()
        if code:
            said = printed.beginning()
            raise Unreachable(f"{self._name} ended with {code}{': ' if said else ''}{said}.")

    @property
    def _name(self) -> str:
        return f"The command {self.arguments[0]}"


class _Printed:
    """What a process prints, read to its end so that it never waits for a reader, of which the beginning is kept."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._kept = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._output:
            while part := os.read(self._output.fileno(), 65536):
                if len(self._kept) < OUTPUT_BYTES:
                    self._kept += part[:OUTPUT_BYTES]

    def beginning(self) -> str:
        self._thread.join(PIPE_CLOSES_WITHIN_S)
        return " ".join(self._kept.decode("utf-8", "replace").split())[:SHOWN_CHARS]
