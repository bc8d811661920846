"""What is an address, whose it may be, and that none of them surprises whoever dials it."""

from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.weights.transfer.address import (
    ADDRESS,
    HostPort,
    bracketed,
    format_address,
    is_address,
    may_name,
    may_pass_on,
    parse_address,
    split_address,
)
from tests.examples import examples

LONG = ".".join(["a" * 63] * 3 + ["b" * 61])


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("a:1", "a", 1),
        ("node-7.rack_2.example:65535", "node-7.rack_2.example", 65535),
        ("3com.example:80", "3com.example", 80),
        (f"{LONG}:80", LONG, 80),
        ("[::1]:80", "::1", 80),
        ("[2001:db8::7]:7000", "2001:db8::7", 7000),
        ("[::ffff:10.0.0.1]:80", "::ffff:10.0.0.1", 80),
        ("[1:2:3:4:5:6:7:8]:80", "1:2:3:4:5:6:7:8", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("[FE80::a:1%en-1.2]:80", "FE80::a:1%en-1.2", 80),
    ],
)
def test_an_address_is_taken_apart_and_written_again(address: str, host: str, port: int) -> None:
    assert is_address(address)
    assert parse_address(address) == HostPort(host, port) == split_address(address)
    assert str(HostPort(host, port)) == format_address(host, port) == format_address(bracketed(host), port)
    assert format_address(host, port) == address


@pytest.mark.parametrize(
    "text",
    [
        "", ":80", "a", "a:", "a:0", "a:65536", "a:080", "a:80\n", "a:8 0", "a b:80", "http://a:80",
        "a..b:80", ".a:80", "a.:80", "-a:80", "a-:80", "a.-b:80", "a_:80", "\u00e4:80", "a:\u0661",
        f"{'a' * 64}:80", f"{LONG}b:80", "1.2.3:80", "1.2.3.256:80", "127.1:80", "2130706433:80", "0x7f000001:80",
        "0177.0.0.1:80", "a.0x7f:80", "a.1:80", "::1:80", "[]:80", "[:]:80", "[::1:80", "[1.2.3.4]:80", "[a]:80",
        "[1:2:3:4:5:6:7]:80", "[1:2:3:4:5:6:7:8:9]:80", "[1::2::3]:80", "[12345::]:80", "[:::]:80", "[::1%eth0]:80",
        "[2001:db8::7%eth0]:80", "[fe80::1%]:80", f"[fe80::1%{'e' * 33}]:80", "[fe80::1::2%eth0]:80",
        "[fe80::1%eth0%a]:80", "[fe80:%e]:80", None, 7, b"a:80",
    ],
)  # fmt: skip
def test_what_is_none_is_refused(text: object) -> None:
    assert not is_address(text)
    with pytest.raises(ValueError, match="no address"):
        parse_address(text)  # type: ignore[arg-type]
    with pytest.raises(ConnectionAbortedError, match="no address"):
        split_address(text)  # type: ignore[arg-type]


@settings(max_examples=examples(300))
@given(st.text("abfx019:.-_%[]E", max_size=40))
def test_what_is_one_is_resolved_without_a_surprise(text: str) -> None:
    for host in (text, f"a{text}", f"[{text}]"):
        if not is_address(f"{host}:80"):
            continue
        inner, _ = split_address(f"{host}:80")
        assert len(inner.encode("idna")) <= 253  # what `socket` does with a host first
        if ":" in inner:
            ipaddress.ip_address(inner)


@settings(max_examples=examples(300))
@given(st.one_of(st.ip_addresses(v=6).map(str), st.text("abf019:.", min_size=2, max_size=30)))
def test_an_ipv6_host_is_what_the_library_takes_for_one(host: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        assert not re.match(ADDRESS, f"[{host}]:80")
    else:
        assert re.match(ADDRESS, f"[{host}]:80")


@pytest.mark.parametrize(
    ("address", "caller", "networks", "believed"),
    [
        ("10.0.0.7:80", "10.0.0.7", (), True),
        ("10.0.0.7:80", "::ffff:10.0.0.7", (), True),
        ("[2001:db8::7]:80", "2001:db8:0::7", (), True),
        ("[fe80::7%eth1]:80", "fe80::7%eth0", (), True),
        ("127.0.0.1:80", "127.0.0.1", (), True),
        ("127.0.0.1:80", "10.0.0.7", (), False),
        ("169.254.169.254:80", "10.0.0.7", (), False),
        ("10.0.0.8:80", "10.0.0.7", (), False),
        ("10.0.0.8:80", "10.0.0.7", ("10.0.0.0/24",), True),
        ("10.0.1.8:80", "10.0.0.7", ("10.0.0.0/24",), False),
        ("localhost:80", "127.0.0.1", (), False),
        ("node.example:80", "10.0.0.7", ("0.0.0.0/0",), False),
        ("10.0.0.7:80", "", (), False),
        ("nonsense", "10.0.0.7", (), False),
    ],
)
def test_a_peer_speaks_for_itself(
    address: str, caller: str, networks: tuple[str, ...], believed: bool
) -> None:
    assert may_name(address, caller, networks) is believed


@pytest.mark.parametrize(
    ("address", "teller", "dialled"),
    [
        ("10.0.0.8:80", "10.0.0.7", True),
        ("127.0.0.1:80", "127.0.0.1", True),
        ("127.0.0.1:80", "10.0.0.7", False),
        ("[::1]:22", "10.0.0.7", False),
        ("[::ffff:127.0.0.1]:22", "10.0.0.7", False),
        ("169.254.169.254:80", "10.0.0.7", False),
        ("[fe80::1%lo]:80", "10.0.0.7", False),
        ("0.0.0.0:80", "127.0.0.1", False),
        ("224.0.0.1:80", "10.0.0.7", False),
        ("metadata.google.internal:80", "10.0.0.7", False),
        ("a..b:80", "10.0.0.7", False),
    ],
)
def test_what_a_peer_says_of_others_leads_to_no_machine_of_ones_own(
    address: str, teller: str, dialled: bool
) -> None:
    assert may_pass_on(address, teller) is dialled
