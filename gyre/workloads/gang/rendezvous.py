"""How the ranks of a gang meet: a store at rank 0, and process groups at the address that each rank has.

Gloo takes its address from what the host's name resolves to, which is loopback on many machines; here each group of
the process, also those that Megatron makes later, listens at the rank's own address. NCCL takes an interface's name
from the environment. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME that a user has set stay in force.

Invariants:
- *every wait has a deadline*: who waits for a rank that does not come ends after `timeout_s`, and names it;
- *said, not guessed*: no address comes from the host's name;
- *joined together*: no rank goes on before all are joined: one that refuses its model at once would close connections
  which another still waits for, and that one would blame the network.

This module must not know what the ranks compute.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import distributed_c10d

from gyre.errors import ConfigError, RanksMissing
from gyre.workloads.addresses import bare, interface_of, network_environment, own_address, take, url_host
from gyre.workloads.base import WorkloadContext

GLOO_ATTEMPTS = 5
"""Gloo tries to connect so often, each time for its whole time-out."""

STORE_ATTEMPTS = 2
"""A store's client tries to connect so often, each time for its whole time-out."""

SHORTEST_ATTEMPT_S = 0.5
AGAIN_S = 0.1
CONNECT_S = 3.0

_Gloo: Any = dist.ProcessGroupGloo


def join(context: WorkloadContext, backend: str, timeout_s: float) -> None:
    """Initialise the process's default group for `context`'s ranks, of which there are several. Later waits of it, and
    of groups made of it, end after `timeout_s` too. Raises ConfigError, RanksMissing."""
    if context.master_addr is None or context.master_port is None:
        raise ConfigError(
            f"{context.role} has {context.world_size} ranks but no master address.",
            hint="Declare its ranks as collective peers.",
        )
    until = time.monotonic() + timeout_s
    where = f"{url_host(context.master_addr)}:{context.master_port}"
    try:
        address = own_address(getattr(context, "address", ""), context.master_addr)
    except OSError as error:
        raise RanksMissing(
            f"{context.role}-{context.rank} has no way to rank 0 at {where}: {error}.",
            hint="Are both machines on one network? `ray status -v` lists the nodes.",
        ) from error
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        for name, value in network_environment(address).items():
            if name.startswith("NCCL_"):
                os.environ.setdefault(name, value)
    store = _store(context, where, until)
    _wait_for_all(context, store, address, where, timeout_s, until)
    listen_at(address)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, OSError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise RanksMissing(
            f"The ranks of {context.role} do not reach each other from {address}: {' '.join(str(error).split())[:500]}",
            hint="Does a firewall between the machines stop ports that Gloo chooses?",
        ) from error
    _wait_for_joined(context, store, until)
    store.set_timeout(timedelta(seconds=timeout_s))


def _store(context: WorkloadContext, where: str, until: float) -> TCPStore:
    """Rank 0's store, at the port that its host has reserved; for the others a connection to it."""
    host, port = bare(context.master_addr or ""), int(context.master_port or 0)
    while True:
        try:
            listener: int | None = None
            if context.rank == 0:
                listener = take(host, port).detach()
            else:
                _reach(host, port, until)
            return TCPStore(
                host,
                port,
                context.world_size,
                context.rank == 0,
                timeout=timedelta(seconds=max(0.1, (until - time.monotonic()) / STORE_ATTEMPTS)),
                wait_for_workers=False,  # `_wait_for_all` does, and names who is missing
                master_listen_fd=listener,
            )
        except (RuntimeError, OSError) as error:  # rank 0 does not listen yet, or a network that still starts
            if time.monotonic() > until - AGAIN_S:
                does_not = "cannot listen" if context.rank == 0 else "does not reach rank 0"
                raise RanksMissing(
                    f"{context.role}-{context.rank} {does_not} at {where}: {' '.join(str(error).split())[:300]}.",
                    hint="Does rank 0 live, and may its port be reached?",
                ) from error
            time.sleep(AGAIN_S)


def _reach(host: str, port: int, until: float) -> None:
    """Return if somebody listens there; else raise OSError, in time. A store's own time-out holds for each of several
    attempts."""
    left_s = max(0.1, until - time.monotonic())
    with socket.create_connection((host, port), timeout=min(CONNECT_S, left_s)):
        return


def _wait_for_all(
    context: WorkloadContext, store: Store, address: str, where: str, timeout_s: float, until: float
) -> None:
    """Wait until every rank has said its address. Raises RanksMissing, with the ranks that have not."""
    keys = [f"gyre/rank/{rank}" for rank in range(context.world_size)]
    try:
        store.set(keys[context.rank], address)
        store.wait(keys, timedelta(seconds=max(0.1, until - time.monotonic())))
    except RuntimeError as error:
        try:
            store.set_timeout(timedelta(seconds=1))
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:  # rank 0 is gone, and its store with it
            missing = ["0"]
        raise RanksMissing(
            f"{context.role}-{context.rank} waited {timeout_s:g} s at {where} for "
            f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing) or '(all came too late)'} of "
            f"{context.world_size}.",
            hint="Why they did not come stands in their logs; config.collective_timeout_s is how long ranks wait.",
        ) from error


def _wait_for_joined(context: WorkloadContext, store: Store, until: float) -> None:
    """Wait until every rank has joined the group. Who dies now is found by what the ranks do next."""
    keys = [f"gyre/joined/{rank}" for rank in range(context.world_size)]
    with contextlib.suppress(RuntimeError):  # a rank is late, or rank 0 has all of them, and is gone already
        store.set(keys[context.rank], "")
        store.wait(keys, timedelta(seconds=max(0.1, until - time.monotonic())))


def listen_at(address: str) -> None:
    """From now on every Gloo group of this process listens at `address`, unless the user has named an interface that
    is another. Torch offers no such option for its own groups and Megatron's, so the name by which it makes them stands
    for `_GlooAt`."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    _GlooAt.address = "" if named and named != interface_of(address) else address
    distributed_c10d.ProcessGroupGloo = _GlooAt  # type: ignore[misc, assignment]


class _AsGloo(type):
    """So that `_GlooAt` is Gloo's class to whoever asks for it."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Gloo, name)

    def __call__(cls, store: Store, rank: int, size: int, *rest: Any, **named: Any) -> Any:
        timeout = named.get("timeout")
        if rest or set(named) != {"timeout"} or not isinstance(timeout, timedelta):
            return _Gloo(store, rank, size, *rest, **named)
        return _gloo(store, rank, size, timeout, _GlooAt.address)


class _GlooAt(metaclass=_AsGloo):
    """Makes Gloo groups that listen at `address`, and connect within their time-out."""

    address = ""


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    until = time.monotonic() + timeout.total_seconds()
    here = [f"gyre/here/{one}" for one in range(size)]
    store.set(here[rank], "")
    store.wait(here, timeout)  # after this nobody waits for a rank that is late, and all may connect
    left_s = until - time.monotonic()
    options = _Gloo._Options()
    options._devices = [_Gloo.create_device(hostname=address) if address else _device_of_environment()]
    options._timeout = timedelta(seconds=max(left_s / GLOO_ATTEMPTS, SHORTEST_ATTEMPT_S))
    made = _Gloo(store, rank, size, options)
    made._set_default_timeout(timeout)
    return made


def _device_of_environment() -> Any:
    """The device of the first interface in GLOO_SOCKET_IFNAME."""
    return _Gloo.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"].split(",")[0])
