"""A server in front of a store's server that breaks its answers as it is told, and counts them.

It runs in a process of its own, so that processes which tests fork and kill hold none of its sockets:

    with fault_proxy(os.environ["S3_ENDPOINT_URL"]) as proxy:  # S3_ENDPOINT_URL is the proxy's now
        proxy.set_rules(Rule(path=r"shard\\.00002", times=2, status=503))
        ...
        assert proxy.traffic().num_requests("GET", r"shard\\.00002") == 3

It obeys lines of JSON on its standard input and ends when that is closed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import wait
from typing import Any, cast
from urllib.parse import unquote, urlsplit

CHUNK_BYTES = 1 << 16
UPSTREAM_TIMEOUT_S = 60
S3_CODES = {403: "AccessDenied", 404: "NoSuchKey", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}
NOT_RELAYED = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What happens to the requests that it matches, instead of the plain answer.

    path: a regular expression that is searched in the decoded path. times: of each path, the first so many
    requests; None: all. for_s: seconds since the rules were set in which the rule holds; None: it always holds. Faults
    that change a body's bytes also take the server's checksum headers away.
    """

    path: str = ""
    method: str = "GET"
    times: int | None = None
    for_s: float | None = None
    delay_s: float = 0.0  # before anything else
    hang: bool = False  # no answer, until the client or the proxy goes away
    reset: bool = False  # the connection is reset instead of an answer
    status: int | None = None  # an S3 error of this status instead of the answer
    code: str | None = None  # of that error, if not the usual one of the status
    reset_after: int | None = None  # bytes of the body before the connection is reset
    cut_after: int | None = None  # bytes of the body before a normal close, short of Content-Length
    shorten_to: int | None = None  # bytes that are left of the body, and Content-Length agrees
    flip_at: int | None = None  # the byte of the body that is inverted; negative: from its end
    trickle_s: float | None = None  # seconds before each byte of the body

    @property
    def changes_body(self) -> bool:
        return self.shorten_to is not None or self.flip_at is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """requests: number by (method, path); body_bytes: bytes of answers' bodies sent, by (method, path)."""

    requests: Counter[tuple[str, str]]
    body_bytes: Counter[tuple[str, str]]

    def num_requests(self, method: str, path: str) -> int:
        """Requests whose path the regular expression `path` is found in."""
        return _sum_matching(self.requests, method, path)

    def num_bytes(self, method: str, path: str) -> int:
        return _sum_matching(self.body_bytes, method, path)


def _sum_matching(counts: Counter[tuple[str, str]], method: str, path: str) -> int:
    return sum(n for (counted, where), n in counts.items() if counted == method and re.search(path, where))


class FaultProxy:
    """A running proxy; `url` is where it listens. Rules and counts may be changed and read at any time."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.url: str = self._ask({})["url"]

    def set_rules(self, *rules: Rule) -> None:
        """Replace the rules, of which the first that matches a request is followed, and count from zero again."""
        self._ask({"rules": [asdict(rule) for rule in rules]})

    def set_listening(self, listening: bool) -> None:
        """Refuse connections from now on, or take them again; connections that are open are reset when used."""
        self._ask({"listening": listening})

    def traffic(self) -> Traffic:
        """Counts since the rules were set last."""
        answer = self._ask({"traffic": True})
        requests, body_bytes = (
            Counter({(method, path): n for method, path, n in answer[name]}) for name in ("requests", "body_bytes")
        )
        return Traffic(requests=requests, body_bytes=body_bytes)

    def wait_for(self, path: str, *, method: str = "GET", num_requests: int = 1, timeout_s: float = 30) -> None:
        """Return when so many requests of the path have come; TimeoutError otherwise."""
        deadline = time.monotonic() + timeout_s
        while self.traffic().num_requests(method, path) < num_requests:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {num_requests} requests {method} {path} came within {timeout_s} s")
            time.sleep(0.02)

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return cast(dict[str, Any], json.loads(self._process.stdout.readline()))


@contextmanager
def fault_proxy(target: str, *, variable: str = "S3_ENDPOINT_URL") -> Iterator[FaultProxy]:
    """A proxy in front of the server at `target`; until the end `variable` is its URL, here and in children."""
    before = os.environ.get(variable)
    command = [sys.executable, __file__, target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            proxy = FaultProxy(process)
            os.environ[variable] = proxy.url + urlsplit(target).path
            yield proxy
        finally:
            process.kill()
            if before is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = before


# The process that serves


class _State:
    """What all connections share: rules, how often each was followed for each path, counts, and whether it is up."""

    def __init__(self, target: str):
        self.target = urlsplit(target)
        self.listening = True
        self.lock = threading.Lock()
        self.set_rules([])

    def set_rules(self, rules: list[Rule]) -> None:
        with self.lock:
            self.rules, self.set_at_s = rules, time.monotonic()
            self.followed: Counter[tuple[int, str]] = Counter()
            self.requests: Counter[tuple[str, str]] = Counter()
            self.body_bytes: Counter[tuple[str, str]] = Counter()

    def take_rule(self, method: str, path: str) -> Rule:
        """Count a request and choose what is done to it."""
        with self.lock:
            self.requests[method, path] += 1
            for number, rule in enumerate(self.rules):
                is_over = rule.for_s is not None and time.monotonic() > self.set_at_s + rule.for_s
                if rule.method == method and re.search(rule.path, path) and not is_over:
                    self.followed[number, path] += 1
                    if rule.times is None or self.followed[number, path] <= rule.times:
                        return rule
        return Rule()

    def count_bytes(self, counts: Counter[tuple[str, str]], method: str, path: str, num_bytes: int) -> None:
        """Add to counts that a connection took at its request: those of before set_rules are forgotten."""
        with self.lock:
            counts[method, path] += num_bytes

    def traffic(self) -> dict[str, list[tuple[str, str, int]]]:
        with self.lock:
            return {
                name: [(method, path, n) for (method, path), n in counts.items()]
                for name, counts in (("requests", self.requests), ("body_bytes", self.body_bytes))
            }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, state: _State):
        self.state = state
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed or give up are what tests are about."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_any(self) -> None:
        self.path_only = unquote(urlsplit(self.path).path)
        try:
            self._answer()
        except OSError:  # the client went away, as it does after an error
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are counted, not printed."""

    def _answer(self) -> None:
        state = self.server.state
        if not state.listening:
            return self._reset()
        self.body_bytes = state.body_bytes
        rule = state.take_rule(self.command, self.path_only)
        if rule.delay_s:
            self._wait(rule.delay_s)
        if rule.hang:
            self._wait(None)
            self.close_connection = True
        elif rule.reset:
            self._reset()
        elif rule.status is not None:
            for _ in self._request_body():
                pass
            self._send_error(rule.status, code=rule.code)
        else:
            self._relay(rule)
        return None

    def _relay(self, rule: Rule) -> None:
        target = self.server.state.target
        connect = HTTPSConnection if target.scheme == "https" else HTTPConnection
        upstream = connect(target.hostname or "", target.port, timeout=UPSTREAM_TIMEOUT_S)
        try:
            self._forward_request(upstream)
            response = upstream.getresponse()
        except (OSError, HTTPException) as error:
            upstream.close()
            return self._send_error(502, str(error))
        try:
            return self._send_answer(response, rule)
        finally:
            upstream.close()

    def _forward_request(self, upstream: HTTPConnection) -> None:
        # The host is the one that the client signed.
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "expect"):
                upstream.putheader(name, value)
        upstream.putheader("Connection", "close")
        upstream.endheaders()
        for chunk in self._request_body():
            upstream.send(chunk)

    def _request_body(self) -> Iterator[bytes]:
        """The bytes of the request after its headers, as they are on the wire."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            size = 1
            while size:
                line = self.rfile.readline()
                size = int(line.split(b";")[0], 16)
                yield line + self.rfile.read(size + 2)
            return
        left = int(self.headers.get("Content-Length", 0))
        while left and (chunk := self.rfile.read(min(left, CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk

    def _send_answer(self, response: HTTPResponse, rule: Rule) -> None:
        no_body = self.command == "HEAD" or response.status in (204, 304)
        length = response.headers.get("Content-Length")
        whole = None
        if length is None and not no_body:  # a list, in chunks: read first to know its size
            whole = response.read()
            length = str(len(whole))
        if rule.shorten_to is not None and length is not None:
            length = str(min(rule.shorten_to, int(length)))
        self.send_response(response.status, response.reason)
        for name, value in response.headers.items():
            is_checksum = rule.changes_body and name.lower().startswith("x-amz-checksum")
            if name.lower() not in NOT_RELAYED and not is_checksum:
                self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()
        if not no_body:
            chunks = iter(lambda: response.read(CHUNK_BYTES), b"") if whole is None else iter([whole])
            self._send_body(chunks, int(length or 0), rule)

    def _send_body(self, chunks: Iterator[bytes], length: int, rule: Rule) -> None:
        """Send `length` bytes of the chunks, unless the rule ends it before."""
        stop = min((n for n in (rule.reset_after, rule.cut_after, length) if n is not None), default=length)
        at = 0
        for chunk in chunks:
            piece = bytearray(chunk[: stop - at])
            if rule.flip_at is not None and at <= rule.flip_at % length < at + len(piece):
                piece[rule.flip_at % length - at] ^= 0xFF
            self._send_piece(bytes(piece), rule.trickle_s)
            at += len(piece)
            if at == stop:
                break
        if rule.reset_after is not None:
            self._reset()
        elif at < length or rule.cut_after is not None:
            self.close_connection = True

    def _send_piece(self, piece: bytes, trickle_s: float | None) -> None:
        for part in [piece] if trickle_s is None else [bytes([byte]) for byte in piece]:
            if trickle_s is not None and not self._wait(trickle_s):
                raise ConnectionAbortedError
            self.wfile.write(part)
            self.server.state.count_bytes(self.body_bytes, self.command, self.path_only, len(part))

    def _send_error(self, status: int, message: str = "as the test wants it", *, code: str | None = None) -> None:
        code = code or S3_CODES.get(status, "Error")
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{code}</Code><Message>{message}</Message><RequestId>proxy</RequestId></Error>"
        ).encode()
        self.send_response(status, code)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _wait(self, seconds: float | None) -> bool:
        """Wait (None: for ever), at most while the client stays connected; whether it still is."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while deadline is None or time.monotonic() < deadline:
            left = 1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if wait([self.connection], left):
                if not self.connection.recv(1, socket.MSG_PEEK):
                    return False
                time.sleep(min(left, 0.05))  # the rest of an upload waits to be read
        return True

    def _reset(self) -> None:
        """End the connection by RST, once the client's kernel has what was sent before."""
        self.close_connection = True
        for _ in range(200):
            if not struct.unpack("i", fcntl.ioctl(self.connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]:
                break
            time.sleep(0.005)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())  # close() would wait for the files made of the socket


def _serve(target: str) -> None:
    state = _State(target)
    server = _start(0, state)
    port = server.server_address[1]
    for line in sys.stdin:
        command = json.loads(line)
        if "rules" in command:
            state.set_rules([Rule(**rule) for rule in command["rules"]])
        if "listening" in command and command["listening"] != state.listening:
            state.listening = command["listening"]
            if state.listening:
                server = _start(port, state)
            else:
                server.shutdown()
                server.server_close()
        answer = {"url": f"http://127.0.0.1:{port}"} | (state.traffic() if command.get("traffic") else {})
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _start(port: int, state: _State) -> _Server:
    server = _Server(port, state)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server


if __name__ == "__main__":
    _serve(sys.argv[1])
