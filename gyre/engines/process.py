"""The process of an engine beside an agent: its start, its death with the last words, and its end without remains.

Invariants:
- *no engine outlives its agent*: the engine runs under a guard (`gyre.engines.process_guard`) that ends it, and all
  processes that it started, when the agent stops it, dies or is killed;
- *stop leaves nothing*: after `stop()` there is no process, no zombie and no open pipe;
- *who has lost a part of itself is dead*: an engine that prints one of its command's `lost_words` is ended at once;
- *a death is told once and stays told*: every `died()` returns the same `EngineDeath` until the next start;
- *a start has a deadline*: an engine that is not ready in time is ended, and its last words are in the error.

This module must not know about samples or weights, and nothing of SGLang (that is `gyre.engines.sglang`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gyre.engines.errors import EngineError, EngineExited, EngineTimeout
from gyre.engines.http_client import Deadlines, EngineClient
from gyre.engines.last_words import SECRET_LEAST, clean
from gyre.engines.limits import RequestLimits
from gyre.process_identity import ProcessIdentity, signal_group

_GUARD = Path(__file__).with_name("process_guard.py")
_TAIL_BYTES = 64 * 1024
_LOOK_S = (0.05, 0.25)
"""First and longest pause between two checks for readiness: samples wait for it. A start takes a second to minutes."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The command that starts an engine. `{host}` and `{port}` in an argument are replaced by its listening address.

    `env` is added to the agent's own environment. `limits` are the limits of its requests; `loader_key` is its weight
    loader's key, "" if it has none. `lost_words` are printed by an engine that has lost one of its processes and will
    end too. `reads_apart`: it draws no tokens while it reads new prompts, so that prompts are best read together.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    limits: RequestLimits | None = None
    loader_key: str = ""
    lost_words: tuple[str, ...] = ()
    reads_apart: bool = False

    def at(self, host: str, port: int) -> list[str]:
        return [part.replace("{host}", host).replace("{port}", str(port)) for part in self.argv]


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """How an engine ended. `returncode` is negative for a signal."""

    returncode: int
    tail: str

    @property
    def reason(self) -> str:
        if self.returncode < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-self.returncode).name}"
            return f"killed by signal {-self.returncode}"
        return f"exit status {self.returncode}"

    def error(self, what: str) -> EngineExited:
        said = f" It said last:\n{self.tail[-2000:]}" if self.tail else ""
        return EngineExited(
            f"{what}: {self.reason}.",
            hint=f"Start it again, or elsewhere.{said}",
            details={"returncode": self.returncode, "tail": self.tail},
        )


class Log(Protocol):
    def write(self, lines: bytes, /) -> object:
        """Whole lines of an engine's output as they come, without its keys."""


class EngineProcess:
    """One engine, started here. `async with` starts and stops it; `restart` gives it a new process and port.

    All methods belong to the event loop of `start`, which must go on running, because it reads the engine's output.
    """

    def __init__(
        self,
        command: EngineCommand,
        *,
        ready_within_s: float = 600.0,
        stop_within_s: float = 15.0,
        host: str = "127.0.0.1",
        log: Log | None = None,
    ) -> None:
        """`ready_within_s` must cover loading the model. `stop_within_s` is the time to stop by itself: an idle SGLang
        takes ten seconds, and a busy one would wait for its requests. `log` gets its output."""
        self._command = command
        self._ready_within_s = ready_within_s
        self._stop_within_s = stop_within_s
        self._host = host
        self._port = 0
        self._reserved: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.ReadTransport | None = None
        self._log = log
        self._tail = _Tail(self)
        self._death: asyncio.Task[EngineDeath] | None = None
        self._changing = asyncio.Lock()

    async def __aenter__(self) -> EngineProcess:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """The URL of the engine, which `restart` changes."""
        return f"http://{self._host}:{self._port}"

    @property
    def api_key(self) -> str | None:
        return self._command.api_key

    @property
    def loader_key(self) -> str:
        return self._command.loader_key

    def client(self) -> EngineClient:
        """A client of the engine as it runs now."""
        return EngineClient(self.url, api_key=self.api_key, limits=self._command.limits)

    @property
    def pid(self) -> int | None:
        """The guard's process id, which is the id of the engine's process group; None before the start."""
        return self._process.pid if self._process is not None else None

    @property
    def tail(self) -> str:
        """The last 64 KiB of its standard output and error, without its keys."""
        return clean(self._tail.text(), self.secrets)

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not be shown of its output: engines print their settings."""
        return tuple(key for key in (self._command.api_key, self._command.loader_key) if key)

    @property
    def death(self) -> EngineDeath | None:
        """How it ended, or None while it lives and before it is started."""
        return self._death.result() if self._death is not None and self._death.done() else None

    async def start(self) -> str:
        """Start the engine, wait until it takes requests, and return its URL. A running engine is left alone.

        Raises EngineExited if it ends before that, EngineTimeout if it is not ready within `ready_within_s`, both with
        its last words; it is then stopped.
        """
        async with self._changing:
            if self._death is not None and not self._death.done():
                return self.url
            await self._stop()
            try:
                await self._spawn()
                await self._until_ready()
            except BaseException:
                await self._stop()
                raise
            self._let_go()
            return self.url

    async def died(self) -> EngineDeath:
        """Wait until it ends, by itself or by `stop`. Cancelling the wait is harmless."""
        if self._death is None:
            raise EngineError("The engine was not started.", hint="Call start() first.")
        return await asyncio.shield(self._death)

    async def stop(self) -> None:
        """End it with all its processes. Harmless if it has ended, or never began."""
        async with self._changing:
            await self._stop()

    async def restart(self) -> str:
        """`stop`, then `start` on a port of its own."""
        await self.stop()
        return await self.start()

    async def _spawn(self) -> None:
        loop = asyncio.get_running_loop()
        self._reserved = reserve_port(self._host)
        self._port = int(self._reserved.getsockname()[1])
        self._tail = _Tail(self, self._command.lost_words, self._log, self.secrets)
        read_end, write_end = os.pipe()
        try:
            # Not asyncio's own pipe: a process that escaped with the other end must not keep `stop` waiting.
            transport, _ = await loop.connect_read_pipe(lambda: self._tail, os.fdopen(read_end, "rb", 0))
            self._output = transport
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(_GUARD),
                f"{self._stop_within_s:g}",
                *self._command.at(self._host, self._port),
                stdin=subprocess.PIPE,
                stdout=write_end,
                stderr=write_end,
                env={**os.environ, **self._command.env},
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        self._death = loop.create_task(self._watch(self._process), name=f"engine-{self._process.pid}")

    async def _watch(self, process: asyncio.subprocess.Process) -> EngineDeath:
        guard = ProcessIdentity.of(process.pid)
        returncode = await process.wait()
        # The guard ends last, unless it was killed itself: then this ends the processes that it left.
        if guard is not None:
            signal_group(guard, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._tail.closed.wait()  # its last words may still be in the pipe
        return EngineDeath(returncode, self.tail)

    def is_lost(self) -> None:
        """It has lost a part of itself: end all of it, now."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)  # the guard's

    async def _until_ready(self) -> None:
        assert self._death is not None
        answer_s = min(2.0, self._ready_within_s)
        deadlines = Deadlines(connect_s=answer_s, answer_s=answer_s)
        pause_s, most_s = _LOOK_S
        try:
            async with (
                asyncio.timeout(self._ready_within_s),
                EngineClient(self.url, api_key=self.api_key, deadlines=deadlines) as client,
            ):
                while not await client.is_ready():
                    await asyncio.wait([self._death], timeout=pause_s)
                    if self._death.done():
                        break
                    pause_s = min(pause_s * 1.5, most_s)
        except TimeoutError:
            raise EngineTimeout(
                f"The engine was not ready within {self._ready_within_s:g} s: {self._command.argv[0]} …",
                hint=f"Give it more time, or see its last output:\n{self.tail[-2000:]}",
                details={"tail": self.tail},
            ) from None
        if self._death.done():
            raise self._death.result().error("The engine ended before it was ready")

    def _let_go(self) -> None:
        """Release the reserved port, because the engine has it or nobody needs it."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    async def _stop(self) -> None:
        self._let_go()
        process, death = self._process, self._death
        if process is not None and death is not None:
            if process.stdin is not None:
                process.stdin.close()  # the guard takes this for the end
            done, _ = await asyncio.wait([death], timeout=self._stop_within_s + 5.0)
            if not done:
                guard = ProcessIdentity.of(process.pid)  # it was not waited for, so that the pid is its own
                if guard is not None and process.returncode is None:
                    signal_group(guard, signal.SIGKILL)
                await asyncio.wait([death], timeout=5.0)
        if self._output is not None:
            self._output.close()
            self._output = None
        self._process = None
        await asyncio.sleep(0)  # lets the transports close


def reserve_port(host: str) -> socket.socket:
    """A socket that reserves a free port until it is closed: nobody gets the port by chance, and a process that names
    it can listen there. SGLang listens half a minute after its start, and other processes open ports meanwhile."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


class _Tail(asyncio.Protocol):
    """Keeps the last bytes of an engine's output, and tells the engine that it is lost when one of `words` is among
    them. `log` gets everything, line by line and without the `secrets`."""

    def __init__(
        self,
        engine: EngineProcess,
        words: tuple[str, ...] = (),
        log: Log | None = None,
        secrets: tuple[str, ...] = (),
    ) -> None:
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._words = tuple(word.encode() for word in words)
        self._engine = engine
        self._seam = b""
        """The end of the previous data, because a word may be cut in two."""
        self._log = log
        self._secrets = tuple(one.encode() for one in secrets if len(one) >= SECRET_LEAST)
        self._unlogged = b""
        """The beginning of a line: a secret may be cut in two."""
        self.closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        if self._log is not None:
            self._log_lines(data)
        if self._words:
            joined = self._seam + data
            if any(word in joined for word in self._words):
                self._engine.is_lost()
            self._seam = joined[-max(map(len, self._words)) :]
        self._parts.append(data)
        self._size += len(data)
        while self._size - len(self._parts[0]) >= _TAIL_BYTES:
            self._size -= len(self._parts.popleft())

    def connection_lost(self, exc: Exception | None) -> None:
        if self._log is not None and self._unlogged:
            self._log_lines(b"\n")
        self.closed.set()

    def _log_lines(self, data: bytes) -> None:
        assert self._log is not None
        data = self._unlogged + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > _TAIL_BYTES:
            end = len(data)
        lines, self._unlogged = data[:end], data[end:]
        for secret in self._secrets:
            lines = lines.replace(secret, b"***")
        if lines:
            self._log.write(lines)

    def text(self) -> str:
        return b"".join(self._parts)[-_TAIL_BYTES:].decode(errors="replace")
