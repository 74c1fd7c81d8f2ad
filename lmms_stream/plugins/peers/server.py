"""Server of a node: serves files of its caches to peers, and knows, as their home, which nodes have a file.

A separate process, which ends with its parent process. The server answers requests with the group's token. It opens
files only by names in an index, if the cache's record confirms their content: a request holds no paths.

    where {source, name, node, without, avoid} -> {"where": node, "store" or "wait"}, see Directory below
    have {source, names, node}           -> {}; the node has these files
    file {source, name, identity}        -> its bytes; 404 for a missing file, or for other content
    progress {source, name}              -> {"has": bool, "num_bytes": bytes so far, null if no process writes it}
"""

from __future__ import annotations

import hmac
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import wait
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import IO, Any, Literal

from ...errors import ConfigError, StorageError
from ...storage.locks import is_locked, leftovers, lock_of
from ...storage.record import Record, boot_id
from .client import PROGRESS_S, SILENT_S, PeerClient, PeerFailedError, PeerGroup, address_of

START_S = 60.0
_MAX_MESSAGE = 1 << 20
_LENGTH = re.compile(r"[0-9]{1,20}")
MAX_UNKNOWN = 128  # connections that have not shown the token yet; then the oldest is closed for a new one,
KNOWN_S = 2.0  # after this many seconds: peers that connect at the same time can all show their tokens
_NAMES_AT_ONCE = 4096
_ANNOUNCE_TRIES, _ANNOUNCE_PAUSE_S = 5, 1.0
_PROGRAM = "import sys; sys.path[:] = {path!r}; from lmms_stream.plugins.peers.server import serve; serve({listener})"
_READY, _ANNOUNCED = b"ready\n", b"announced\n"


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A folder of the cache, and the names of the files that it shares with peers; can be pickled."""

    folder: Path
    names: Container[str]

    def open(self, name: str, identity: str) -> IO[bytes] | None:
        """Open a file whose content was checked since the machine was started; return None if there is no such file."""
        path = self.folder / name
        try:
            file = path.open("rb")
        except OSError:
            return None
        record, stat = Record.read(lock_of(path)), os.fstat(file.fileno())
        is_whole = record.inode and (record.identity, record.boot) == (identity, boot_id())
        if is_whole and (record.inode, record.size, record.mtime_ns) == (stat.st_ino, stat.st_size, stat.st_mtime_ns):
            return file
        file.close()
        return None

    def progress(self, name: str) -> dict[str, Any]:
        """Return whether the folder has a file, and the bytes written so far if a process writes it."""
        path = self.folder / name
        record = Record.read(lock_of(path))
        if record.vouches_for(path, record.identity):
            return {"has": True, "num_bytes": None}
        if not is_locked(lock_of(path)):
            return {"has": False, "num_bytes": None}
        return {"has": False, "num_bytes": sum(map(_size, leftovers(path.parent).get(path, [])))}

    def present(self) -> Iterator[str]:
        """Yield the names of the files in the folder."""
        for folder, _, files in os.walk(self.folder):
            for each in files:
                name = (Path(folder) / each).relative_to(self.folder).as_posix()
                if not each.startswith(".") and name in self.names:
                    yield name


def _size(path: Path) -> int:
    """Size of a file, 0 if it was removed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class PeerServer:
    """A running server; `close` ends it, and so does the end of this process."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process
        self.close = weakref.finalize(self, _end, process, os.getpid())

    @staticmethod
    def start(listener: socket.socket, group: PeerGroup, shared: Mapping[str, SharedFolder]) -> PeerServer:
        """Serve shared folders, by their source, on a listener, which is closed in this process.

        Return after the server's first answer. StorageError if it does not start.
        """
        program = _PROGRAM.format(path=sys.path, listener=listener.fileno())
        with listener:
            process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                pass_fds=[listener.fileno()],
            )  # fmt: skip
        server = PeerServer(process)
        assert process.stdin is not None
        try:
            pickle.dump((group, dict(shared)), process.stdin)
            process.stdin.flush()
        except BrokenPipeError:  # the server has ended; reported below
            pass
        server._await(_READY, timeout_s=START_S)
        return server

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_announced(self, timeout_s: float) -> None:
        """Wait until other nodes know the files that were here at the start. StorageError after the time limit."""
        self._await(_ANNOUNCED, timeout_s=timeout_s)

    def _await(self, line: bytes, *, timeout_s: float) -> None:
        out = self._process.stdout
        assert out is not None
        if not wait([out.fileno()], timeout_s) or os.read(out.fileno(), len(line)) != line:
            self.close()
            raise StorageError(
                f"the server for peers did not start within {timeout_s:g} s (exit status {self._process.returncode}): "
                "see its log, or set fetch.peers to false"
            )


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    if os.getpid() != parent:  # a fork of the parent process
        return
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # the kernel does not interrupt its current work
        process.wait(START_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def listen(host: str, port: int = 0) -> tuple[socket.socket, str]:
    """Return a listener at an address of this machine (port 0: any free port), and its address for peers.

    ConfigError for an address of another machine, or in use.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"peers cannot be served at {address_of(host, port)} ({error.strerror}): name an address of this node, and "
            "a port that is free"
        ) from error
    return listener, address_of(host, listener.getsockname()[1])


def serve(descriptor: int) -> None:
    """Run the server process; it ends with its standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a run still reads after the signal to stop
    group, shared = pickle.load(sys.stdin.buffer)
    server = _Server(socket.socket(fileno=descriptor), group, shared)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _say(_READY)
    threading.Thread(target=server.announce, daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, group: PeerGroup, shared: Mapping[str, SharedFolder]):
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.group, self.shared = group, shared
        self.directory = Directory()
        self.client = PeerClient(group)
        self._unknown: dict[int, tuple[socket.socket, float]] = {}  # connection and its start, the oldest first
        self._fewer = threading.Condition()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, once there is room for a connection without the token: the oldest is closed."""
        with self._fewer:
            while len(self._unknown) >= MAX_UNKNOWN:
                key, (oldest, since) = next(iter(self._unknown.items()))
                left_s = since + KNOWN_S - time.monotonic()
                if left_s > 0:
                    self._fewer.wait(left_s)
                    continue
                del self._unknown[key]
                with suppress(OSError):  # already closed by its peer
                    oldest.shutdown(socket.SHUT_RDWR)  # ends its thread
            self._unknown[id(request)] = request, time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.admit(request)
        super().shutdown_request(request)

    def admit(self, request: Any) -> None:
        """Stop counting a connection without the token: it has shown the token, or ends."""
        with self._fewer:
            self._unknown.pop(id(request), None)
            self._fewer.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections: peers report their own."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def where(self, source: str, name: str, node: int, *, without: list[int], avoid: list[int]) -> Where:
        """Return Directory.where, after a check of the node that takes the file."""
        key = source, name
        found = self.directory.where(key, node, without=without, avoid=avoid, now=time.monotonic())
        if found != "wait" or (taker := self.directory.suspect(key, now=time.monotonic())) is None:
            return found
        progress = self._progress(taker, source, name)
        if progress["has"]:
            self.directory.add(key, taker)
        else:
            self.directory.note(key, taker, progress["num_bytes"], now=time.monotonic())
        return self.directory.where(key, node, without=without, avoid=avoid, now=time.monotonic())

    def _progress(self, node: int, source: str, name: str) -> dict[str, Any]:
        if node == self.group.node:
            return self.shared[source].progress(name)
        try:
            told = self.client.ask(node, "progress", silent_s=PROGRESS_S, source=source, name=name)
            return {"has": False, "num_bytes": None} | told
        except PeerFailedError:
            return {"has": False, "num_bytes": None}

    def announce(self) -> None:
        """Report to the homes of files which files this node already has."""
        for source, each in self.shared.items():
            of_homes: list[list[str]] = [[] for _ in self.group.addresses]
            for name in each.present():
                of_homes[self.group.home_of(source, name)].append(name)
            for home, names in enumerate(of_homes):
                for first in range(0, len(names), _NAMES_AT_ONCE):
                    self._tell(home, source, names[first : first + _NAMES_AT_ONCE])
        _say(_ANNOUNCED)

    def _tell(self, home: int, source: str, names: list[str]) -> None:
        for _ in range(_ANNOUNCE_TRIES):
            try:
                PeerClient(self.group).ask(home, "have", source=source, names=names, node=self.group.node)
                return
            except PeerFailedError:  # the home may be about to start
                time.sleep(_ANNOUNCE_PAUSE_S)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 2 * SILENT_S

    def do_POST(self) -> None:
        token = f"Bearer {self.server.group.token}".encode()
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), token):
            return self._refuse(403)
        self.server.admit(self.connection)
        length = self.headers.get("Content-Length", "")
        if not _LENGTH.fullmatch(length):
            return self._refuse(400)
        size = int(length)
        if not 0 < size <= _MAX_MESSAGE:
            return self._refuse(413)
        try:
            message = json.loads(self.rfile.read(size))
            answer = {"where": self._where, "have": self._have, "file": self._file, "progress": self._progress}[
                self.path[1:]
            ]
            answer(self.server.shared.get(message["source"]), message)
        except (ValueError, KeyError, TypeError, RecursionError):
            self._refuse(400)
        return None

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: clients count their requests."""

    def _where(self, shared: SharedFolder | None, message: Mapping[str, Any]) -> None:
        if not _knows(shared, message["name"]):
            return self._answer({"where": "store"})
        group, source, name = self.server.group, message["source"], message["name"]
        (node,) = _nodes([message["node"]], group)
        without, avoid = _nodes(message["without"], group), _nodes(message["avoid"], group)
        return self._answer({"where": self.server.where(source, name, node, without=without, avoid=avoid)})

    def _have(self, shared: SharedFolder | None, message: Mapping[str, Any]) -> None:
        (node,) = _nodes([message["node"]], self.server.group)
        for name in message["names"]:
            if _knows(shared, name):
                self.server.directory.add((message["source"], name), node)
        self._answer({})

    def _file(self, shared: SharedFolder | None, message: Mapping[str, Any]) -> None:
        name, identity = message["name"], message["identity"]
        file = shared.open(name, identity) if shared is not None and _knows(shared, name) else None
        if file is None:
            return self._refuse(404)
        with file:
            self.send_response(200)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            self.connection.sendfile(file)
        return None

    def _progress(self, shared: SharedFolder | None, message: Mapping[str, Any]) -> None:
        name = message["name"]
        is_known = shared is not None and _knows(shared, name)
        self._answer(shared.progress(name) if shared is not None and is_known else {})

    def _answer(self, answer: Mapping[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _knows(shared: SharedFolder | None, name: object) -> bool:
    return shared is not None and isinstance(name, str) and name in shared.names


def _nodes(given: list[Any], group: PeerGroup) -> list[int]:
    """Check numbers of nodes; ValueError for anything else."""
    if not all(type(each) is int and 0 <= each < len(group.addresses) for each in given):
        raise ValueError(given)
    return given


# State of a file's home node: the nodes with the file, and the nodes taking it. Requesting node -> source.
#
# Each file has one home. Of all nodes without the file, a single node asks the store, even with many requests at once.
# From there the file spreads like a tree: each node with the file gives it to FAN_OUT others at a time.
#
# Times are seconds of one clock, and passed in.

FAN_OUT = 2  # nodes that take a file from one other node at a time
CHECK_S = 1.0  # between checks of a node that takes a file while others wait
STALL_S = 20.0  # without progress, after which a node's transfer is given up

Key = tuple[str, str]  # the source of a file, and its name
Where = int | Literal["store", "wait"]  # a node; "wait": ask again, other nodes are taking the file


@dataclass(slots=True)
class _Taking:
    """A node's transfer of a file. giver: None is the store. moved_at: time of the last progress."""

    giver: int | None
    checked_at: float
    moved_at: float
    num_bytes: int = -1


@dataclass(slots=True)
class _Entry:
    holders: dict[int, int] = field(default_factory=dict)  # nodes that have it -> number of times each was named
    takers: dict[int, _Taking] = field(default_factory=dict)


class Directory:
    """Record, in memory, of the nodes that have each file whose home is this node. Any thread may call its methods."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._lock = threading.Lock()

    def where(
        self, key: Key, node: int, *, without: Iterable[int] = (), avoid: Container[int] = (), now: float
    ) -> Where:
        """Return the node to take a file from, or "store" or "wait", for a node without the file.

        without: nodes that failed to give it, and no longer count as holders; avoid: nodes that this node avoids; other
        nodes may still take the file from them.
        """
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            entry.takers.pop(node, None)
            for each in (node, *without):
                entry.holders.pop(each, None)
            givers = [taking.giver for taking in entry.takers.values()]
            usable = [each for each in entry.holders if each not in avoid]
            free = [each for each in usable if givers.count(each) < FAN_OUT]
            if not free and (entry.takers or usable):
                return "wait"
            giver = min(free, key=entry.holders.__getitem__) if free else None
            entry.takers[node] = _Taking(giver, now, now)
            if giver is None:
                return "store"
            entry.holders[giver] += 1
            return giver

    def add(self, key: Key, node: int) -> None:
        """Record that a node has a file."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            entry.takers.pop(node, None)
            entry.holders.setdefault(node, 0)

    def suspect(self, key: Key, *, now: float) -> int | None:
        """Return a node that takes the file and was not checked for CHECK_S; only one caller gets the node."""
        with self._lock:
            for node, taking in self._entries[key].takers.items():
                if now - taking.checked_at >= CHECK_S:
                    taking.checked_at = now
                    return node
            return None

    def note(self, key: Key, node: int, num_bytes: int | None, *, now: float) -> None:
        """Record the progress of a node that takes a file: the bytes so far; None: the node no longer takes the
        file.
        """
        with self._lock:
            takers = self._entries[key].takers
            taking = takers.get(node)
            if taking is None:
                return
            if num_bytes is None or (num_bytes == taking.num_bytes and now - taking.moved_at >= STALL_S):
                del takers[node]
            elif num_bytes != taking.num_bytes:
                taking.num_bytes, taking.moved_at = num_bytes, now
