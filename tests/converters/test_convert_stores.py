"""Sources in object stores: workers fetch them, by ranges where the format allows, and nothing is read half changed."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.sources.files import HEAD_BYTES, REQUEST_BYTES
from lmms_stream.converters.writing import reading
from lmms_stream.errors import DataError, ObjectMissingError, StorageError
from lmms_stream.storage.storage import Storage, open_storage

from ..mds.reading import MARKS
from ..proxy import FaultProxy, Rule
from ..rounds import rounds
from .held import chat
from .test_convert_runs import written

pytestmark = MARKS
NUM_CHATS = 500
OPTIONS: dict[str, Any] = {"unit_bytes": 20_000, "shard_bytes": 1 << 15, "allow_repeats": True}


@pytest.fixture(scope="module")
def chats() -> list[dict[str, Any]]:
    return [chat(number) for number in range(NUM_CHATS)]


def lines(chats: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in chats).encode()


def parquet(chats: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), sink, row_group_size=200)
    return bytes(sink.getvalue().to_pybytes())


FILES: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "chats.jsonl": lines,
    "chats.parquet": parquet,
    "chats.jsonl.gz": lambda chats: gzip.compress(lines(chats)),
    "chats.json": lambda chats: json.dumps(chats).encode(),
}


def upload(chats: list[dict[str, Any]], name: str, url: str) -> tuple[Storage, int]:
    store, data = open_storage(url), FILES[name](chats)
    store.write(name, data)
    return store, len(data)


@pytest.fixture(scope="module")
def expected(chats: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The shards and index of a local conversion."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "chats.jsonl").write_bytes(lines(chats))
    convert([folder / "chats.jsonl"], str(folder / "local"), num_workers=1, **OPTIONS)
    return samples(str(folder / "local"))


def samples(target: str) -> dict[str, bytes]:
    of_sources = ("_lmms/dataset.json", "_lmms/provenance.json")  # which say where they lie
    return {name: data for name, data in written(target).items() if name not in of_sources}


@pytest.mark.parametrize(("name", "num_workers"), [*((name, 2) for name in sorted(FILES)), ("chats.parquet", 1)])
def test_objects_give_the_shards_that_files_give(
    name: str,
    num_workers: int,
    chats: list[dict[str, Any]],
    expected: dict[str, bytes],
    proxy: FaultProxy,
    s3_folder: str,
    tmp_path: Path,
) -> None:
    _, num_bytes = upload(chats, name, s3_folder)
    proxy.set_rules()
    convert([f"{s3_folder}/{name}"], str(tmp_path / "out"), num_workers=num_workers, **OPTIONS)
    assert samples(str(tmp_path / "out")) == expected
    # Of Parquet each worker reads the row groups of which it has slices.
    assert proxy.traffic().num_bytes("GET", rf"/{name}$") < (num_workers + 2) * num_bytes


def test_lines_of_an_object_are_read_by_workers_in_ranges_and_lie_nowhere(
    chats: list[dict[str, Any]], proxy: FaultProxy, s3_folder: str, tmp_path: Path
) -> None:
    store, data = open_storage(s3_folder), lines(chats) * 8
    store.write("chats.jsonl", data)
    proxy.set_rules()
    seen: set[Path] = set()
    progress = Progress(rows=lambda _: seen.update((tmp_path / "work").rglob("*.jsonl*")))
    convert(
        [f"{s3_folder}/chats.jsonl"], str(tmp_path / "out"), num_workers=2, work=tmp_path / "work", progress=progress,
        **OPTIONS,
    )  # fmt: skip
    traffic = proxy.traffic()
    assert {path.name for path in seen} <= {"shards.jsonl"}  # what the work folder keeps of its own
    # What comes first is read at once, by each process.
    assert traffic.num_requests("GET", r"/chats\.jsonl$") > (len(data) - HEAD_BYTES) / OPTIONS["unit_bytes"]
    assert traffic.num_bytes("GET", r"/chats\.jsonl$") < 4 * len(data)  # units are small: probes and ends count


FAULTS = [
    ("chats.jsonl", Rule(times=2, reset_after=1000)),
    ("chats.parquet", Rule(times=2, reset=True)),
    ("chats.jsonl.gz", Rule(times=2, reset_after=1000)),
    ("chats.json", Rule(times=2, status=503)),
]


@pytest.mark.parametrize(("name", "rule"), FAULTS, ids=[name for name, _ in FAULTS])
def test_connections_that_die_are_made_again(
    rule: Rule,
    name: str,
    chats: list[dict[str, Any]],
    expected: dict[str, bytes],
    proxy: FaultProxy,
    s3_folder: str,
    tmp_path: Path,
) -> None:
    upload(chats, name, s3_folder)
    proxy.set_rules(rule)
    convert([f"{s3_folder}/{name}"], str(tmp_path / "out"), num_workers=2, **OPTIONS)
    assert samples(str(tmp_path / "out")) == expected


def test_an_object_that_is_refused_is_named_and_gone_on_with(
    chats: list[dict[str, Any]], expected: dict[str, bytes], proxy: FaultProxy, s3_folder: str, tmp_path: Path
) -> None:
    store, _ = upload(chats, "chats.jsonl", s3_folder)
    store.write("more.jsonl", lines(chats))
    both = [f"{s3_folder}/chats.jsonl", f"{s3_folder}/more.jsonl"]
    proxy.set_rules(Rule(path=r"/more\.jsonl", status=403))
    with pytest.raises(StorageError, match=rf"{re.escape(s3_folder)}/more\.jsonl: the credentials are refused"):
        convert(both, str(tmp_path / "out"), num_workers=2, **OPTIONS)
    proxy.set_rules()
    assert convert(both, str(tmp_path / "out"), num_workers=2, **OPTIONS).num_rows == 2 * NUM_CHATS


@pytest.mark.parametrize("name", sorted(FILES)[rounds(1, 0) :: rounds(2, 1)])
def test_an_object_that_changes_while_it_is_read_is_an_error(
    name: str, chats: list[dict[str, Any]], store_folder: str, tmp_path: Path
) -> None:
    """The second of two objects is written again, by as many bytes, while the first is read."""
    store, _ = upload(chats, name, store_folder)
    first = open_storage(f"{store_folder}/a")
    first.write(name, FILES[name](chats))
    changed = FILES[name]([chat(number + 1) for number in range(NUM_CHATS)])
    sources = [f"{store_folder}/a/{name}", f"{store_folder}/{name}"]
    progress = Progress(say=lambda _: store.write(name, changed))
    with pytest.raises(DataError, match=rf"{store_folder}/{name} was changed during reading: start again after"):
        convert(sources, str(tmp_path / "out"), num_workers=2, progress=progress, **OPTIONS)
    assert convert(sources, str(tmp_path / "out"), num_workers=2, **OPTIONS).num_rows == 2 * NUM_CHATS


def test_what_is_fetched_whole_is_fetched_ahead_and_bounded(
    chats: list[dict[str, Any]], store_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_storage(store_folder)
    for number in range(8):
        store.write(f"{number}.jsonl.gz", gzip.compress(lines(chats[number * 60 : (number + 1) * 60])))
    convert([store_folder], str(tmp_path / "once"), num_workers=1, **OPTIONS)
    for at_most in (1, 1 << 30):
        monkeypatch.setattr(reading, "FETCHED_BYTES", at_most)
        held: list[int] = []
        progress = Progress(
            rows=lambda _, held=held: held.append(  # type: ignore[misc]
                sum(1 for path in (tmp_path / "work").rglob("*.gz") if path.parent.name.startswith("source-"))
            )
        )
        target = str(tmp_path / f"out-{at_most}")
        convert([store_folder], target, num_workers=2, work=tmp_path / "work", progress=progress, **OPTIONS)
        assert samples(target) == samples(str(tmp_path / "once"))
        assert max(held) <= (1 if at_most == 1 else 8)
        assert not list((tmp_path / "work").rglob("*.gz"))


def test_an_object_that_is_gone_is_an_error_at_its_turn_alone(
    chats: list[dict[str, Any]], store_folder: str, tmp_path: Path
) -> None:
    store = open_storage(store_folder)
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        store.write(name, gzip.compress(lines(chats)))
    progress = Progress(say=lambda _: store.delete("b.jsonl.gz"))
    sources = [f"{store_folder}/a.jsonl.gz", f"{store_folder}/b.jsonl.gz"]
    with pytest.raises(ObjectMissingError, match=r"b\.jsonl\.gz does not exist: check the URL"):
        convert(sources, str(tmp_path / "out"), num_workers=2, progress=progress, **OPTIONS)


def test_an_object_larger_than_a_request_is_read_whole(store_folder: str, tmp_path: Path) -> None:
    store = open_storage(store_folder)
    words = "word " * 1000
    rows = [{"text": f"{number} {words}"} for number in range(9 * REQUEST_BYTES // 4 // len(words))]
    store.write("long.jsonl", lines(rows))
    convert([f"{store_folder}/long.jsonl"], str(tmp_path / "out"), num_workers=1)
    (tmp_path / "long.jsonl").write_bytes(lines(rows))
    convert([tmp_path / "long.jsonl"], str(tmp_path / "local"), num_workers=1)
    assert samples(str(tmp_path / "out")) == samples(str(tmp_path / "local"))


def test_a_conversion_that_another_release_began_is_refused_by_name(tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_bytes(lines([chat(number) for number in range(1000)]) + b'{"messages": 1}\n')
    options: dict[str, Any] = {**OPTIONS, "unit_bytes": 20_000, "work": tmp_path / "work", "num_workers": 1}
    with pytest.raises(DataError, match="--on-error skip"):
        convert([source], str(tmp_path / "out"), **options)
    (about,) = (tmp_path / "work").rglob("conversion.json")
    conversion = json.loads(about.read_bytes())
    del conversion["asked"]["units"]
    about.write_text(json.dumps(conversion))
    message = "of another release, which divided the sources differently: run the command with that release, or"
    with pytest.raises(StorageError, match=message):
        convert([source], str(tmp_path / "out"), on_error="skip", **options)
    assert convert([source], str(tmp_path / "out"), on_error="skip", overwrite=True, **options).num_rows == 1000
