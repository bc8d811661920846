"""The rollout plane as vertices: the manager's process, and instances that Gyre places.

Both run an asyncio loop on a thread of their own beside the vertex's host. The manager's address is in `rollouts.json`
in the job's directory; instances and the trainer look there before each dial, so it may change.

Invariants:
- *the vertex dies with its loop*: a loop that ended by an error makes `health()` raise, and the vertex is replaced;
- *an instance leaves in order*: `teardown()` drains it, so its tokens are handed over.

This module must not know how samples are routed, or what an engine does.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
from pathlib import Path
from typing import Any

from gyre.config import Elastic, RoleSpec, RolloutsSpec, WeightsSpec
from gyre.config.sections import WorkloadSettings
from gyre.config.sections.agent import AgentRoleSettings
from gyre.config.sections.lora import ALL_LINEAR
from gyre.data.tokenizer import TextTokenizer
from gyre.errors import ConfigError
from gyre.malloc_tuning import calm_collector
from gyre.models.adapters import AdapterLimits
from gyre.rollouts.agent.agent import Agent, AgentSettings, JobWishes
from gyre.rollouts.agent.join import EngineCommands
from gyre.rollouts.engines import known_engine
from gyre.rollouts.manager.rollout_manager import RolloutManager
from gyre.rollouts.manager.shell import HearsOfPlane
from gyre.rollouts.plane.settings import DoorSettings, ManagerSettings, SessionSettings
from gyre.rollouts.protocol.credentials import new_secret, server_context
from gyre.rollouts.protocol.endpoint import JobEndpoint, read_endpoint, read_join_endpoint, write_endpoint
from gyre.rollouts.sample_checks import MOST_TOKENS
from gyre.rollouts.scheduling.elasticity import ElasticSettings
from gyre.rollouts.scheduling.pools import Pool
from gyre.rollouts.trainer.sample_ledger import rollout_ledger
from gyre.rollouts.weight_peer import check_transports
from gyre.weights.owned_dirs import default_root
from gyre.workloads.addresses import address_towards, url_host
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.chat_format import renderer_of
from gyre.workloads.loop_thread import LoopThread
from gyre.workloads.tasks.vocabulary import vocabulary_of

START_TIMEOUT_S = 60.0
"""How long the manager may take to read its ledger and listen: gigabytes of deltas at a few hundred megabytes/s."""

JOURNALLED = frozenset(
    (
        "InstanceJoined",
        "InstanceLeft",
        "InstanceDraining",
        "InstanceSuspended",
        "RecallIgnored",
        "SparePromoted",
        "SpareRelieved",
        "AddressIgnored",
        "EngineStarted",
        "EngineStartFailed",
        "EngineDied",
        "EngineLimited",
        "LoaderFallback",
        "WindowClosed",
        "MemoryNotReleased",
        "SampleQuarantined",
        "WeightsRefused",
        "PolicyNotServed",
        "PolicyServed",
        "FetchFault",
        "SessionFault",
        "SessionsPaused",
        "SessionsResumed",
        "AgentLost",
        "TransferChosen",
        "PeerRefused",
    )
)
"""The manager's events that the job's journal keeps. The others come with every step, and are in the log."""


class RolloutManagerVertex(BaseWorkload, HearsOfPlane):
    """The process of the rollout manager. Its term is the vertex's incarnation."""

    def setup(self) -> None:
        spec = RolloutsSpec.model_validate(self.context.rollouts)
        before = read_endpoint(self.context.directory)
        secret = before[1] if before is not None else new_secret()
        joining = read_join_endpoint(self.context.directory)
        join_token = joining[1] if joining is not None and joining[1] != secret else new_secret()
        port = spec.port or (int(before[0].rpartition(":")[2]) if before is not None else 0)
        calm_collector()
        self._loop = LoopThread("gyre-rollouts")
        self._store = contextlib.ExitStack()
        ledger = self._store.enter_context(
            rollout_ledger(self.context.store_url, self.context.job_id, hold_s=self.context.store_hold_s)
        )
        self.manager = RolloutManager(
            ledger,
            term=self.context.incarnation,
            token=secret,
            join_token=join_token,
            settings=ManagerSettings(
                report_interval_s=spec.report_interval_s,
                silence_timeout_s=spec.silence_timeout_s,
                stall_timeout_s=max(
                    (pool["stall_timeout_s"] for pool in self.context.pools.values()),
                    default=RoleSpec.model_fields["stall_timeout_s"].default,
                ),
                reconnect_grace_s=spec.reconnect_grace_s,
                update_mode=spec.update_mode,
                deterministic=spec.deterministic,
                adapters=_adapters(self.context.config),
                vocabulary=vocabulary_of(self.context.config) or MOST_TOKENS,
                rebalance_every_s=spec.rebalance_every_s,
                weights=WeightsSpec.model_validate(self.context.weights),
                pools=_elastic_pools(self.context.pools),
                wanted={role: pool["count"] for role, pool in self.context.pools.items()},
                prices={role: pool["price_per_hour"] for role, pool in self.context.pools.items()},
                on_cores=all(
                    kind is not None and kind.on_cores
                    for kind in (known_engine(pool["engine"]) for pool in self.context.pools.values())
                ),
                door=self._door(spec),
                sessions=self._sessions(),
            ),
            owner=self,
        )
        self._loop.closing = self.manager.let_go
        tls, certificate = None, ""
        if spec.tls_cert:
            tls = server_context(Path(spec.tls_cert), Path(spec.tls_key))
            certificate = Path(spec.tls_cert).read_text()
        port = self._listen(spec.host, port, tls)
        self._publish_first()
        host = url_host(_reachable(spec.host, self.context.address))
        self._url = f"{'https' if tls is not None else 'http'}://{host}:{port}"
        write_endpoint(
            self.context.directory,
            {
                "url": self._url,
                "secret": secret,
                "token": join_token,
                **({"certificate": certificate} if certificate else {}),
                "pid": os.getpid(),
                "term": self.context.incarnation,
            },
        )

    def _listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listen on the previous manager's port, if it is free: others may know no other address."""
        try:
            return int(self._loop.call(self.manager.start(host, port, tls), START_TIMEOUT_S))
        except OSError:
            if not port or RolloutsSpec.model_validate(self.context.rollouts).port:
                raise
            return int(self._loop.call(self.manager.start(host, 0, tls), START_TIMEOUT_S))

    def _door(self, spec: RolloutsSpec) -> DoorSettings | None:
        if spec.door is None:
            return None
        folder = _base_model(self.context.config)
        return DoorSettings(
            keep_s=spec.door.keep_s,
            keep_tokens=spec.door.keep_tokens,
            key_bytes=spec.door.key_bytes,
            most_open=spec.door.most_open,
            answer_within_s=spec.door.answer_within_s,
            model=self.context.job,
            vocabulary=vocabulary_of(self.context.config) or MOST_TOKENS,
            context_length=spec.context_length,
            tokenizer=_tokenizer(folder),
            address=url_host(_reachable(spec.host, self.context.address)),
            policy_folders=tuple(Path(one) for one in spec.door.policy_folders),
        )

    def _sessions(self) -> SessionSettings | None:
        """None where the job has no agents."""
        agent = _agent_of(self.context.config)
        if agent is None:
            return None
        return SessionSettings(
            max_turns=agent.max_turns,
            max_tokens=agent.max_tokens,
            seconds=agent.seconds,
            recovery=agent.recovery,
            redraws=agent.redraws,
            breaker=agent.breaker,
            oversample=agent.oversample,
            model=self.context.job,
            renderer=renderer_of(self.context.config),
        )

    def _publish_first(self) -> None:
        """Of a fleet: the model's folder is version 0, unless something was published."""
        folder = _base_model(self.context.config)
        if folder is not None:
            self._loop.call(self.manager.publish_first(folder.absolute()), START_TIMEOUT_S)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Log an event of the manager, and have the journal keep it where it is one of `JOURNALLED`."""
        print(f"{kind} {json.dumps(fields)[:2000]}", flush=True)
        teller = {"vertex": f"{self.role}-{self.rank}", "incarnation": self.context.incarnation}
        if kind == "ScaleAdvised":
            self.context.report(kind, {**teller, **fields})
        elif kind in JOURNALLED:
            self.context.report(
                "RolloutsChanged",
                {**teller, "what": kind, "details": fields},
            )

    def fail(self, error: BaseException) -> None:
        """The manager's work has ended: so has this vertex's."""
        self._loop.fail(error)

    def health(self) -> dict[str, Any]:
        if self._loop.error is not None:
            raise RuntimeError("the rollout manager has stopped") from self._loop.error
        return self._loop.call(self._status(), 5.0)  # type: ignore[no-any-return]

    async def _status(self) -> dict[str, Any]:
        told = self.manager.status()
        if "door" in told:
            told["door"]["url"] = self._url
        return told

    @operator(kind="control", control=True)
    def look(self, wanted: dict[str, int]) -> dict[str, Any]:
        """Of a fleet: `wanted` is how many vertices each role is to have. Returns how many instances serve, how many
        requests are open, and how many tokens were generated."""
        return self._loop.call(self._look(wanted), 5.0)  # type: ignore[no-any-return]

    async def _look(self, wanted: dict[str, int]) -> dict[str, Any]:
        return self.manager.looked_at(wanted)

    @operator(kind="control", control=True)
    def status(self) -> dict[str, Any]:
        """The plane's status: instances, queue, the account in tokens."""
        return self.health()

    def teardown(self) -> None:
        with contextlib.suppress(
            Exception
        ):  # the process ends either way, and the ledger has what was acknowledged
            self._loop.call(self.manager.stop(), 10.0)
        self._loop.stop()
        self._store.close()


class RolloutInstance(BaseWorkload):
    """An engine and its agent. It has no operators: work comes from the rollout manager."""

    def setup(self) -> None:
        spec = RolloutsSpec.model_validate(self.context.rollouts)
        check_transports(WeightsSpec.model_validate(self.context.weights))
        self._loop = LoopThread("gyre-agent")
        self.agent = Agent(
            AgentSettings(
                name=f"{self.role}-{self.rank}",
                max_running=spec.max_running,
                kv_tokens=spec.kv_tokens,
                cache=default_root(),
                engine=spec.engine,
                ready_within_s=spec.ready_timeout_s,
                local=self.context.local,
                starts=None,  # the master counts them, over all agents that this vertex has had
                codec=WeightsSpec.model_validate(self.context.weights).codec,
                # On a device that it shares, the engine has its turn when the policy is made.
                base=None if self.context.local else _base_model(self.context.config),
            ),
            JobEndpoint(self.context.directory),
            engine_commands(
                spec,
                local=self.context.local,
                adapters=_adapters(self.context.config),
                turns=_agent_of(self.context.config) is not None,
            ),
            progress=self.context.progress,
        )
        self._loop.begin(self.agent.run())

    @property
    def version(self) -> int | None:
        """The policy version that the engine serves; None before the first."""
        return self.agent.version if self.agent.version >= 0 else None

    def health(self) -> dict[str, Any]:
        if self._loop.error is not None:
            raise RuntimeError("the agent has stopped") from self._loop.error
        return {"version": self.version, "connected": self.agent.connected, "tokens": self.agent.tokens}

    def teardown(self) -> None:
        with contextlib.suppress(Exception):  # after the deadline the samples go on elsewhere anyway
            self._loop.loop.call_soon_threadsafe(self.agent.drain, "the vertex is stopped", 5.0)
            self._loop.wait(8.0)
        self._loop.stop()


def _tokenizer(folder: Path | None) -> TextTokenizer | None:
    """That of the model's folder; None where it has none, and prompts are token ids."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    return TextTokenizer(folder)


def _elastic_pools(pools: dict[str, dict[str, Any]]) -> dict[str, Pool]:
    """Those whose number the policy advises."""
    found = {}
    for role, pool in pools.items():
        if pool["elastic"] is None:
            continue
        elastic = Elastic.model_validate(pool["elastic"])
        if elastic.auto:
            bounds = ElasticSettings(
                min=elastic.min,
                max=elastic.max,
                up_cooldown_s=elastic.up_cooldown_s,
                down_cooldown_s=elastic.down_cooldown_s,
                cores_full=elastic.cores_full,
            )
            found[role] = Pool(bounds, pool["price_per_hour"])
    return found


def _base_model(config: dict[str, Any]) -> Path | None:
    """The folder that the actor reads its first weights from, if the job has one and this machine can read it."""
    try:
        settings = WorkloadSettings.read(config)
    except ConfigError:  # of a job without Gyre's classes, whose sections mean something else
        return None
    folder = Path(settings.first_policy)
    if settings.model_path and (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    return None


def _adapters(config: dict[str, Any]) -> AdapterLimits | None:
    """Of what size the job's versions are adapters; None for whole models."""
    try:
        lora = WorkloadSettings.read(config).lora
    except ConfigError:  # of a job without Gyre's classes, whose sections mean something else
        return None
    if lora is None:
        return None
    asked = () if lora.target_modules == ALL_LINEAR else lora.target_modules
    return AdapterLimits(lora.rank, tuple(sorted({name.rpartition(".")[2] for name in asked})))


def _agent_of(config: dict[str, Any]) -> AgentRoleSettings | None:
    """The section `agent`; None where the job has no agents."""
    try:
        return WorkloadSettings.read(config).agent
    except ConfigError:  # of a job without Gyre's classes, whose sections mean something else
        return None


def engine_commands(
    spec: RolloutsSpec, *, local: bool = False, adapters: AdapterLimits | None = None, turns: bool = False
) -> EngineCommands:
    """The commands of the job's engine. A `local` engine can give its memory back; with `turns` it keeps what requests
    drew."""
    return EngineCommands(
        spec.engine,
        max_running=spec.max_running,
        kv_tokens=spec.kv_tokens,
        wishes=JobWishes(deterministic=spec.deterministic, adapters=adapters, turns=turns),
        python=spec.engine_python or None,
        context_length=spec.context_length,
        local=local,
        extra=spec.engine_args,
    )


def _reachable(host: str, own: str) -> str:
    """An address at which others reach a socket that listens on `host`, on a machine whose address is `own`."""
    if host not in ("", "0.0.0.0", "::", "[::]"):
        return host
    if own and (":" not in own or host not in ("", "0.0.0.0")):
        return own
    try:
        # The cluster has no address of this family: the one that this machine has towards others. Nothing is sent.
        return address_towards("192.0.2.1" if host in ("", "0.0.0.0") else "2001:db8::1")
    except OSError:
        return "127.0.0.1"
