"""State of a conversion between its runs: identity, encoded units, and written shards.

The state is in a work folder of this machine, under a lock. Meanwhile a file at the target names the unfinished
conversion and its owner: no other conversion writes to this target, and readers do not take it for a dataset.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, filterfalse, islice
from pathlib import Path
from typing import Any

import xxhash

from ...errors import ConfigError, DataError, LmmsStreamError, StorageError, WorkerError
from ...mds.index import DATASET_NAME, INDEX_NAME, is_safe_name, parse_index, read_if_there
from ...mds.lengths import lengths_names
from ...mds.measuring import write_json
from ...processes.pool import Mark
from ...processors.not_shown import loses_calls
from ...storage.cache import home_folder
from ...storage.failures import disk_error
from ...storage.local import LocalStorage
from ...storage.locks import locked
from ...storage.storage import Storage
from ..stored.appending import finish_growth
from ..stored.catalog import own_files, parse_dataset
from .shards import shard_name

_HALF_WRITTEN = re.compile(
    r"\.(shard\.\d{5,}\.mds(\.\w+)?|(index|dataset|unfinished|growing)\.json|provenance\.(npy|json)|rejects\.jsonl)"
    r"\.\d+\.tmp"
)
_ABOUT_NAME = "conversion.json"
MAY_CHANGE = ("on_error", "on_dropped")  # between runs: units that ended at a bad row are not kept
_FIRST_ANNOUNCED = 16  # shards in the first claim; each time they are used up, the claim doubles


class RowError(DataError):
    """A row does not fit. Finished work is kept: the command resumes once rows that do not fit are skipped."""


@dataclass(slots=True)
class WorkFolder:
    """Work folder of a conversion, begun by this run or an earlier run.

    replaced: for each target, files of the dataset that the finished conversion replaces. done: entries of index.json
    of the shards in the target, by output and shard number.
    """

    folder: Path
    targets: Sequence[Storage]
    owner: dict[str, Any]
    replaced: Sequence[Sequence[str]]
    done: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    _announced: dict[int, int] = field(default_factory=dict)

    @property
    def units(self) -> Path:
        return self.folder / "units"

    @property
    def staging(self) -> Path:
        return self.folder / "staging"

    @property
    def scratch(self) -> Path:
        return self.folder / "sources"

    @property
    def is_empty(self) -> bool:
        """Whether a later run would find no finished work."""
        return not self.done and not any(self.units.glob("*.npz"))

    @property
    def marks(self) -> list[Mark]:
        """Files by which a worker checks its view of the folders to write to."""
        owner = self.owner["id"].encode()
        remedy = "name a folder that all nodes share with --work"
        found = [Mark(path=self.folder / _ABOUT_NAME, holds=owner, remedy=remedy)]
        remedy = "convert to a folder that all nodes share, or to an object store"
        for target in self.targets:
            if isinstance(target, LocalStorage):
                found.append(Mark(path=target.folder.absolute() / UNFINISHED_NAME, holds=owner, remedy=remedy))
        return found

    @property
    def _journal(self) -> Path:
        return self.folder / "shards.jsonl"

    def keep_shard(self, output: int, number: int, entry: dict[str, Any]) -> None:
        """Record a shard in the target: no run makes the shard again."""
        self.done[output, number] = entry
        with self._journal.open("ab") as file:
            file.write(json.dumps([output, number, entry]).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def announce(self, output: int, number: int) -> None:
        """Add a shard to the target's claim before it is made: --overwrite removes the shards of the claim."""
        if number >= self._announced.get(output, 0):
            self._announced[output] = max(_FIRST_ANNOUNCED, 2 * number)
            self.check_claims()
            self._claim(output)

    def release(self, output: int) -> None:
        """The target is a whole dataset."""
        try:
            self.targets[output].delete(UNFINISHED_NAME)
        except StorageError:  # a store without deletion
            self.targets[output].write(UNFINISHED_NAME, b"{}")

    def check_claims(self) -> None:
        """Raise StorageError if another machine has begun a conversion at a target since, with --overwrite."""
        for target in self.targets:
            claim = read_claim(target)
            if claim is None or claim.get("id") != self.owner["id"]:
                by = f"on {claim['host']}" if claim and "host" in claim else "and ended"
                raise StorageError(
                    f"{target.url}: another conversion to this target was started {by} after this conversion, and "
                    "shards of both have the same names, so the target may hold a mixture: after both end, convert "
                    "again with --overwrite, or choose another target"
                )

    def _claim(self, output: int) -> None:
        claim = self.owner | {"num_shards": self._announced.get(output, 0), "replaced": list(self.replaced[output])}
        write_json(self.targets[output], UNFINISHED_NAME, claim)

    def read_journal(self) -> None:
        if not self._journal.exists():
            return
        data = self._journal.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):  # the last line was cut short by a kill
            self._journal.write_bytes(whole)
        for line in whole.splitlines():
            output, number, entry = json.loads(line)
            self.done[output, number] = entry
            self._announced[output] = max(self._announced.get(output, 0), number + 1)


def work_folder(url: str, base: Path | None) -> Path:
    """Work folder of a conversion to `url`. base: replaces the system's temporary folder."""
    return (base.absolute() / home_folder(url).name if base else home_folder(url)) / "convert-work"


@contextmanager
def only_writer(url: str) -> Iterator[None]:
    """StorageError while another process of this machine converts to a target."""
    home = home_folder(url)
    home.mkdir(parents=True, exist_ok=True)
    with locked(home / "convert.lock", timeout_s=0) as lock:
        if lock is None:
            raise StorageError(f"another process converts to {url}: wait until it ends, or choose another target")
        yield


@contextmanager
def open_work(
    targets: Sequence[Storage],
    identity: Mapping[str, Any],
    *,
    files: Sequence[str],
    extension: str = "",
    base: Path | None = None,
    overwrite: bool = False,
) -> Iterator[WorkFolder]:
    """Open the work on `targets` (the first names it), new or resumed; remove it if the block ends without an error.

    A DataError or a ConfigError removes the written files, too; a WorkerError or a RowError only if no work is
    finished.

    identity: JSON values that decide the output. files: names of files written in addition to shards. extension:
    follows the shards' names. base: parent of the work folder (default: next to the target's cache). overwrite: start
    from the beginning. Files of an unfinished conversion are removed; a dataset stays until `commit` replaces it. Raise
    StorageError if another process converts to the same target, or if the target holds other content.
    """
    folder = work_folder(targets[0].url, base)
    try:
        with only_writer(targets[0].url):
            for target in targets:
                finish_growth(target)
            owner: dict[str, Any] = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "work": str(folder)}
            owner |= {"files": list(files), "extension": extension}
            work = _begun(folder, targets, identity, owner, overwrite=overwrite)
            for each in (work.units, work.staging, work.scratch):
                each.mkdir(parents=True, exist_ok=True)
            for left in (*work.units.glob("*.tmp"), *work.staging.glob("*.tmp")):  # from a killed run
                left.unlink(missing_ok=True)
            try:
                yield work
            except (DataError, ConfigError, WorkerError) as error:
                if isinstance(error, (WorkerError, RowError)) and not work.is_empty:
                    raise
                # The same command would fail again, or has no work to resume: remove everything.
                shutil.rmtree(folder, ignore_errors=True)
                for target in targets:
                    remove_unreadable(target)
                    target.delete(UNFINISHED_NAME)
                raise
            shutil.rmtree(folder, ignore_errors=True)
    except LmmsStreamError:
        raise
    except OSError as error:
        raise disk_error(str(folder), error) from error


def _begun(
    folder: Path, targets: Sequence[Storage], identity: Mapping[str, Any], owner: dict[str, Any], *, overwrite: bool
) -> WorkFolder:
    about = folder / _ABOUT_NAME
    before = json.loads(about.read_bytes()) if about.exists() else None
    for target in targets:
        _remove_half_written(target)
    claims = [_look(target) for target in targets]
    replaced: list[list[str]] = [[] for _ in targets]
    if overwrite:
        # Remove first: the journal lists shards of the target.
        shutil.rmtree(folder, ignore_errors=True)
        replaced = [remove_unreadable(target) for target in targets]
        claims = []
    if any(claims):
        _check_claims(claims, targets, before, identity)
        assert before is not None
        work = WorkFolder(folder, targets, before["owner"], before["replaced"])
        work.read_journal()
        for output, claim in enumerate(claims):
            work._announced[output] = (claim or {}).get("num_shards", 0)
            if not claim:
                work._claim(output)
        return work
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    temporary = about.with_suffix(".tmp")
    conversion = {"owner": owner, "asked": identity, "replaced": replaced}
    temporary.write_bytes(json.dumps(conversion, sort_keys=True).encode())
    temporary.replace(about)
    work = WorkFolder(folder, targets, owner, replaced)
    for output in range(len(targets)):
        work._claim(output)
    return work


def _remove_half_written(target: Storage) -> None:
    """Remove half-written files of a killed conversion; the caller holds the lock."""
    if isinstance(target, LocalStorage):
        for folder in (target.folder, target.folder / "_lmms"):
            for path in folder.glob(".*.tmp"):
                if _HALF_WRITTEN.fullmatch(path.name):
                    path.unlink(missing_ok=True)


def _look(target: Storage) -> dict[str, Any] | None:
    """Return the claim or description at a target, if any; StorageError for a dataset of another program."""
    for name in (UNFINISHED_NAME, DATASET_NAME):  # a run killed at the very end leaves both
        described = read_described(target, name)
        if described:
            return described | {"is_finished": name == DATASET_NAME}
    if read_if_there(target, INDEX_NAME) is not None:
        raise StorageError(
            f"{target.url} holds an {INDEX_NAME} not written by a conversion: choose another target, or remove it"
        )
    return None


def _check_claims(
    claims: Sequence[Mapping[str, Any] | None], targets: Sequence[Storage], before: Any, identity: Mapping[str, Any]
) -> None:
    for claim, target in zip(claims, targets, strict=True):
        if claim is not None and claim["is_finished"]:
            raise StorageError(f"{target.url} holds a dataset already: choose another target, or pass --overwrite")
        if claim is not None and (before is None or before["owner"]["id"] != claim["id"]):
            raise StorageError(
                f"{target.url} holds an unfinished conversion, which was begun on {claim['host']} with its work in "
                f"{claim['work']}: run the same command there, or pass --overwrite to start over"
            )
    then, now = before["asked"], json.loads(json.dumps(identity))
    changed = sorted(name for name in {*then, *now} - {*MAY_CHANGE} if then.get(name) != now.get(name))
    if "units" in changed:
        raise StorageError(
            f"{targets[0].url} holds an unfinished conversion of another release, which divided the sources "
            "differently: run the command with that release, or pass --overwrite to start over"
        )
    if "rows" in changed:
        raise StorageError(
            f"{targets[0].url} holds an unfinished conversion of another release, which stored rows differently: run "
            "the command with that release, or pass --overwrite to start over"
        )
    if changed == ["code"]:
        code = before["asked"].get("code", {})
        names = sorted(name for name in identity["code"] if identity["code"][name] != code.get(name))
        raise StorageError(
            f"{targets[0].url} holds an unfinished conversion with other code of {', '.join(names)}: restore that code "
            "and run the same command, or pass --overwrite to start over"
        )
    if changed:
        raise StorageError(
            f"{targets[0].url} holds an unfinished conversion with other {', '.join(changed)}: run the original "
            "command, or pass --overwrite to start over"
        )


def from_anywhere(target: Storage) -> Storage:
    """Return the store for a worker in another folder."""
    return LocalStorage(target.folder.absolute()) if isinstance(target, LocalStorage) else target


# Whether a conversion was finished before. targets + identity -> the existing datasets.

_CHANGES_NOTHING = ("unit_bytes", "units", *MAY_CHANGE)  # no effect on the output while no row is rejected
_OF_ONE_CONVERSION = (  # options of each conversion that grows a dataset
    "sources", "format", "quote", "delimiter", "encoding", "header", "limit", "shuffle_seed", "split_seed",
    "shard_bytes", "compression", "num_shards", "samples_per_shard", "drop", "version of lmms_stream",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A finished dataset. description: its dataset.json. num_tokens: None without a measuring processor."""

    description: Mapping[str, Any]
    num_tokens: int | None


def digest_of(identity: Mapping[str, Any]) -> str:
    """Digest of an identity, equal for conversions with the same output."""
    values = {name: value for name, value in identity.items() if name not in _CHANGES_NOTHING}
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def options_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that decide how a row is stored, which may not change when a dataset grows.

    Options for reading files, number and order of rows, and filling shards are left out.
    """
    values = {name: value for name, value in identity.items() if name not in (*_CHANGES_NOTHING, *_OF_ONE_CONVERSION)}
    return dict(json.loads(json.dumps(values)))


def place_of(name: str) -> str:
    """Place of a source, independent of the working directory: its URL, or its absolute path."""
    return name if "://" in name or name.startswith("hf:") else str(Path(name).absolute())


def finished_before(targets: Sequence[Storage], identity: Mapping[str, Any]) -> list[Finished] | None:
    """Return the datasets at all targets if they have this identity; None otherwise, and if a dataset is unfinished."""
    finished = []
    for target in targets:
        described = read_described(target, DATASET_NAME)
        if not described or described.get("asked") != digest_of(identity) or read_claim(target) is not None:
            return None
        finished.append(Finished(description=described, num_tokens=_num_tokens(target, described)))
    if identity["on_error"] == "fail" and any(each.description.get("num_rejected") for each in finished):
        return None
    if identity["on_dropped"] == "error" and any(
        loses_calls(each.description.get("not_shown", {})) for each in finished
    ):
        return None
    return finished


def _num_tokens(target: Storage, described: Mapping[str, Any]) -> int | None:
    for fingerprint in described["lengths"]:
        data = read_if_there(target, lengths_names(fingerprint)[1])
        if data is not None:
            return int(json.loads(data)["num_tokens"])
    return None


# Files of conversions at a target, and the old files that readers still use during a replacement.
#
# A dataset stays unchanged until its replacement is complete: new shards take unused numbers, and index.json, which
# every reader begins with, is overwritten at once. Then the rest of the old dataset is removed.

UNFINISHED_NAME = "_lmms/unfinished.json"
_SHARD = re.compile(r"shard\.(\d{5,})\.mds(\.\w+)?")


def is_shard(name: str) -> bool:
    """Return whether a file in any folder has the name of a shard."""
    return _SHARD.fullmatch(name.rpartition("/")[2]) is not None


def free_numbers(replaced: Iterable[str]) -> Iterator[int]:
    """Yield numbers for the files of new shards: 0, 1, 2, … without the numbers of replaced files.

    >>> list(islice(free_numbers(["index.json", "shard.00000.mds", "shard.00002.mds.zstd"]), 3))
    [1, 3, 4]
    """
    found = (_SHARD.fullmatch(name) for name in replaced)
    taken = {int(each[1]) for each in found if each}
    return filterfalse(taken.__contains__, count())


def remove_unreadable(target: Storage) -> list[str]:
    """Remove the files of conversions at a target that no reader uses; return the names of the files that stay.

    Files of a finished dataset stay, also of a dataset that a killed command was about to replace; no file of an
    unfinished first conversion stays. The claim stays: the caller removes or overwrites it later.
    """
    described, claim = read_if_there(target, DATASET_NAME), read_claim(target)
    ours = set() if claim is None else _claimed(claim)
    kept: set[str] = set()
    if described is not None:
        kept = {DATASET_NAME, *own_files(parse_dataset(described, source=f"{target.url}/{DATASET_NAME}"))}
    elif claim is not None and claim.get("replaced"):
        index = read_if_there(target, INDEX_NAME)
        listed = parse_index(index, source=f"{target.url}/{INDEX_NAME}") if index is not None else []
        files = {info.zip_name or info.name for info in listed}
        kept = {name for name in ours if name in files or not is_shard(name)}
    for name in sorted(ours - kept):
        target.delete(name)
    if kept and claim is None:
        # No claim exists; a store that cannot delete raises now, not at the end.
        target.delete(UNFINISHED_NAME)
    return sorted(kept)


def read_claim(target: Storage) -> dict[str, Any] | None:
    """Return the claim of an unfinished conversion at a target; None without a claim."""
    return read_described(target, UNFINISHED_NAME) or None


def read_described(target: Storage, name: str) -> dict[str, Any] | None:
    """Return a JSON object at the target, whose file names were checked; None if the file is missing."""
    data = read_if_there(target, name)
    if data is None:
        return None
    try:
        described = dict(json.loads(data))
        files = [*described.get("files", ()), *described.get("replaced", ()), f"shard{described.get('extension', '')}"]
    except (ValueError, TypeError, AttributeError) as error:
        raise StorageError(f"{target.url}/{name} is damaged ({error}): remove it, or choose another target") from error
    if not all(map(is_safe_name, files)):
        raise StorageError(f"{target.url}/{name} names files outside the dataset: remove it, or choose another target")
    return described


def _claimed(claim: Mapping[str, Any]) -> set[str]:
    """Files possibly written by an unfinished conversion, and files to be replaced by it."""
    replaced = claim.get("replaced", [])
    numbers = islice(free_numbers(replaced), claim["num_shards"])
    return {*claim["files"], *replaced, *(shard_name(number) + claim["extension"] for number in numbers)}
