"""Rows of every kind, from every kind of source, through a conversion and two readers, are the rows again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.storage.storage import Storage, open_storage
from streaming import StreamingDataset

from ..processes import PROCESSES
from ..rounds import rounds
from .round_trip_cases import JSON, TEXT_CASES, Case, Row
from .round_trip_media import FILES, MEDIA_CASES
from .round_trip_sources import LOCAL, REMOTE, Written, write_media

READ_TOGETHER = 20  # datasets that one process reads


def pairs(sources: Iterable[tuple[str, tuple[str, Any]]]) -> list[Any]:
    """Each source with each case that it can carry; in short rounds a third, of every source and every case."""
    every = rounds(3, 1)
    return [
        pytest.param(name, case, id=f"{name}-{case.name}")
        for row, (name, (kind, _)) in enumerate(sources)
        for column, case in enumerate([*TEXT_CASES, *MEDIA_CASES])
        if kind in case.carried_by and (name != "s3-parquet" or JSON not in case.carried_by)
        if (row + column) % every == 0
    ]


def seen(sample: Row) -> Row:
    """A stored sample as cases write it: JSON parsed, the bytes of media instead of their spans."""
    values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sample.items()}
    if "media" in values:
        media, stop = values.pop("media"), 0
        values["messages"] = json.loads(values["messages"])
        messages = values["messages"]
        for message in messages["messages"] if isinstance(messages, dict) else messages:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] != "text":
                    first, size = part.pop("span")
                    assert first == stop  # one after another
                    stop += size
                    part["data"] = media[first:stop]
        assert stop == len(media)
    return values


def answer_plainly(pipe: Connection) -> None:
    """For each folder, all samples as MosaicML's own class reads them."""
    with suppress(EOFError):  # nobody asks any more
        for _ in range(READ_TOGETHER):
            pipe.send(list(StreamingDataset(local=pipe.recv(), batch_size=1, shuffle=False)))


class PlainReader:
    """Reads in processes that end, because a StreamingDataset keeps some forty files open until its process does."""

    def __init__(self) -> None:
        self._num_read = 0

    def read(self, folder: Path) -> list[Row]:
        if self._num_read % READ_TOGETHER == 0:
            self._pipe, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=answer_plainly, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
        self._num_read += 1
        self._pipe.send(str(folder))
        assert self._pipe.poll(60)
        samples: list[Row] = self._pipe.recv()
        return samples


@pytest.fixture(scope="module")
def plain_reader() -> PlainReader:
    return PlainReader()


def check(case: Case, kind: str, written: Written, *, media: Path, out: Path, plain_reader: PlainReader) -> None:
    spec, options = written
    asked: dict[str, Any] = {"media_root": str(media)} | case.options | options
    quote = asked.pop("quote", None)
    told: list[int] = []  # bytes in all, then those that are done
    progress = Progress(begin=told.append, advance=told.append)
    report = convert([spec], str(out), schema=SchemaOptions(**asked), quote=quote, num_workers=1, progress=progress)
    assert told[0] == sum(told[1:]) or (told[0] == 0 and spec.startswith("hf:"))
    assert min(told) >= 0
    wanted = case.wanted_from(kind)
    assert (report.num_rows, report.num_rejected) == (len(wanted), 0)
    ours = PackedStreamingDataset(out)
    assert [seen(ours[number]) for number in range(len(ours))] == wanted
    assert [seen(sample) for sample in plain_reader.read(out)] == wanted
    assert verify_dataset(str(out), deep=True, num_workers=1).problems == ()


@pytest.fixture
def offline_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.utils.tqdm, "_hf_datasets_progress_bars_disabled", True, raising=False)


@pytest.mark.usefixtures("offline_hub")
@pytest.mark.parametrize(("source", "case"), pairs(LOCAL.items()))
def test_rows_come_back_as_they_were(source: str, case: Case, tmp_path: Path, plain_reader: PlainReader) -> None:
    kind, write = LOCAL[source]
    media = write_media(tmp_path)
    check(case, kind, write(case.rows, tmp_path), media=media, out=tmp_path / "out", plain_reader=plain_reader)


@pytest.fixture(scope="module")
def bucket(s3: str) -> Storage:
    """An object store with the media in it."""
    store = open_storage(f"{s3}/round-trips")
    for name, data in FILES.items():
        store.write(f"media/{name}", data)
    return store


@pytest.mark.parametrize(("source", "case"), pairs(REMOTE.items()))
def test_rows_of_an_object_store_come_back_as_they_were(
    source: str, case: Case, tmp_path: Path, bucket: Storage, plain_reader: PlainReader
) -> None:
    kind, write = REMOTE[source]
    written = write(case.rows, tmp_path, bucket, f"{source}-{case.name}")
    check(case, kind, written, media=tmp_path, out=tmp_path / "out", plain_reader=plain_reader)
