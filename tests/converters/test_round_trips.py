"""Rows of every kind, from every kind of source, through a conversion and two readers, are the rows again."""

from __future__ import annotations

import json
from collections.abc import Iterable
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

from ..rounds import rounds
from .round_trip_cases import JSON, TEXT_CASES, Case, Row
from .round_trip_media import FILES, MEDIA_CASES
from .round_trip_sources import LOCAL, REMOTE, Written, write_media


def pairs(sources: Iterable[tuple[str, tuple[str, Any]]]) -> list[Any]:
    """Each source with each case that it can carry; in short rounds a quarter, of every source and every case."""
    every = rounds(4, 1)
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


def check(case: Case, kind: str, written: Written, *, media: Path, out: Path) -> None:
    spec, options = written
    asked: dict[str, Any] = {"media_root": str(media)} | case.options | options
    quote = asked.pop("quote", None)
    told: list[int] = []  # bytes in all, then those that are done
    progress = Progress(begin=told.append, advance=told.append)
    settings: dict[str, Any] = {"quote": quote, "num_workers": 1, "progress": progress, "allow_repeats": True}
    report = convert([spec], str(out), schema=SchemaOptions(**asked), **settings)
    assert told[0] == sum(told[1:]) or (told[0] == 0 and spec.startswith("hf:"))
    assert min(told) >= 0
    wanted = case.wanted_from(kind)
    assert (report.num_rows, report.num_rejected) == (len(wanted), 0)
    ours = PackedStreamingDataset(out)
    assert [seen(ours[number]) for number in range(len(ours))] == wanted
    assert [seen(sample) for sample in StreamingDataset(local=str(out), batch_size=1, shuffle=False)] == wanted
    assert verify_dataset(str(out), deep=True, num_workers=1).problems == ()


@pytest.fixture
def offline_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.utils.tqdm, "_hf_datasets_progress_bars_disabled", True, raising=False)


@pytest.mark.usefixtures("offline_hub")
@pytest.mark.parametrize(("source", "case"), pairs(LOCAL.items()))
def test_rows_come_back_as_they_were(source: str, case: Case, tmp_path: Path) -> None:
    kind, write = LOCAL[source]
    media = write_media(tmp_path)
    check(case, kind, write(case.rows, tmp_path), media=media, out=tmp_path / "out")


@pytest.fixture(scope="module")
def bucket(s3: str) -> Storage:
    """An object store with the media in it."""
    store = open_storage(f"{s3}/round-trips")
    for name, data in FILES.items():
        store.write(f"media/{name}", data)
    return store


@pytest.mark.parametrize(("source", "case"), pairs(REMOTE.items()))
def test_rows_of_an_object_store_come_back_as_they_were(
    source: str, case: Case, tmp_path: Path, bucket: Storage
) -> None:
    kind, write = REMOTE[source]
    written = write(case.rows, tmp_path, bucket, f"{source}-{case.name}")
    check(case, kind, written, media=tmp_path, out=tmp_path / "out")
