"""Raw HTTP requests that no client would send, and the answers to them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from random import Random
from typing import Any

from tests.fuzz.inputs import damaged, hostile_json, noise

ANSWER_WITHIN_S = 10.0
MOMENT_S = 0.03
MOST_ANSWER_BYTES = 8 << 20

STRANGE_HEADERS = (
    b"Content-Length: -1",
    b"Content-Length: 1152921504606846976",
    b"Content-Length: 99999999999999999999999999",
    b"Content-Length: 3\r\nContent-Length: 5",
    b"Content-Length: 0x10",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: chunked\r\nContent-Length: 4",
    b"Content-Encoding: gzip",
    b"Content-Encoding: br, deflate, zstd",
    b"Content-Type: application/json; charset=none-such",
    b"Content-Type: application/json; charset=hex",
    b"Content-Type: application/json; charset=utf-16",
    b"Content-Type: application/json; charset=idna",
    b'Content-Type: application/json; charset="utf-8\x00"',
    b"Content-Type: multipart/form-data",
    b"Content-Type: \xff\xfe",
    b"Expect: 100-continue",
    b"Expect: the worst",
    b"Connection: Upgrade\r\nUpgrade: websocket",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    b"Host: [::1",
    b"Host: \xe9",
    b"Host: a@b:c",
    b"Origin: http://[",
    b"Origin: http://[::1]:99999999",
    b"Origin: null",
    b"Origin: \xff",
    b"Sec-Fetch-Site: \xff",
    b"Authorization: Bearer",
    b"Authorization: Bearer \xff\xfe",
    b"Authorization: Basic AAAA",
    b"Cookie: " + b"a=b; " * 3000,
    b"Last-Event-ID: -1",
    b"Last-Event-ID: 99999999999999999999999",
    b"Last-Event-ID: \xff",
    b"Accept: \xff",
    b"Range: bytes=0-18446744073709551616",
    b"X-Forwarded-For: " + b"[" * 3000,
    b": nothing",
    b"A B: c",
    b"folded: a\r\n b",
    b"nul: a\x00b",
    b"large: " + b"x" * 70_000,
    *(b"h%d: v" % n for n in range(3)),
)

STRANGE_CHUNKS = (
    b"0\r\n\r\n",
    b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    b"-1\r\n{}\r\n",
    b"zz\r\n\r\n",
    b"2;" + b"e" * 70_000 + b"\r\n{}\r\n0\r\n\r\n",
    b"1\r\n{\r\n1\r\n}\r\n0\r\ntrailer: x\r\n\r\n",
    b"2\r\n{}",
    b"2\r\n{}0\r\n\r\n",
)

METHODS = (
    b"GET",
    b"POST",
    b"PUT",
    b"DELETE",
    b"HEAD",
    b"OPTIONS",
    b"PATCH",
    b"TRACE",
    b"CONNECT",
    b"FUZZ",
    b"get",
    b"",
)


def strange_request(
    draw: Random, paths: Sequence[bytes], bodies: Sequence[tuple[bytes, Any]], headers: Sequence[bytes]
) -> bytes:
    """A request to one of `paths`, or to one of `bodies` with JSON of which a part is not right. Of `headers`, which
    an honest client sends, most come along."""
    if draw.randrange(12) == 0:
        return noise(draw, 400) + draw.choice((b"", b"\r\n\r\n"))
    path, good = draw.choice(bodies) if draw.randrange(2) else (draw.choice(paths), None)
    method = b"POST" if good is not None else b"GET"
    body = hostile_json(good, draw) if good is not None else b""
    lines = [one for one in headers if draw.randrange(12)]
    strange = [draw.choice(STRANGE_HEADERS) for _ in range(draw.choice((0, 1, 1, 2, 5)))]
    if draw.randrange(6) == 0:
        method = draw.choice(METHODS)
    if draw.randrange(4) == 0:
        path = strange_path(path, draw)
    lengths = [b"content-length", b"transfer-encoding"]
    if any(line.lower().startswith(tuple(lengths)) for line in strange):
        body = draw.choice((body, *STRANGE_CHUNKS))
    elif draw.randrange(5) == 0:
        strange.append(b"Transfer-Encoding: chunked")
        body = draw.choice((*STRANGE_CHUNKS, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)))
    elif body or draw.randrange(2):
        strange.append(b"Content-Length: %d" % len(body))
    if not any(line.lower().startswith(b"content-type") for line in strange):
        strange.append(b"Content-Type: application/json")
    version = draw.choice((b"HTTP/1.1",) * 8 + (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1 ", b""))
    draw.shuffle(strange)
    head = b"\r\n".join([method + b" " + path + b" " + version, *lines, *strange])
    data = head + b"\r\n\r\n" + body
    return damaged(data, draw) if draw.randrange(6) == 0 else data


def strange_path(path: bytes, draw: Random) -> bytes:
    match draw.randrange(8):
        case 0:
            return path + draw.choice(
                (b"?", b"?a=%ff", b"?after=-1", b"?limit=99999999999999999999", b"?cursor=%00")
            )
        case 1:
            return path + b"?" + b"&".join(b"a%d=%d" % (n, n) for n in range(draw.choice((3, 2000))))
        case 2:
            return path.replace(b"/", draw.choice((b"//", b"/../", b"/%2e%2e/", b"%2f", b"\\")), 1)
        case 3:
            return path + draw.choice(
                (b"%", b"%zz", b"%ff%fe", b"%ed%a0%80", b"\xff", b"\x00", b" x", b"#a", b"/")
            )
        case 4:
            return path + b"x" * draw.choice((300, 9000, 70_000))
        case 5:
            return draw.choice(
                (b"*", b"http://[/", b"http://elsewhere/" + path, b"", b"//", b"http://a:99999999/")
            )
        case 6:
            return damaged(path, draw)
        case _:
            return path + b"?after=" + str(draw.choice((-1, 2**63, 10**30, "NaN", "٣", "1e9"))).encode()


def answer_to(data: bytes, port: int, *, rude: bool = True) -> bytes:
    """Send it over a connection of its own, and read what is answered until the end. Who is `rude` sends no more after
    a moment, whatever the server still waits for."""
    got = bytearray()
    link = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_WITHIN_S)
    with link, contextlib.suppress(ConnectionError):
        link.sendall(data)
        if rude:
            link.settimeout(MOMENT_S)
        while True:
            try:
                part = link.recv(1 << 16)
            except TimeoutError:
                if link.gettimeout() == ANSWER_WITHIN_S:
                    raise
                link.settimeout(ANSWER_WITHIN_S)
                link.shutdown(socket.SHUT_WR)
                continue
            got += part
            if not part or len(got) > MOST_ANSWER_BYTES:
                break
    return bytes(got)


def status_of(answer: bytes) -> int:
    """The answer's status; 0 where the connection was ended without one."""
    line = answer.split(b"\r\n", 1)[0].split(b" ")
    return int(line[1]) if len(line) > 1 and line[0].startswith(b"HTTP/") and line[1].isdigit() else 0
