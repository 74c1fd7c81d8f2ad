"""MosaicML Streaming's writers: samples in order -> equal shards and index.json, byte for byte.

`lmms-stream convert` makes datasets from files, in several processes, and resumes after a kill. These writers are for
programs that make their own samples.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checks import local_path, parse_bytes
from ...errors import ConfigError, DataError, ShardError, TargetExistsError, did_you_mean
from ...mds.index import DATASET_NAME, HASHES, INDEX_NAME, SPLIT_FORMATS, new_digest, parse_index, read_if_there
from ...processes.bar import terminal_bar
from ...storage.failures import disk_errors
from ...storage.local import LocalStorage
from ...storage.locks import give_name, temporary_name
from ...storage.retry import DEFAULT_RETRY, Retry
from ...storage.storage import Storage, is_folder, open_storage
from ...types import Sample
from ..stored.catalog import own_files, parse_dataset
from .encoding import MAX_SHARD_BYTES, ShardFormat, check_compression, compress, compression_extension, index_json
from .shards import shard_name

DEFAULT_SIZE_LIMIT = 1 << 26
_OURS = re.compile(rf"shard\.\d{{5,}}\.({'|'.join(('mds', *SPLIT_FORMATS))})(\.meta)?(\.\w+)?")
_OWN_FOLDERS = "make a writer in each process, with a folder of its own, and join these by lmms_stream.merge_index"
_WAITING_PER_THREAD = 4  # files waiting for upload
_TEXT_TYPES: dict[str, type] = {"str": str, "int": int, "float": float}
# str() of a subclass (True, a member of an enum) may return another text.
_TEXTS: dict[str, Callable[[Any], str]] = {"str": str.__str__, "int": int.__repr__, "float": float.__repr__}


class Writer:
    """Writes the samples of a dataset: `with MDSWriter(…) as writer: writer.write(sample)`, or ends with `finish()`.

    out: a folder; a URL, to which shards are uploaded from a temporary folder; or a pair of folder and URL. keep_local:
    keep the files in the folder of a pair after the upload. compression: "zstd", "zstd:7", "gz", "bz2", "br", "snappy".
    hashes: kinds of checksums, in sorted order. size_limit: bytes of a shard before compression, or a text such as
    "64mb"; None for MDS's limit of 4 GiB. progress_bar: show the uploads on a terminal. max_workers: upload threads.
    retry: attempts of an upload after the first. exist_ok: delete the existing dataset.

    The index is written last, and not at all if the `with` block raises, so a partial dataset is never read as
    complete. Threads may share a writer; each process needs its own writer and folder. Raise DataError for a sample
    that does not fit the columns (the sample is skipped; writing may continue), ConfigError, StorageError,
    TargetExistsError.
    """

    format: str

    def __init__(
        self,
        *,
        columns: Mapping[str, str],
        out: str | Path | tuple[str | Path, str | Path],
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = DEFAULT_SIZE_LIMIT,
        progress_bar: bool = False,
        max_workers: int | None = None,
        retry: int = 2,
        exist_ok: bool = False,
        **unknown: Any,
    ):
        for name in unknown:
            hint = did_you_mean(name, Writer.__init__.__kwdefaults__ or ())
            raise ConfigError(f"Invalid Writer argument {name!r}: {hint}")
        self.columns = dict(columns)
        self.keep_local = keep_local
        self.compression = compression or None
        check_compression(self.compression)
        self.hashes = _checked_hashes(hashes or [])
        self.size_limit = _checked_limit(size_limit)
        self.shards: list[dict[str, Any]] = []
        self._check_columns()
        attempts = _retry(retry)
        local, remote = out if isinstance(out, tuple) else (out, None) if is_folder(out) else (None, out)
        self._is_temporary = local is None
        self.local = tempfile.mkdtemp(prefix="lmms_stream-writer-") if local is None else _whole(local)
        self.remote = None if remote is None else _whole(remote) if is_folder(remote) else str(remote)
        if self.remote is not None and Path(self.local).resolve() == Path(self.remote).resolve():
            raise ConfigError(f"out is {self.local} twice, and a pair has two places: name it once")
        self._folder = LocalStorage(Path(self.local))
        self._store = None if self.remote is None else open_storage(self.remote, retry=attempts)
        with disk_errors(self.local):
            Path(self.local).mkdir(parents=True, exist_ok=True)
            names = [path.name for path in Path(self.local).iterdir()]
        _make_room(self._folder, names, exist_ok=exist_ok)
        if self._store is not None:
            _make_room(self._store, [], exist_ok=exist_ok)
        self._samples: list[bytes] = []
        self._num_bytes = 0
        self._is_finished = self._is_whole = False
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._uploads: set[Future[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers)
        self._bar = ExitStack()
        shown = progress_bar and self._store is not None
        title = f"uploading to {self.remote}"
        self._advance = self._bar.enter_context(terminal_bar(title, total=0, unit="files")) if shown else None

    # Methods of a format

    def _check_columns(self) -> None:
        raise NotImplementedError

    def encode_sample(self, sample: Sample) -> bytes:
        """Return the bytes of a sample; DataError for a sample that does not fit the columns."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return a shard's settings in index.json."""
        return {
            "version": 2,
            "format": self.format,
            "compression": self.compression,
            "hashes": self.hashes,
            "size_limit": self.size_limit,
        }

    def _parts(self) -> dict[str, bytes]:
        """The files of the shard of the samples at hand, "data" and perhaps "meta"."""
        raise NotImplementedError

    @property
    def _empty_bytes(self) -> int:
        """Bytes of a shard without samples."""
        return 0

    _bytes_beside = 0  # bytes per sample in addition to the sample

    # Writing

    def write(self, sample: Sample) -> None:
        """Write a sample; its shard is written when full, or by `finish`."""
        self._check_process()
        data = self.encode_sample(sample)
        num_bytes = len(data) + self._bytes_beside
        limit = self.size_limit or MAX_SHARD_BYTES
        with self._lock:
            if self._is_finished:
                raise ConfigError(f"a sample for {self.remote or self.local}, which is finished: write all before")
            self._raise_failures()
            if self._samples and limit < self._empty_bytes + self._num_bytes + num_bytes:
                self.flush_shard()
            self._samples.append(data)
            self._num_bytes += num_bytes

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(
                f"the writer of {self.remote or self.local} belongs to process {self._pid}, which would not see the "
                f"samples of this process: {_OWN_FOLDERS}"
            )

    def flush_shard(self) -> None:
        """Write a shard of the samples at hand."""
        self._raise_failures()
        entry: dict[str, Any] = {"samples": len(self._samples)}
        stem = shard_name(len(self.shards), self.format)
        for part, data in self._parts().items():
            name = stem if part == "data" else f"{stem}.{part}"
            entry[f"raw_{part}"], entry[f"zip_{part}"] = self._described(data, name), None
            if self.compression:
                data = compress(self.compression, data)
                name = f"{name}.{compression_extension(self.compression)}"
                entry[f"zip_{part}"] = self._described(data, name)
            self._write(name, data)
            self._upload(name)
        self.shards.append(entry | self.get_config())
        self._samples, self._num_bytes = [], 0

    def _write(self, name: str, data: bytes) -> None:
        """Write a new file of the dataset."""
        path = Path(self.local, name)
        temporary = temporary_name(path)
        with disk_errors(str(path)):
            try:
                temporary.write_bytes(data)
                give_name(temporary, path)
            except FileExistsError as error:
                raise _mixed(str(path)) from error
            finally:
                temporary.unlink(missing_ok=True)

    def _described(self, data: bytes, name: str) -> dict[str, Any]:
        """Return a file's entry in an index."""
        hashes = {kind: new_digest(kind, data).hexdigest() for kind in self.hashes}
        return {"basename": name, "bytes": len(data), "hashes": hashes}

    def finish(self) -> None:
        """Write the last shard, wait for the uploads, and write the index."""
        self._check_process()
        if self._is_whole:
            return
        if self._is_finished:
            raise ConfigError(
                f"{self.remote or self.local} was not finished, because of an error: write all of it again with "
                "exist_ok=True"
            )
        try:
            with self._lock:
                self._is_finished = True
                if self._samples:
                    self.flush_shard()
            wait(self._uploads)
            self._raise_failures()
            if self._store is not None and read_if_there(self._store, INDEX_NAME) is not None:
                raise _mixed(f"{self.remote}/{INDEX_NAME}")
            self._write(INDEX_NAME, index_json(self.shards))
            self._upload(INDEX_NAME)
            wait(self._uploads)
            self._raise_failures()
            self._is_whole = True
        finally:
            self._end()

    def _upload(self, name: str) -> None:
        """Upload a file of the folder in a thread, once few wait for theirs."""
        if self._store is None:
            return
        while len(self._uploads) >= _WAITING_PER_THREAD * self._threads._max_workers:
            wait(self._uploads, return_when=FIRST_COMPLETED)
            self._raise_failures()
        self._uploads.add(self._threads.submit(self._uploaded, self._store, name))

    def _uploaded(self, store: Storage, name: str) -> None:
        store.upload(Path(self.local, name), name)
        if self._is_temporary or not self.keep_local:
            self._folder.delete(name)
        if self._advance is not None:
            self._advance(1)

    def _raise_failures(self) -> None:
        """Raise the error of a failed upload, in every later call, too: the index would list a missing shard."""
        done = {upload for upload in self._uploads if upload.done()}
        for upload in done:
            upload.result()
        self._uploads -= done

    def _end(self) -> None:
        """End the threads, and remove a folder of our own."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._bar.close()
        if self._is_temporary:
            shutil.rmtree(self.local, ignore_errors=True)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        elif not self._is_finished and os.getpid() == self._pid:
            self._is_finished = True
            self._end()


class MDSWriter(Writer):
    """Writes MDS shards. columns: name -> encoding: "str", "int", "ndarray:int32", "json", "jpeg", … See Writer."""

    format = "mds"
    _bytes_beside = 4

    def _check_columns(self) -> None:
        self._format = ShardFormat(
            self.columns, shard_bytes=self.size_limit, compression=self.compression, hashes=self.hashes
        )

    def encode_sample(self, sample: Sample) -> bytes:
        _check_names(sample, self.columns)
        return self._format.encode(sample)

    def get_config(self) -> dict[str, Any]:
        return self._format.config

    @property
    def _empty_bytes(self) -> int:
        return self._format.empty_bytes

    def _parts(self) -> dict[str, bytes]:
        sizes = np.array([len(each) for each in self._samples], np.int64)
        return {"data": b"".join([self._format.shard_head(sizes), *self._samples])}


class _TextWriter(Writer):
    """Writes shards of texts, each with a second file of sample offsets. columns: name -> "str", "int" or "float"."""

    newline: str

    def _check_columns(self) -> None:
        if not isinstance(self.newline, str) or not self.newline:
            raise ConfigError(f"newline must be a text, got {self.newline!r}")
        for name, encoding in self.columns.items():
            if encoding not in _TEXT_TYPES:
                raise ConfigError(f"column {name!r} has the encoding {encoding!r}: choose one of str, int, float")

    def _values(self, sample: Sample) -> dict[str, Any]:
        """Return the values of the columns, with checked types."""
        _check_names(sample, self.columns)
        for name, encoding in self.columns.items():
            if not isinstance(sample[name], _TEXT_TYPES[encoding]):
                raise DataError(f"column {name!r} holds {str(sample[name])[:80]!r}, which is not {encoding!r}")
        return {name: sample[name] for name in self.columns}

    _head = b""  # of the first file, before the samples

    def _parts(self) -> dict[str, bytes]:
        sizes = [len(each) for each in self._samples]
        offsets: NDArray[np.uint32] = np.cumsum([len(self._head), *sizes]).astype("<u4")
        config = json.dumps(self.get_config(), sort_keys=True).encode()
        meta = np.uint32(len(sizes)).tobytes() + offsets.tobytes() + config
        return {"data": b"".join([self._head, *self._samples]), "meta": meta}


class JSONWriter(_TextWriter):
    """Writes shards of JSON lines. newline: end of each line. See Writer."""

    format = "json"

    def __init__(self, *, newline: str = "\n", **settings: Any):
        self.newline = newline
        super().__init__(**settings)

    def encode_sample(self, sample: Sample) -> bytes:
        return (json.dumps(self._values(sample), sort_keys=True) + self.newline).encode()

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"columns": self.columns, "newline": self.newline}


class XSVWriter(_TextWriter):
    """Writes shards of values with a separator between them. newline: end of each sample. See Writer."""

    format = "xsv"

    def __init__(self, *, separator: str, newline: str = "\n", **settings: Any):
        self.separator, self.newline = separator, newline
        super().__init__(**settings)

    def _check_columns(self) -> None:
        super()._check_columns()
        if not isinstance(self.separator, str) or not self.separator:
            raise ConfigError(f"separator must be a text, got {self.separator!r}")
        self._names = sorted(self.columns)
        self._head = self._line(self._names)

    def _line(self, values: Sequence[str]) -> bytes:
        line = self.separator.join(values)
        wrong = [each for each in values if self.newline in each or self.separator in each]
        if wrong or line.split(self.separator) != [*values]:  # a value may end with the separator's first character
            raise DataError(
                f"{(*wrong, line)[0][:80]!r} has the separator {self.separator!r} or the newline {self.newline!r} "
                "inside, which these shards cannot hold: write the samples with MDSWriter"
            )
        return (line + self.newline).encode()

    def encode_sample(self, sample: Sample) -> bytes:
        values = self._values(sample)
        return self._line([_TEXTS[self.columns[name]](values[name]) for name in self._names])

    def get_config(self) -> dict[str, Any]:
        columns = {"column_names": self._names, "column_encodings": [self.columns[name] for name in self._names]}
        separator = {"separator": self.separator} if self.format == "xsv" else {}
        return super().get_config() | columns | separator | {"newline": self.newline}


class CSVWriter(XSVWriter):
    """XSVWriter with commas."""

    format = "csv"

    def __init__(self, **settings: Any):
        super().__init__(separator=",", **settings)


class TSVWriter(XSVWriter):
    """XSVWriter with tabs."""

    format = "tsv"

    def __init__(self, **settings: Any):
        super().__init__(separator="\t", **settings)


def _whole(folder: str | Path) -> str:
    """Return the absolute path of a folder: the process may change its working directory."""
    return str(local_path("out", folder).absolute())


def _mixed(where: str) -> TargetExistsError:
    return TargetExistsError(
        f"{where} was written by another writer meanwhile, so what is there is not one dataset: delete it, and "
        f"{_OWN_FOLDERS}"
    )


def _check_names(sample: Sample, columns: Mapping[str, str]) -> None:
    missing = next((name for name in columns if name not in sample), None)
    if missing is not None:
        raise DataError(f"a sample lacks the column {missing!r}: it has {', '.join(map(str, sample)) or 'none'}")


def _checked_hashes(hashes: Sequence[str]) -> list[str]:
    if isinstance(hashes, str) or [*hashes] != sorted({*hashes}):
        raise ConfigError(f"hashes must be a list of different names in sorted order, got {hashes!r}")
    for kind in hashes:
        if kind not in HASHES:
            raise ConfigError(f"there is no checksum {kind!r}: choose one of {', '.join(HASHES)}")
    return [*hashes]


def _checked_limit(size_limit: int | str | None) -> int | None:
    num_bytes = parse_bytes(size_limit, name="size_limit") if size_limit else None
    if num_bytes is not None and num_bytes > MAX_SHARD_BYTES:
        raise ConfigError(f"`size_limit` must be less than 2**32, the limit of byte offsets in MDS, got {size_limit}")
    return num_bytes


def _retry(retry: int) -> Retry:
    if retry < 0:
        raise ConfigError(f"retry must be 0 or more attempts after the first, got {retry}")
    return Retry(attempts=1 + retry, timeout_s=DEFAULT_RETRY.timeout_s)


def _make_room(place: Storage, names: Sequence[str], *, exist_ok: bool) -> None:
    """Delete the existing dataset if exist_ok, else raise TargetExistsError for it. Other files stay.

    names: existing files, if known. If the dataset's index or description is damaged, files with this module's names
    are deleted.
    """
    index = read_if_there(place, INDEX_NAME)
    if not exist_ok and (names or index is not None):
        raise TargetExistsError(
            f"Directory is not empty: {place.url}: name another directory, or pass exist_ok=True to delete the dataset "
            "in it"
        )
    old = {name for name in names if _OURS.fullmatch(name)} | {INDEX_NAME}
    if index is not None:
        with suppress(ShardError):
            listed = parse_index(index, source=f"{place.url}/{INDEX_NAME}", refused={})
            files = [file for info in listed for file in (info, info.meta) if file is not None]
            old |= {file.zip_name or file.name for file in files if "/" not in file.name}
    described = read_if_there(place, DATASET_NAME)
    if described is not None:
        old.add(DATASET_NAME)
        with suppress(ShardError):
            old |= {*own_files(parse_dataset(described, source=f"{place.url}/{DATASET_NAME}"))}
    for name in sorted(old, key=lambda name: name != INDEX_NAME):  # the index first: nobody begins to read the rest
        place.delete(name)
