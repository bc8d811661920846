"""The rollout manager behind a real self-signed certificate: who trusts it gets in, and nobody else talks to it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext

import aiohttp
import pytest

from gyre.errors import ConfigError
from gyre.rollouts.agent.agent import Agent, AgentSettings
from gyre.rollouts.manager.rollout_manager import RolloutManager
from gyre.rollouts.protocol.connection import Refused
from gyre.rollouts.protocol.credentials import joining_context, pinned_context, server_context
from gyre.rollouts.protocol.endpoint import FixedEndpoint, JobEndpoint, read_endpoint, read_trust
from gyre.rollouts.trainer.plane_client import HearsOfRollouts, RolloutClient
from gyre.store import open_store
from tests.rollouts.owners import NoCommands
from tests.rollouts.plane import QUICK, TOKEN, until
from tests.waits import GENEROUS_S

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no openssl to make certificates with"
)


def certificate(folder: Path, name: str, subject: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", f"subjectAltName={subject}"),
        ],
        check=True,
        capture_output=True,
        timeout=GENEROUS_S,
    )
    return cert, key


@dataclass
class Secured:
    manager: RolloutManager
    folder: Path
    url: str
    cert: Path
    other: Path
    """A certificate that has nothing to do with it."""

    def agent(self, name: str, trust: SSLContext | None) -> Agent:
        settings = AgentSettings(name=name, max_running=1, kv_tokens=1024, cache=self.folder)
        return Agent(settings, FixedEndpoint(self.url, TOKEN, trust), NoCommands())


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    cert, key = certificate(tmp_path, "gyre")
    other, _ = certificate(tmp_path, "other")
    with open_store(f"sqlite:///{tmp_path}/gyre.db") as store:
        manager = RolloutManager(store.rollouts("job"), term=1, token=TOKEN, settings=QUICK)
        port = await manager.start("127.0.0.1", 0, server_context(cert, key))
        yield Secured(manager, tmp_path, f"https://127.0.0.1:{port}", cert, other)
        await manager.stop()


async def test_agents_and_trainers_that_trust_the_certificate_get_in(secured: Secured) -> None:
    contexts = {
        "by-file": joining_context(secured.cert),
        "by-pin": pinned_context(secured.cert.read_text()),
    }
    tasks = [asyncio.create_task(secured.agent(name, trust).run()) for name, trust in contexts.items()]
    client = RolloutClient(FixedEndpoint(secured.url, TOKEN, contexts["by-pin"]), HearsOfRollouts(), term=1)
    try:
        await until(lambda: secured.manager.links.keys() == contexts.keys() and client.connected)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(client.close)


async def test_who_does_not_trust_it_says_what_to_do_and_sends_no_token(secured: Secured) -> None:
    for trust in (None, joining_context(secured.other), pinned_context(secured.other.read_text())):
        with pytest.raises(Refused, match="not who it should be") as caught:
            await asyncio.wait_for(secured.agent("a", trust).run(), GENEROUS_S)
        assert caught.value.details["reason"] == "certificate"
        assert "--ca" in (caught.value.hint or "")
    assert not secured.manager.links
    assert secured.manager.plane.refused == 0


async def test_without_tls_there_is_nothing_to_talk_to(secured: Secured) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(secured.url.replace("https", "http") + "/v1/status")


async def test_the_name_counts_for_who_joins_and_not_for_who_has_the_very_certificate(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "elsewhere", "DNS:rollouts.example")
    with open_store(f"sqlite:///{tmp_path}/gyre.db") as store:
        manager = RolloutManager(store.rollouts("job"), term=1, token=TOKEN, settings=QUICK)
        port = await manager.start("127.0.0.1", 0, server_context(cert, key))
        there = Secured(manager, tmp_path, f"https://127.0.0.1:{port}", cert, cert)
        with pytest.raises(Refused):
            await asyncio.wait_for(there.agent("a", joining_context(cert)).run(), GENEROUS_S)
        task = asyncio.create_task(there.agent("a", pinned_context(cert.read_text())).run())
        await until(lambda: "a" in manager.links)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await manager.stop()


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    text = tmp_path / "no.pem"
    text.write_text("no")
    for make in (lambda: server_context(text, text), lambda: joining_context(text)):
        with pytest.raises(ConfigError, match=r"no\.pem"):
            make()


def test_what_stands_beside_the_address_is_trusted(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path, "gyre")
    told = {"url": "https://127.0.0.1:1", "token": "t"}
    (tmp_path / "rollouts.json").write_text(json.dumps(told))
    assert read_endpoint(tmp_path) == ("https://127.0.0.1:1", "t")
    assert read_trust(tmp_path) is None
    (tmp_path / "rollouts.json").write_text(json.dumps({**told, "certificate": cert.read_text()}))
    context = JobEndpoint(tmp_path).trust()
    assert context is not None
    assert len(context.get_ca_certs()) == 1


async def test_join_and_drain_over_tls_from_the_command_line(secured: Secured) -> None:
    gyre = [sys.executable, "-m", "gyre.api.cli"]
    join = [*gyre, "join", secured.url, "--token", TOKEN, "--engine", "embedded", "--name", "spot"]

    async def begin(*argv: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)

    async def end(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
        async with asyncio.timeout(60):
            _, said = await process.communicate()
        return process.returncode, said.decode()

    code, said = await end(await begin(*join))
    assert code == 2
    assert "--ca" in said
    joined = await begin(*join, "--ca", str(secured.cert))
    try:
        await until(lambda: "spot" in secured.manager.links, 60.0)
        drain = [*gyre, "drain", "spot", "--url", secured.url, "--token", TOKEN, "--ca", str(secured.cert)]
        assert (await end(await begin(*drain)))[0] == 0
        assert (await end(joined))[0] == 0
    finally:
        if joined.returncode is None:
            joined.kill()
