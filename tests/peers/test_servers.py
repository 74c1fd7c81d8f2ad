"""Caches of nodes, each with a folder and a server process of its own, over one store that counts."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.plugins.peers.client import PeerClient, PeerFailedError, PeerGroup, Peers, host_and_port
from lmms_stream.plugins.peers.server import MAX_UNKNOWN, PeerServer, SharedFolder, listen
from lmms_stream.storage.cache import LocalCache
from lmms_stream.storage.eviction import CacheQuota
from lmms_stream.storage.fetch_config import FetchCounts
from lmms_stream.storage.retry import Retry

from ..proxy import FaultProxy, Rule, fault_proxy
from ..storage.counting import LoggedRemote, held

SOURCE = "source"
NAMES = tuple(f"shard.{number:05d}.mds" for number in range(12))
TOKEN = "0123456789abcdef"
LIMIT_S = 60.0


@dataclass
class Nodes:
    """Nodes of this machine. servers: of those that have one of their own, in their order."""

    store: LoggedRemote
    group: PeerGroup
    caches: list[LocalCache]
    servers: list[PeerServer]

    def fetch(self, node: int, names: Sequence[str] = NAMES) -> None:
        """Have these on a node, four at a time, and look at what came."""
        with ThreadPoolExecutor(4) as threads:
            for path, name in zip(threads.map(lambda name: self.fetch_one(node, name), names), names, strict=True):
                assert path.read_bytes() == self.store.read(name)

    def fetch_one(self, node: int, name: str) -> Path:
        path = self.caches[node].fetch(name, self.store.wanted(name))
        assert path is not None
        return path

    def tally(self, node: int) -> FetchCounts:
        return self.caches[node].tally.total

    def home_of(self, name: str) -> int:
        return self.group.home_of(SOURCE, name)

    def names_of_home(self, node: int) -> list[str]:
        return [name for name in NAMES if self.home_of(name) == node]


@contextmanager
def nodes(folder: Path, num_nodes: int, *, num_bytes: int = 1000, objects: int | None = None) -> Iterator[Nodes]:
    """objects: room for so many on each node."""
    store = LoggedRemote(folder / "downloads", num_bytes)
    listeners = [listen("127.0.0.1") for _ in range(num_nodes)]
    addresses = tuple(address for _, address in listeners)
    servers, caches = [], []
    try:
        for node, (listener, _) in enumerate(listeners):
            home = folder / f"node-{node}"
            home.mkdir(exist_ok=True)
            group = PeerGroup(addresses=addresses, node=node, token=TOKEN)
            servers.append(PeerServer.start(listener, group, {SOURCE: SharedFolder(home, frozenset(NAMES))}))
            quota = None if objects is None else CacheQuota([home], objects * num_bytes)
            cache = LocalCache(store, home, quota=quota, retry=Retry(attempts=2, timeout_s=LIMIT_S))
            cache.peers = Peers(PeerClient(group), SOURCE, cache.tally)
            caches.append(cache)
        yield Nodes(store, PeerGroup(addresses=addresses, node=0, token=TOKEN), caches, servers)
    finally:
        for server in servers:
            server.close()


@contextmanager
def behind_proxy(found: Nodes, node: int, *rules: Rule) -> Iterator[FaultProxy]:
    """A node's files come to node 1 through a proxy that breaks them; what it says as a home does not."""
    with fault_proxy(f"http://{found.group.addresses[node]}", variable="PEER_PROXY") as proxy:
        proxy.set_rules(*rules)
        addresses = list(found.group.addresses)
        addresses[node] = proxy.url.removeprefix("http://")
        cache = found.caches[1]
        cache.peers = Peers(PeerClient(PeerGroup(addresses=tuple(addresses), node=1, token=TOKEN)), SOURCE, cache.tally)
        yield proxy


def test_of_nodes_that_ask_at_once_one_asks_the_store_for_each_file(tmp_path: Path) -> None:
    with nodes(tmp_path, 3) as found:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(found.fetch, range(3)))
        assert found.store.downloads == sorted(NAMES)
        counts = [found.tally(node) for node in range(3)]
        assert sum(each.misses for each in counts) == len(NAMES)
        assert sum(each.num_bytes for each in counts) == 1000 * len(NAMES)
        assert sum(each.from_peers for each in counts) == 2 * len(NAMES)
        assert sum(each.peer_bytes for each in counts) == 2 * 1000 * len(NAMES)
        assert [each.peer_failures for each in counts] == [0, 0, 0]
        for cache in found.caches:
            assert held(cache.folder) == sorted(NAMES)


def test_what_lies_on_a_node_when_its_server_starts_is_known_to_the_others(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as found:
        found.fetch(0)
    with nodes(tmp_path, 3) as found:
        for server in found.servers:
            server.wait_announced(LIMIT_S)
        found.fetch(2)
        assert found.tally(2) == FetchCounts(from_peers=len(NAMES), peer_bytes=1000 * len(NAMES))
    assert found.store.downloads == sorted(NAMES)


def test_a_file_that_a_peer_damages_comes_from_the_store(tmp_path: Path) -> None:
    faults: tuple[dict[str, int], ...] = (
        {"flip_at": 10}, {"shorten_to": 999}, {"reset_after": 500}, {"cut_after": 500}, {"status": 500}
    )  # fmt: skip
    with nodes(tmp_path, 2) as found:
        found.fetch(0)
        for number, fault in enumerate(faults):
            with behind_proxy(found, 0, Rule(path="/file", method="POST", **fault)):  # type: ignore[arg-type]
                found.fetch(1, NAMES[number : number + 1])
            assert found.tally(1).peer_failures == number + 1
        assert found.store.downloads == sorted([*NAMES, *NAMES[: len(faults)]])
        assert found.tally(1).from_peers == 0
        assert held(found.caches[1].folder) == sorted(NAMES[: len(faults)])
        assert [each for each in found.caches[1].folder.iterdir() if each.suffix == ".tmp"] == []


def test_bytes_that_rot_on_the_disk_of_a_peer_are_found_out(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as found:
        found.fetch(0)
        path = found.caches[0].folder / NAMES[3]
        stat = path.stat()
        with path.open("r+b") as file:
            file.write(b"rotten")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        found.fetch(1)
        assert found.store.downloads == sorted([*NAMES, NAMES[3]])
        assert found.tally(1).peer_failures == 1


def test_a_peer_that_is_killed_in_the_middle_of_a_file_costs_no_more_than_it(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as found:
        (name, *_) = found.names_of_home(1)
        found.fetch(0, [name])
        rule = Rule(path="/file", method="POST", trickle_s=0.2)
        with behind_proxy(found, 0, rule) as proxy, ThreadPoolExecutor(1) as threads:
            fetched = threads.submit(found.fetch_one, 1, name)
            proxy.wait_for("/file", method="POST")
            os.kill(found.servers[0].pid, signal.SIGKILL)
            proxy.set_listening(False)
            path = fetched.result(LIMIT_S)
        assert path.read_bytes() == found.store.read(name)
        assert found.store.downloads == [name, name]
        assert found.tally(1).peer_failures >= 1


def test_peers_that_hang_cost_seconds_and_are_left_alone(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as found:
        found.fetch(0)
        os.kill(found.servers[0].pid, signal.SIGSTOP)
        try:
            found.fetch(1)
        finally:
            os.kill(found.servers[0].pid, signal.SIGCONT)
        assert found.store.downloads == sorted(2 * NAMES)
        assert 1 <= found.tally(1).peer_failures <= 8  # each thread waits for it once, of four
        assert found.tally(1).misses == len(NAMES)


def test_a_home_that_asks_one_that_hangs_is_not_given_up(tmp_path: Path) -> None:
    with nodes(tmp_path, 3) as found:
        (name, *_) = found.names_of_home(0)
        hanging = PeerClient(PeerGroup(addresses=found.group.addresses, node=2, token=TOKEN))
        assert hanging.ask(0, "where", source=SOURCE, name=name, node=2, without=[], avoid=[]) == {"where": "store"}
        os.kill(found.servers[2].pid, signal.SIGSTOP)
        try:
            found.fetch(1, [name])
        finally:
            os.kill(found.servers[2].pid, signal.SIGCONT)
        assert found.store.downloads == [name]
        assert found.tally(1).peer_failures == 0


def test_requests_that_fail_together_are_one_failure_of_a_peer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nodes(tmp_path, 2) as found:
        client = PeerClient(PeerGroup(addresses=found.group.addresses, node=0, token=TOKEN))
        os.kill(found.servers[1].pid, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(4) as threads:
                asked = [threads.submit(client.ask, 1, "have", source=SOURCE, names=[], node=0) for _ in range(4)]
                assert all(isinstance(each.exception(LIMIT_S), PeerFailedError) for each in asked)
        finally:
            os.kill(found.servers[1].pid, signal.SIGCONT)
        assert client.avoided == [1]
        assert {pause for _, pause in client._avoided.values()} == {30}
        assert "comes from other peers or the store for 30 s" in caplog.text


def test_who_asks_the_store_and_dies_is_not_waited_for(tmp_path: Path) -> None:
    with nodes(tmp_path, 3) as found:
        (name, *_) = found.names_of_home(2)
        dead = PeerClient(PeerGroup(addresses=found.group.addresses, node=0, token=TOKEN))
        assert dead.ask(2, "where", source=SOURCE, name=name, node=0, without=[], avoid=[]) == {"where": "store"}
        assert dead.ask(2, "where", source=SOURCE, name=name, node=1, without=[], avoid=[]) == {"where": "wait"}
        found.fetch(1, [name])
        assert found.store.downloads == [name]


def test_a_download_that_goes_on_is_waited_for_and_one_of_this_process_too(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as found:
        name, begun, goes_on = NAMES[0], threading.Event(), threading.Event()
        store = found.store

        class Slow(LoggedRemote):
            def download(self, key: str, path: Path) -> None:
                begun.set()
                assert goes_on.wait(LIMIT_S)
                super().download(key, path)

        found.caches[0].storage = Slow(store.log)
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(found.fetch_one, 0, name)
            assert begun.wait(LIMIT_S)
            assert found.caches[1].fetch(name, store.wanted(name), wait=False) is None  # others may be had meanwhile
            second = threads.submit(found.fetch_one, 1, name)
            time.sleep(2.5)  # the home has looked at node 0 by then
            assert not second.done()
            goes_on.set()
            for each in (first, second):
                each.result(LIMIT_S)
        assert store.downloads == [name]


def test_what_a_limited_cache_has_let_go_comes_from_the_store(tmp_path: Path) -> None:
    with nodes(tmp_path, 2, objects=3) as found:
        for name in NAMES:
            found.fetch(0, [name])
        kept = held(found.caches[0].folder)
        assert len(kept) == 3
        for name in NAMES:
            found.fetch(1, [name])
            assert len(held(found.caches[1].folder)) <= 3
        assert found.tally(1).from_peers == 3
        assert found.store.downloads == sorted([*NAMES, *(set(NAMES) - set(kept))])
        assert found.tally(1).peer_failures == 0


def ask(address: str, what: str, message: object, *, token: str = TOKEN) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"http://{address}/{what}", json.dumps(message).encode(), {"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_who_does_not_know_the_token_is_told_nothing(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as found:
        found.fetch(0, NAMES[:1])
        message = {"source": SOURCE, "name": NAMES[0], "identity": NAMES[0], "node": 0, "without": [], "avoid": []}
        address = found.group.addresses[0]
        assert ask(address, "file", message) == (200, found.store.read(NAMES[0]))
        for token in ("", TOKEN[:-1], TOKEN.upper(), TOKEN + "0", "t\xf6k\xe9n"):
            for what in ("file", "where", "have", "progress", "other"):
                assert ask(address, what, message, token=token) == (403, b"")


def test_peers_of_another_token_get_on_without_each_other(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as found:
        found.fetch(0)
        cache = found.caches[1]
        others = PeerGroup(addresses=found.group.addresses, node=1, token="f" * 16)
        cache.peers = Peers(PeerClient(others), SOURCE, cache.tally)
        found.fetch(1)
        assert cache.tally.total.misses == len(NAMES)
        assert cache.tally.total.peer_failures >= 1


def test_only_files_that_the_index_names_are_given(tmp_path: Path) -> None:
    lock = f".{NAMES[0]}.lock"
    names = ["../secret", "/etc/hostname", f"../node-0/{NAMES[0]}", f"./{NAMES[0]}", lock, "other", "", 3, None]
    with nodes(tmp_path, 1) as found:
        found.fetch(0, NAMES[:1])
        (tmp_path / "secret").write_text("secret")
        (found.caches[0].folder / "other").write_text("other")
        address = found.group.addresses[0]
        for name in names:
            message = {"source": SOURCE, "name": name, "identity": name, "node": 0, "without": [], "avoid": []}
            assert ask(address, "file", message)[0] == 404
            assert ask(address, "progress", message) == (200, b"{}")
            assert ask(address, "where", message) == (200, b'{"where": "store"}')
        message = {"source": SOURCE, "name": NAMES[0], "identity": NAMES[0]}
        assert ask(address, "file", message)[0] == 200
        assert ask(address, "file", {**message, "source": "other"})[0] == 404
        assert ask(address, "file", {**message, "identity": "other"})[0] == 404


def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as found:
        address = found.group.addresses[0]
        for what, message in (
            ("where", {"source": SOURCE, "name": NAMES[0], "node": 1, "without": [], "avoid": []}),
            ("where", {"source": SOURCE, "name": NAMES[0], "node": "0", "without": [], "avoid": []}),
            ("where", {"source": SOURCE, "name": NAMES[0], "node": 0, "without": [7], "avoid": []}),
            ("have", {"source": SOURCE, "names": 3, "node": 0}),
            ("other", {"source": SOURCE}),
            ("file", []),
        ):
            assert ask(address, what, message)[0] == 400
        host, port = host_and_port(address)
        with closing(HTTPConnection(host, port, timeout=LIMIT_S)) as connection:
            connection.putrequest("POST", "/have")
            connection.putheader("Authorization", f"Bearer {TOKEN}")
            connection.putheader("Content-Length", str(2 << 20))
            connection.endheaders()
            assert connection.getresponse().status == 413
        for length, body in (
            ("ten", b""), ("-1", b""), ("", b""), ("1_0", b""), ("\xb2", b""), ("9" * 5000, b""), (None, b""),
            ("90000", b"[" * 90_000), ("900", b"9" * 900), ("4", b"null"), ("4", b"\xff\xff\xff\xff"),
        ):  # fmt: skip
            with closing(HTTPConnection(host, port, timeout=LIMIT_S)) as connection:
                connection.putrequest("POST", "/have")
                connection.putheader("Authorization", f"Bearer {TOKEN}")
                if length is not None:
                    connection.putheader("Content-Length", length.encode("latin-1"))
                connection.endheaders(body)
                assert connection.getresponse().status == 400
        found.fetch(0)


def test_strangers_who_hold_connections_open_keep_no_peer_out(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as found, ExitStack() as strangers:
        address = host_and_port(found.group.addresses[0])
        held = [strangers.enter_context(socket.create_connection(address, LIMIT_S)) for _ in range(MAX_UNKNOWN + 20)]
        message = {"source": SOURCE, "name": NAMES[0], "node": 0, "without": [], "avoid": []}
        assert ask(found.group.addresses[0], "where", message)[0] == 200
        assert [each.recv(1) for each in held[:20]] == [b""] * 20  # the oldest were ended
        assert psutil.Process(found.servers[0].pid).num_threads() < MAX_UNKNOWN + 15


def test_more_peers_than_that_at_the_same_time_are_all_answered(tmp_path: Path) -> None:
    """They connect first, so that the server has all of them before they show their token."""
    text = json.dumps({"source": SOURCE, "name": NAMES[0], "node": 0, "without": [], "avoid": []})
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with nodes(tmp_path, 1) as found, ExitStack() as peers:
        host, port = host_and_port(found.group.addresses[0])
        asked = [
            peers.enter_context(closing(HTTPConnection(host, port, timeout=LIMIT_S))) for _ in range(2 * MAX_UNKNOWN)
        ]
        for each in asked:
            each.connect()
        for each in asked:
            each.request("POST", "/where", text, headers)
        assert {each.getresponse().status for each in asked} == {200}


def test_a_file_that_was_changed_since_it_was_checked_is_not_given(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as found:
        found.fetch(0)
        (found.caches[0].folder / NAMES[0]).write_bytes(b"changed")
        found.fetch(1)
        assert found.store.downloads == sorted([*NAMES, NAMES[0]])
        assert found.tally(1).peer_failures == 0


def test_a_client_takes_no_more_bytes_than_a_file_has(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as found:
        found.fetch(0, NAMES[:1])
        client = PeerClient(PeerGroup(addresses=found.group.addresses, node=1, token=TOKEN))
        with pytest.raises(PeerFailedError):
            client.take(0, tmp_path / "file", most=999, source=SOURCE, name=NAMES[0], identity=NAMES[0])
        assert client.avoided == [0]
        assert pickle.loads(pickle.dumps(client)).avoided == []


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as found:
        pid = found.servers[0].pid
        os.kill(pid, signal.SIGTERM)  # which its rank takes for the order to save and stop: it still reads
        found.fetch(0)
        process = found.servers[0]._process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"node": 2}, "node must be from 0 to 1, the number of peers minus 1, got 2"),
        ({"token": "short"}, "a token of 5 characters: peers need 16 plain characters or more"),
        ({"addresses": ("10.0.0.1:80", "10.0.0.2")}, r"'10\.0\.0\.2' is not the address of a peer: write host:port"),
        ({"addresses": ("10.0.0.1:80", "10.0.0.2:99999")}, r"'10\.0\.0\.2:99999' is not the address of a peer"),
    ],
)
def test_groups_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"addresses": ("10.0.0.1:80", "[fd00::1]:80"), "node": 0, "token": TOKEN}
    PeerGroup(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        PeerGroup(**(given | settings))  # type: ignore[arg-type]


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"peers cannot be served at 192\.0\.2\.1:0 \(.*\): name an address of this"):
        listen("192.0.2.1")
