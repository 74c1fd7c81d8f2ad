"""Owner of a prefix in a store: an object of a live run, written again and again. Stores have no locks.

The object `run.owner.json` names the run. A run that finds another run's object waits until the other run writes the
object again, and is then refused, or until the object is too old. The age is judged by the store's clock: hosts' clocks
differ. S3 writes the object only if nobody else has written since the last look; other stores are read before and
after a write.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..errors import ObjectChangedError, ObjectMissingError, StorageError
from .retry import start_thread
from .storage import Storage

OWNER_NAME = "run.owner.json"
BEAT_S = 30.0  # between two writes of the object
NUM_MISSED = 3  # beats after which an owner has ended
_NUM_ATTEMPTS = 3
_CLOCK_S = 1.0  # stores round times to seconds
_KEYS = {"host", "pid", "place", "start_ticks", "started_s", "token"}
logger = logging.getLogger("lmms_stream")


@runtime_checkable
class _Compares(Protocol):
    """Store that compares the tag and writes in a single request; see S3Storage."""

    def write_if(self, key: str, data: bytes, *, tag: str | None) -> None: ...


class _Found(NamedTuple):
    """Object of an owner: entity tag, time of the write by the store's clock, content."""

    tag: str
    written_s: float
    content: dict[str, Any]


class Owner:
    """Owns the prefix of a store from `take` to `release`; a thread writes the object every `beat_s` seconds."""

    def __init__(self, storage: Storage, *, beat_s: float = BEAT_S):
        self._storage, self._beat_s = storage, beat_s
        self._where = f"{storage.url}/{OWNER_NAME}"
        self._about = {"host": socket.gethostname(), "started_s": time.time(), **_process()}
        self._token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._is_owned = False

    def take(self) -> str | None:
        """Own the prefix and return None, or return the description of the run that owns the prefix.

        A run that ended without `release` is waited for until its object is NUM_MISSED beats old; if this machine ran
        it, there is no wait. StorageError for a store that gives no times of writes.
        """
        first: _Found | None = None
        until_s = 0.0
        while True:
            found = self._read()
            if first is not None and found is not None and found.tag != first.tag:
                return _words(found)
            if found is None or _has_ended(found.content) or (first is not None and time.monotonic() >= until_s):
                if self._begin(found):
                    return None
            elif first is None:
                first = found
                age_s = self._store_now_s() - found.written_s
                left_s = max(0.0, NUM_MISSED * self._beat_s + _CLOCK_S - age_s)
                until_s = time.monotonic() + left_s
                if left_s > 0:
                    logger.info("%s is of %s: this run waits up to %.0f s", self._where, _words(found), left_s)
            time.sleep(self._beat_s / 10)

    def check(self) -> None:
        """Write the object again; StorageError if another run has taken the prefix over."""
        with self._lock:
            for _ in range(_NUM_ATTEMPTS):
                found = self._read() if self._is_owned else None
                if found is None or not self._is_mine(found):
                    self._is_owned = False
                    raise StorageError(
                        f"{self._where} {f'is now of {_words(found)}' if found else 'was lost'}: another run may have "
                        f"taken over after {NUM_MISSED * self._beat_s:g} s without a sign of this run, so this run "
                        "saves nothing more there: end one of the runs, or give each its own train.checkpoint_dir"
                    )
                with suppress(ObjectChangedError, ObjectMissingError):  # the answer to the last attempt was lost
                    self._write(found)
                    return
            raise StorageError(f"{self._where} was changed {_NUM_ATTEMPTS} times by other runs: end them")

    def release(self) -> None:
        """Remove the object, if it is this run's."""
        self._ends.set()
        with self._lock:
            is_owned, self._is_owned = self._is_owned, False
            try:
                found = self._read() if is_owned else None
                if found is not None and self._is_mine(found):
                    self._storage.delete(OWNER_NAME)
            except StorageError as error:
                logger.warning("%s stays, and the next run may wait for its end: %s", self._where, error)

    def _is_mine(self, found: _Found) -> bool:
        return bool(found.content["token"] == self._token)

    def _begin(self, found: _Found | None) -> bool:
        """Write the object in place of the found object; return False if another run was faster."""
        with suppress(ObjectChangedError, ObjectMissingError):
            self._write(found)
        now = self._read()
        if now is None or not self._is_mine(now):
            return False
        if not now.written_s:
            self._storage.delete(OWNER_NAME)
            raise StorageError(f"{self._storage.url} gives no times of writes: only one run may write there")
        if found is not None:
            logger.warning("%s was of %s, which has ended: this run takes over", self._where, _words(found))
        self._is_owned = True
        start_thread(self._renew, name="lmms-owner")
        return True

    def _renew(self) -> None:
        while not self._ends.wait(self._beat_s):
            try:
                self.check()
            except StorageError as error:
                if not self._ends.is_set():
                    logger.error("%s", error)
                if not self._is_owned:
                    return

    def _read(self) -> _Found | None:
        try:
            stored, data = self._storage.stat(OWNER_NAME), self._storage.read(OWNER_NAME)
        except ObjectMissingError:
            return None
        try:
            content = json.loads(data)
        except ValueError:
            content = None
        if not isinstance(content, dict) or not content.keys() >= _KEYS:
            raise StorageError(f"{self._where} is not of a run: remove or rename this object")
        return _Found(stored.tag, stored.written_s, content)

    def _write(self, found: _Found | None) -> None:
        """Write this run's object in place of the found object; ObjectChangedError if S3 has another object."""
        content = {**self._about, "token": self._token, "beat": secrets.token_hex(4)}
        data = json.dumps(content, indent=1).encode() + b"\n"
        if isinstance(self._storage, _Compares):
            self._storage.write_if(OWNER_NAME, data, tag=found.tag if found else None)
        else:
            self._storage.write(OWNER_NAME, data)

    def _store_now_s(self) -> float:
        """Return the time of the store's clock, as the time of a new object."""
        name = f".run.owner.{self._token}"
        self._storage.write(name, b"")
        now_s = self._storage.stat(name).written_s
        with suppress(StorageError):
            self._storage.delete(name)
        return now_s


def _process() -> dict[str, Any]:
    """Return the number of this process, its start, and where the number counts: the boot and the namespace."""
    try:
        place = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        place = secrets.token_hex(16)  # equal to no other place
    return {"pid": os.getpid(), "start_ticks": _start_ticks(os.getpid()), "place": place}


def _start_ticks(pid: int) -> int | None:
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(fields[18])


def _has_ended(content: dict[str, Any]) -> bool:
    """Return whether the process of an owner ran on this machine and has ended."""
    is_here = content["place"] == _process()["place"]
    return is_here and _start_ticks(int(content["pid"])) != int(content["start_ticks"])


def _words(found: _Found) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.content["started_s"]))
    return f"process {found.content['pid']} on {found.content['host']}, started at {started} UTC"
