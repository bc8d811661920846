"""Real processes: an engine is started, dies, is killed, and never leaves anything behind."""

from __future__ import annotations

import asyncio
import io
import mmap
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import psutil
import pytest

from gyre.engines.errors import EngineError, EngineExited, EngineTimeout
from gyre.engines.process import EngineCommand, EngineProcess, reserve_port
from gyre.engines.sglang.command import LAUNCHER, LAUNCHER_KEY, sglang_command
from gyre.engines.weight_loading import LOADER, LOADER_KEY, LOADER_PATH, LOADER_TURNS
from gyre.errors import ConfigError
from tests.machine import SHARED_MEMORY, owned_folder, owned_name
from tests.waits import GENEROUS_S

HERE = Path(__file__).parent

IP_LOCAL_PORT_RANGE = 51
"""Linux 6.3; the socket module has no name for it."""

Make = Callable[..., EngineProcess]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Engines that are stopped afterwards. And then: no child of this process is left, not even a zombie."""
    before = {child.pid for child in psutil.Process().children()}
    made: list[EngineProcess] = []

    def make(
        *arguments: str,
        stop_within_s: float = 0.3,
        ready_within_s: float = GENEROUS_S,
        lost_words: tuple[str, ...] = (),
    ) -> EngineProcess:
        command = EngineCommand(
            (sys.executable, str(HERE / "stand_in.py"), "--port", "{port}", *arguments),
            {"STAND_IN": "1"},
            lost_words=lost_words,
        )
        engine = EngineProcess(command, stop_within_s=stop_within_s, ready_within_s=ready_within_s)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        pids = pids_in(engine.tail)
        await engine.stop()
        assert await all_gone(pids)
    assert {child.pid for child in psutil.Process().children()} <= before


async def test_the_output_goes_to_the_log_as_it_comes_without_keys() -> None:
    said = "for n in 'ab': print(n, 'api-secret-key', flush=True)\nprint('half', end='', flush=True)"
    command = EngineCommand((sys.executable, "-c", said), api_key="api-secret-key")
    logged = io.BytesIO()
    engine = EngineProcess(command, stop_within_s=0.3, ready_within_s=GENEROUS_S, log=logged)
    with pytest.raises(EngineExited):
        await engine.start()
    assert logged.getvalue() == b"a ***\nb ***\nhalf\n"


def pids_in(output: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"^pid (\d+)$", output, re.MULTILINE)]


async def all_gone(pids: Sequence[int], within_s: float = GENEROUS_S) -> bool:
    try:
        async with asyncio.timeout(within_s):
            while True:
                if not any(psutil.pid_exists(pid) for pid in pids):
                    return True
                await asyncio.sleep(0.05)
    except TimeoutError:
        return False


async def guard_has_looked(engine: EngineProcess, within_s: float = GENEROUS_S) -> None:
    """What the engine maps is known to its guard: it looks as soon as it wakes a second after the start, and then
    sleeps again."""
    began = asyncio.get_running_loop().time()
    slept = times_slept(engine)
    async with asyncio.timeout(within_s):
        # The third is one more than it takes: the guard may have woken for something else.
        while times_slept(engine) < slept + 3 or asyncio.get_running_loop().time() < began + 2.0:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def times_slept(engine: EngineProcess) -> int:
    (found,) = re.findall(
        r"^voluntary_ctxt_switches:\s+(\d+)$", Path(f"/proc/{engine.pid}/status").read_text(), re.M
    )
    return int(found)


async def test_an_engine_starts_serves_and_stops(make: Make) -> None:
    engine = make("--say", "hello\n")
    url = await engine.start()
    assert url == engine.url
    async with asyncio.timeout(GENEROUS_S), engine.client() as client:
        assert await client.is_ready()
    assert "hello" in engine.tail
    assert engine.death is None
    assert await engine.start() == url, "started twice"
    (pid,) = pids_in(engine.tail)
    await engine.stop()
    assert not psutil.pid_exists(pid)
    assert engine.death is not None
    assert engine.death.reason == "killed by SIGTERM"
    await engine.stop()


async def test_an_engine_that_ends_is_told_with_its_last_words(make: Make) -> None:
    engine = make("--say", "out of memory\n")
    await engine.start()
    os.kill(pids_in(engine.tail)[0], signal.SIGUSR2)
    death = await asyncio.wait_for(engine.died(), GENEROUS_S)
    assert (death.returncode, death.reason) == (3, "exit status 3")
    assert "out of memory" in death.tail
    assert engine.death is death
    assert await engine.died() is death


async def test_an_engine_that_is_killed_is_told_so(make: Make) -> None:
    engine = make()
    await engine.start()
    os.kill(pids_in(engine.tail)[0], signal.SIGKILL)
    death = await asyncio.wait_for(engine.died(), GENEROUS_S)
    assert (death.returncode, death.reason) == (-9, "killed by SIGKILL")


async def test_an_engine_that_has_lost_a_part_of_itself_is_ended_at_once(make: Make) -> None:
    """SGLang sleeps five seconds when its scheduler died; nothing comes of what it runs meanwhile."""
    engine = make(
        "--stubborn",
        "--children",
        "--lose",
        "a scheduler crashed",
        stop_within_s=10 * GENEROUS_S,
        lost_words=("scheduler crashed",),
    )
    await engine.start()
    pids = pids_in(engine.tail)
    os.kill(pids[0], signal.SIGUSR2)
    death = await asyncio.wait_for(engine.died(), GENEROUS_S)  # and not when it would have to have stopped
    assert death.returncode == -9
    assert "a scheduler crashed" in death.tail
    assert await all_gone(pids)


async def test_when_an_engine_dies_its_processes_die_too(make: Make) -> None:
    engine = make("--children")
    await engine.start()
    pids = pids_in(engine.tail)
    assert len(pids) == 3
    os.kill(pids[0], signal.SIGSEGV)
    death = await asyncio.wait_for(engine.died(), GENEROUS_S)
    assert death.reason == "killed by SIGSEGV"
    assert await all_gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is in /dev/shm on Linux alone")
@pytest.mark.parametrize("end", ["stopped", "killed"])
async def test_shared_memory_goes_with_the_engine(make: Make, end: str) -> None:
    """But what is in a folder, is older than it, or is mapped by somebody else: that is somebody else's."""
    with owned_folder("engine", SHARED_MEMORY) as folder:
        name = f"{SHARED_MEMORY}/{owned_name('engine')}.{uuid.uuid4().hex}"
        old, shared, inside = Path(f"{name}-old"), Path(f"{name}-shared"), Path(folder, "slot")
        old.touch()  # noqa: ASYNC240
        own = [Path(f"{name}-own-{number}") for number in range(2)]
        engines = [make("--segment", str(path)) for path in (*own, old, shared, inside)]
        try:
            for engine in engines:
                await engine.start()
            with open(shared, "r+b") as file, mmap.mmap(file.fileno(), 4096):  # noqa: ASYNC230
                if end == "killed":
                    await asyncio.gather(*map(guard_has_looked, engines))
                for engine in engines:
                    if end == "killed":
                        os.kill(pids_in(engine.tail)[0], signal.SIGKILL)
                        await asyncio.wait_for(engine.died(), GENEROUS_S)
                    await engine.stop()
                assert [path for path in own if path.exists()] == []
                assert all(path.exists() for path in (old, shared, inside))
        finally:
            for path in (old, shared, *own):
                path.unlink(missing_ok=True)


async def test_stop_ends_the_stubborn_and_what_left_the_group(make: Make) -> None:
    engine = make("--stubborn", "--children", stop_within_s=0.2)
    await engine.start()
    pids = pids_in(engine.tail)
    assert os.getpgid(pids[2]) != os.getpgid(pids[0]), "the last is in a session of its own"
    async with asyncio.timeout(GENEROUS_S):
        await engine.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert engine.death is not None
    assert engine.death.returncode == -signal.SIGKILL


async def test_no_engine_outlives_a_killed_agent() -> None:
    agent = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "agent_that_dies.py"), stdout=asyncio.subprocess.PIPE
    )
    assert agent.stdout is not None
    async with asyncio.timeout(GENEROUS_S):
        pids = pids_in((await agent.stdout.readuntil(b"ready\n")).decode())
    assert len(pids) == 4
    assert all(psutil.pid_exists(pid) for pid in pids)
    agent.kill()
    await agent.wait()
    assert await all_gone(pids)


async def test_no_engine_outlives_its_guard(make: Make) -> None:
    engine = make("--stubborn")
    await engine.start()
    pids = pids_in(engine.tail)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    death = await asyncio.wait_for(engine.died(), GENEROUS_S)
    assert death.returncode == -signal.SIGKILL
    assert await all_gone(pids)


async def test_restart_gives_another_process(make: Make) -> None:
    engine = make("--say", "hello\n")
    await engine.start()
    first = pids_in(engine.tail)
    await engine.restart()
    second = pids_in(engine.tail)
    assert len(first) == len(second) == 1
    assert first != second
    assert not psutil.pid_exists(first[0])
    assert engine.death is None


async def test_an_engine_can_be_started_after_it_died(make: Make) -> None:
    engine = make()
    await engine.start()
    os.kill(pids_in(engine.tail)[0], signal.SIGKILL)
    await asyncio.wait_for(engine.died(), GENEROUS_S)
    await engine.start()
    assert engine.death is None


async def test_the_tail_is_bounded_and_is_the_end(make: Make) -> None:
    # An argument holds no more than 128 KiB.
    engine = make("--say", "x" * 100_000 + "the end\n")
    await engine.start()
    assert len(engine.tail) == 64 * 1024
    assert engine.tail.endswith("x" * 1000 + "the end\n")


async def test_an_engine_that_ends_before_it_is_ready(make: Make) -> None:
    engine = make("--never-ready", "--say", "no such model\n", "--exit-soon", "1")
    with pytest.raises(EngineExited, match=r"exit status 1\.(.|\n)*no such model"):
        await engine.start()


async def test_a_command_that_does_not_exist(make: Make) -> None:
    engine = EngineProcess(EngineCommand(("/no/such/engine", "--port", "{port}")))
    with pytest.raises(EngineExited, match=r"exit status 127\.(.|\n)*No such file"):
        await engine.start()


async def test_an_engine_that_is_never_ready_is_ended() -> None:
    """A shell, for a busy machine takes seconds to start Python."""
    command = EngineCommand(("/bin/sh", "-c", "echo pid $$; echo loading; exec sleep 100"))
    engine = EngineProcess(command, ready_within_s=3.0)
    with pytest.raises(EngineTimeout, match=r"not ready within 3 s(.|\n)*loading"):
        await engine.start()
    assert await all_gone(pids_in(engine.tail))


async def test_a_cancelled_start_leaves_nothing(make: Make) -> None:
    engine = make("--never-ready")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.7):
            await engine.start()
    assert await all_gone(pids_in(engine.tail))


async def test_waiting_for_the_death_of_what_was_not_started(make: Make) -> None:
    with pytest.raises(EngineError, match="not started"):
        await make().died()


def test_a_reserved_port_is_given_to_nobody_by_chance_and_to_whoever_asks_for_it() -> None:
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as chance:
            try:
                chance.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
            except OSError:
                pytest.skip("this kernel cannot be asked for a port out of one")
            chance.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                chance.bind(("127.0.0.1", 0))
        with socket.create_server(("127.0.0.1", port)) as engine:
            assert engine.getsockname()[1] == port


def test_sglang_is_told_where_and_how() -> None:
    command = sglang_command("/m", python="py", api_key="k", extra=("--tp-size", "2"), env={"A": "1"})
    argv = command.at("127.0.0.1", 4000)
    assert argv[:3] == ["py", "-m", LAUNCHER]
    assert argv[argv.index("--port") + 1] == "4000"
    assert argv[-2:] == ["--tp-size", "2"]
    assert {"--skip-tokenizer-init", "--incremental-streaming-output"} <= set(argv)
    assert "--enable-deterministic-inference" not in argv
    assert "--enable-deterministic-inference" in sglang_command("/m", deterministic=True).argv
    assert command.api_key == command.env[LAUNCHER_KEY] == "k"
    assert not any(part == "k" for part in argv), "everybody can read a command line"
    assert sglang_command("/m").api_key != sglang_command("/m").api_key
    assert command.env["A"] == "1"
    assert command.env["PYTHONDONTWRITEBYTECODE"] == "", "else each start compiles all of it again"


def test_sglang_gets_the_weight_loader_and_keeps_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/users")
    command = sglang_command("/m")
    assert command.env["PYTHONPATH"] == f"{LOADER_PATH}{os.pathsep}/users"
    assert command.argv[command.argv.index("--custom-weight-loader") + 1] == LOADER
    assert command.env[LOADER_KEY] == command.loader_key != sglang_command("/m").loader_key
    assert LOADER_TURNS not in command.env
    assert LOADER_TURNS in sglang_command("/m", turns=True).env
    assert f'TURNS = "{LOADER_TURNS}"' in (LOADER_PATH / f"{LOADER.partition('.')[0]}.py").read_text()
    given = sglang_command("/m", env={"PYTHONPATH": "/given"})
    assert given.env["PYTHONPATH"] == f"{LOADER_PATH}{os.pathsep}/given"


@pytest.mark.parametrize("argument", ["--quantization", "--custom-weight-loader=my.own"])
def test_what_is_loaded_otherwise_is_read_from_disk(argument: str) -> None:
    command = sglang_command("/m", extra=(argument, "fp8"))
    assert command.loader_key == ""
    assert str(LOADER_PATH) in command.env["PYTHONPATH"], "the launcher is there, too"
    assert LOADER not in command.argv


@pytest.mark.parametrize("argument", ["--port", "--port=1", "--model-path", "--api-key=k", "--admin-api-key"])
def test_what_gyre_gives_to_sglang_cannot_be_given_again(argument: str) -> None:
    with pytest.raises(ConfigError, match="is set by Gyre"):
        sglang_command("/m", extra=(argument, "1"))


def test_the_launcher_gives_sglang_the_key_that_its_environment_holds(tmp_path: Path) -> None:
    """Under a Python that has no Gyre, with a package in SGLang's place that says how it was called."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    said = "import sys\nif __name__ == '__main__':\n    print(__spec__.name, *sys.argv[1:])\n"
    (tmp_path / "sglang" / "launch_server.py").write_text(said)
    command = sglang_command("/m", python=sys.executable, env={"PYTHONPATH": str(tmp_path)})
    done = subprocess.run(
        [command.argv[0], "-S", *command.argv[1:]],
        env=dict(command.env),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["sglang.launch_server", *command.argv[3:], "--api-key", command.api_key]
