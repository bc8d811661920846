"""A machine's own address, and the ports that it holds: IPv4 and IPv6, and never by the host's name."""

from __future__ import annotations

import socket
from collections import namedtuple

import psutil
import pytest

from gyre.workloads import addresses
from gyre.workloads.addresses import (
    bare,
    free_port,
    interface_of,
    network_environment,
    own_address,
    reserve,
    take,
    url_host,
)
from gyre.workloads.rollout_vertices import _reachable

One = namedtuple("One", "address")
INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.7", "10.0.0.8", "fd00::7", "fe80::1%eth0", "02:fc:00:00:00:01"],
    "tun0": ["10.9.0.1", "fe80::1%tun0"],
}


@pytest.fixture
def machine(monkeypatch):
    """One with a network, containers and a VPN; its name cannot be resolved."""
    found = {name: [One(text) for text in texts] for name, texts in INTERFACES.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)

    def nobody(*words):
        raise AssertionError("a host's name says nothing of its address")

    monkeypatch.setattr(socket, "gethostname", nobody)
    monkeypatch.setattr(socket, "gethostbyname", nobody)


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.0.0.7", "eth0"),
        ("10.0.0.8", "eth0"),
        ("10.9.0.1", "tun0"),
        ("fd00::7", "eth0"),
        ("[fd00::7]", "eth0"),
        ("FD00:0:0::0007", "eth0"),
        ("fe80::1%tun0", "tun0"),
        ("fe80::1%eth0", "eth0"),
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),
        ("::1", "lo"),
        ("203.0.113.9", None),
        ("a-name", None),
        ("", None),
    ],
)
def test_an_address_is_of_the_interface_that_has_it(machine, address, interface):
    assert interface_of(address) == interface


def test_gloo_and_nccl_are_given_the_interface_and_the_family(machine):
    assert network_environment("fd00::7") == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_SOCKET_FAMILY": "AF_INET6",
    }
    assert network_environment("10.9.0.1")["NCCL_SOCKET_FAMILY"] == "AF_INET"
    assert network_environment("203.0.113.9") == {}


def test_the_known_address_counts_where_an_interface_has_it_and_else_the_way_to_the_peer(
    machine, monkeypatch
):
    monkeypatch.setattr(addresses, "address_towards", lambda peer: f"towards {peer}")
    assert own_address("10.0.0.8", "10.0.0.1") == "10.0.0.8"
    assert own_address("", "10.0.0.7") == "10.0.0.7", "rank 0 itself"
    assert own_address("", "10.0.0.1") == "towards 10.0.0.1"
    assert own_address("203.0.113.9", "203.0.113.8") == "towards 203.0.113.8", "behind an address translation"


@pytest.mark.parametrize(
    ("host", "plain", "in_url"),
    [
        ("10.0.0.7", "10.0.0.7", "10.0.0.7"),
        ("::1", "::1", "[::1]"),
        ("[::1]", "::1", "[::1]"),
        ("fe80::1%eth0", "fe80::1%eth0", "[fe80::1%eth0]"),
        ("a-name", "a-name", "a-name"),
    ],
)
def test_brackets_stand_in_urls_alone(host, plain, in_url):
    assert (bare(host), url_host(host)) == (plain, in_url)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"])
def test_a_reserved_port_is_held_until_somebody_listens_there(host):
    family = addresses.family_of(host)
    port = reserve(host)
    with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
        other.bind((bare(host), port))
    with take(host, port) as listening:
        with socket.create_connection((bare(host), port), timeout=10):
            pass
        assert listening.getsockname()[:2] == (bare(host), port)
    assert free_port(host) in addresses.RENDEZVOUS_PORTS


def test_a_users_own_store_can_listen_at_a_reserved_port():
    port = reserve("127.0.0.1")
    with socket.create_server(("127.0.0.1", port)):  # with SO_REUSEADDR, as torch's
        pass


@pytest.mark.parametrize(
    ("listens", "own", "reached"),
    [
        ("10.0.0.7", "10.0.0.8", "10.0.0.7"),
        ("0.0.0.0", "10.0.0.8", "10.0.0.8"),
        ("::", "fd00::7", "fd00::7"),
        ("::", "10.0.0.8", "10.0.0.8"),
        ("0.0.0.0", "", "towards 192.0.2.1"),
        ("0.0.0.0", "fd00::7", "towards 192.0.2.1"),
        ("::", "", "towards 2001:db8::1"),
    ],
)
def test_the_manager_is_reached_at_its_machines_own_address(monkeypatch, listens, own, reached):
    monkeypatch.setattr("gyre.workloads.rollout_vertices.address_towards", lambda peer: f"towards {peer}")
    assert _reachable(listens, own) == reached
