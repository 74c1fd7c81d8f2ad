"""Files from the caches of other nodes instead of from the store. Name -> [peers] -> a file, or "ask the store".

Each node has a server (server.py); all nodes know its address. A file's name determines its home. The home names the
node to take the file from. If no node has the file, the first node that asks fetches it from the store, and the others
wait. A peer that does not answer costs seconds, and is avoided for a while: the store has every file.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from ...errors import ConfigError, LmmsStreamError
from ...storage.fetch_config import FetchTally

T = TypeVar("T")
SILENT_S = 5.0  # seconds without a byte, after which a peer has failed
PROGRESS_S = SILENT_S * 0.4  # likewise, for a question of a server while another peer waits for its answer
SLOWEST = 1e6  # minimum bytes a second of a transfer that takes longer than SILENT_S
_AVOID_S = (30.0, 480.0)  # time to avoid a peer that failed: the first time, and at most
_PAUSE_S = (0.05, 1.0)  # between questions for a file that another node fetches: the first, and at most
_CHUNK = 1 << 20
MIN_TOKEN = 16
logger = logging.getLogger("lmms_stream")


class PeerFailedError(Exception):
    """A peer gave no answer, or an invalid answer: the store is asked instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerGroup:
    """Nodes that serve each other files. addresses: of each node's server, "host:port"; node: the number of this node.

    token: proves that a request comes from a node of the group. ConfigError for an invalid address, node or token.
    """

    addresses: tuple[str, ...]
    node: int
    token: str

    def __post_init__(self) -> None:
        if not 0 <= self.node < len(self.addresses):
            raise ConfigError(
                f"node must be from 0 to {len(self.addresses) - 1}, the number of peers minus 1, got {self.node}"
            )
        if len(self.token) < MIN_TOKEN or not self.token.isascii() or not self.token.isprintable():
            raise ConfigError(
                f"a token of {len(self.token)} characters: peers need {MIN_TOKEN} plain characters or more, the same "
                "on all nodes, for example from secrets.token_hex()"
            )
        for address in self.addresses:
            host_and_port(address)

    def home_of(self, source: str, name: str) -> int:
        """Return the node that knows the holders of a file."""
        return xxhash.xxh3_64_intdigest(f"{source}/{name}".encode()) % len(self.addresses)


def host_and_port(address: str) -> tuple[str, int]:
    """Split "10.0.0.1:29800" or "[fd00::1]:29800" into host and port; ConfigError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not int(port) < 1 << 16:
        raise ConfigError(f"{address!r} is not the address of a peer: write host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def address_of(host: str, port: int) -> str:
    """Join host and port to an address.

    >>> address_of("10.0.0.1", 80), address_of("fd00::1", 80)
    ('10.0.0.1:80', '[fd00::1]:80')
    """
    try:
        is_v6 = ipaddress.ip_address(host).version == 6
    except ValueError:  # a name
        is_v6 = False
    return f"[{host}]:{port}" if is_v6 else f"{host}:{port}"


class PeerClient:
    """Requests of one process to the servers of the group. PeerFailedError: a peer failed, and is avoided for a while.

    Each request opens a new connection: none stays open across forks and in idle threads.
    """

    def __init__(self, group: PeerGroup):
        self.group = group
        self._where = [host_and_port(address) for address in group.addresses]
        self._avoided: dict[int, tuple[float, float]] = {}  # node -> end of the time to avoid it, and the duration

    def __reduce__(self) -> tuple[Any, ...]:
        return PeerClient, (self.group,)

    @property
    def avoided(self) -> list[int]:
        """Nodes that are avoided now."""
        now = time.monotonic()
        return [node for node, (until, _) in list(self._avoided.items()) if until > now]

    def ask(self, node: int, what: str, /, *, silent_s: float = SILENT_S, **message: Any) -> dict[str, Any]:
        """Return the answer to a question. silent_s: seconds without a byte, after which the peer has failed."""
        with closing(self._connection(node, silent_s)) as connection:
            return self._reach(node, lambda: dict(json.loads(self._send(connection, what, message).read(_CHUNK))))

    def take(self, node: int, path: Path, /, *, most: int, **message: Any) -> int | None:
        """Copy a file of a peer to `path`; return its bytes, or None if the peer does not have the file. most: bytes to
        accept.
        """
        with closing(self._connection(node)) as connection, path.open("wb") as file:
            response = self._reach(node, lambda: self._send(connection, "file", message, may_lack=True))
            if response.status == 404:
                return None
            size = left = self._reach(node, lambda: _length(response, most))
            deadline = time.monotonic() + SILENT_S + size / SLOWEST
            while left:
                piece = self._reach(node, partial(_piece, response, left, deadline))
                file.write(piece)
                left -= len(piece)
        self._avoided.pop(node, None)  # the peer serves whole files again
        return size

    def _connection(self, node: int, silent_s: float = SILENT_S) -> HTTPConnection:
        if node in self.avoided:
            raise PeerFailedError
        return HTTPConnection(*self._where[node], timeout=silent_s)

    def _send(
        self, connection: HTTPConnection, what: str, message: dict[str, Any], *, may_lack: bool = False
    ) -> HTTPResponse:
        headers = {"Authorization": f"Bearer {self.group.token}", "Connection": "close"}
        connection.request("POST", f"/{what}", json.dumps(message), headers)
        response = connection.getresponse()
        if response.status != 200 and not (may_lack and response.status == 404):
            raise HTTPException(f"it answers {response.status} {response.reason}")
        return response

    def _reach(self, node: int, call: Callable[[], T]) -> T:
        """Return the result of a call that waits for a peer; PeerFailedError if the peer fails."""
        try:
            found = call()
        except LmmsStreamError:
            raise
        except (OSError, HTTPException, ValueError, TypeError, RecursionError) as error:
            self._avoid(node, error)
            raise PeerFailedError from error
        return found

    def _avoid(self, node: int, error: Exception) -> None:
        """Avoid a peer, each time for twice as long; requests that fail together count as a single failure."""
        now = time.monotonic()
        until, pause = self._avoided.get(node, (0.0, _AVOID_S[0] / 2))
        if until > now:
            return
        pause = min(2 * pause, _AVOID_S[1])
        if node not in self._avoided:
            logger.warning(
                "peer %d (%s): %s: what it has comes from other peers or the store for %.0f s",
                node, self.group.addresses[node], str(error) or repr(error), pause,
            )  # fmt: skip
        self._avoided[node] = now + pause, pause


def _length(response: HTTPResponse, most: int) -> int:
    length = int(response.headers["Content-Length"])
    if not 0 <= length <= most:
        raise HTTPException(f"it offers {length} bytes of a file that has {most} at most")
    return length


def _piece(response: HTTPResponse, left: int, deadline: float) -> bytes:
    piece = response.read1(min(left, _CHUNK))
    if not piece:
        raise HTTPException(f"it ended {left} bytes before the end of a file")
    if time.monotonic() > deadline and len(piece) < left:
        raise HTTPException("it is too slow")
    return piece


class Peers:
    """The peers of the cache of one source, a name for the same files on all nodes.

    tally: counts failures. server: of this node, if it runs in this process; kept while its files are served.
    """

    def __init__(self, client: PeerClient, source: str, tally: FetchTally, *, server: object = None):
        self._client, self._source, self._tally, self.server = client, source, tally, server
        self._waits: dict[str, tuple[float, float, float]] = {}  # name -> start, next question, pause

    def __reduce__(self) -> tuple[Any, ...]:
        return Peers, (self._client, self._source, self._tally)

    def givers(self, name: str, *, longest_s: float) -> Iterator[int | None]:
        """Yield nodes to take a file from, the next after a failure of the one before; after the last, ask the store.

        Yield None, once, while another node fetches the file. longest_s: maximum time of this wait.
        """
        without: list[int] = []
        since, again_at, pause = self._waits.get(name, (time.monotonic(), 0.0, _PAUSE_S[0] / 2))
        if time.monotonic() < again_at:
            yield None
            return
        while time.monotonic() - since < longest_s:
            where = self._where(name, without)
            if where == "wait":
                pause = min(2 * pause, _PAUSE_S[1])
                self._waits[name] = since, time.monotonic() + pause, pause
                yield None
                return
            if not isinstance(where, int) or where in without:
                break
            self._waits.pop(name, None)
            yield where
            without.append(where)
        self._waits.pop(name, None)

    def take(self, giver: int, name: str, path: Path, *, identity: str, most: int) -> bool:
        """Return whether a node served a file with this identity; the content is not checked."""
        try:
            size = self._client.take(giver, path, most=most, source=self._source, name=name, identity=identity)
        except PeerFailedError:
            self._tally.add(peer_failures=1)
            return False
        self._tally.add(peer_bytes=size or 0)
        return size is not None

    def refuse(self, giver: int, name: str) -> bool:
        """Report that a node served wrong content, which is not used; return False."""
        self._tally.add(peer_failures=1)
        logger.warning(
            "peer %d (%s) gave a %s of another size or checksum than its index says: it is not used",
            giver, self._client.group.addresses[giver], name,
        )  # fmt: skip
        return False

    def tell(self, name: str) -> None:
        """Report to the file's home that this node has the file."""
        group = self._client.group
        home = group.home_of(self._source, name)
        if home in self._client.avoided:
            return
        try:
            self._client.ask(home, "have", source=self._source, names=[name], node=group.node)
        except PeerFailedError:
            self._tally.add(peer_failures=1)

    def _where(self, name: str, without: list[int]) -> int | str:
        group = self._client.group
        home, avoided = group.home_of(self._source, name), self._client.avoided
        if home in avoided:
            return "store"
        question: dict[str, Any] = {
            "source": self._source,
            "name": name,
            "node": group.node,
            "without": without,
            "avoid": avoided,
        }
        try:
            told = self._client.ask(home, "where", **question)["where"]
        except (PeerFailedError, KeyError):
            self._tally.add(peer_failures=1)
            return "store"
        return told if isinstance(told, int) and told in range(len(group.addresses)) else str(told)
