"""The same rows written as a source of each kind."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow
from lmms_stream.storage.storage import Storage

from .round_trip_cases import CSV, IMAGES, JSON, LINES, TABLES, TAR, TEXTS, Row
from .round_trip_media import FILES
from .sources.source_rows import json_lines, write
from .sources.test_folders import write_tar
from .sources.test_tables import write_file, write_parquet, write_stream

Rows = Sequence[Row]
Written = tuple[str, Row]  # what the user names, and options of their rows
ROLES = {"conversations": "messages", "completion": "response", "image": "images", "id": ""}  # where not their names


def write_media(folder: Path) -> Path:
    for name, data in FILES.items():
        write(folder / "media" / name, data)
    return folder / "media"


def json_array(rows: Rows, folder: Path) -> Written:
    return str(write(folder / "rows.json", orjson.dumps(rows, option=orjson.OPT_INDENT_2))), {}


def json_member(rows: Rows, folder: Path) -> Written:
    about = {"about": [{"no": "row"}], "data": list(rows), "end": {"data": []}}
    return f"{write(folder / 'rows.json', json.dumps(about).encode())}#data", {}


def jsonl(rows: Rows, folder: Path) -> Written:
    return str(write(folder / "rows.jsonl", json_lines(rows))), {}


def jsonl_gz(rows: Rows, folder: Path) -> Written:
    return str(write(folder / "rows.jsonl.gz", gzip.compress(json_lines(rows)))), {}


def jsonl_zst(rows: Rows, folder: Path) -> Written:
    return str(write(folder / "rows.jsonl.zst", pyarrow.compress(json_lines(rows), codec="zstd", asbytes=True))), {}


def yaml_list(rows: Rows, folder: Path) -> Written:
    """Two entries, whose media folder the list names."""
    for number, part in enumerate((rows[:1], rows[1:])):
        write(folder / f"{number}.jsonl", json_lines(part))
    entries = "".join(f"- {{path: {number}.jsonl, data_folder: media, data_type: jsonl}}\n" for number in range(2))
    return str(write(folder / "all.yaml", b"datasets:\n" + entries.encode())), {"media_root": None}


def glob(rows: Rows, folder: Path) -> Written:
    for number, part in enumerate((rows[:1], rows[1:])):
        write(folder / "parts" / f"part-{number}.json", orjson.dumps(part))
    write(folder / "parts" / "other.json", b"[]")
    return f"{folder}/*/part-?.json", {}


def one_slice(rows: Rows, folder: Path) -> Written:
    around = write(folder / "rows.jsonl", json_lines([rows[-1], rows[-1], *rows, rows[0]]))
    return f"{around}@[2:-1]", {}


def s3_jsonl(rows: Rows, folder: Path, store: Storage, name: str) -> Written:
    store.write(f"{name}/a.jsonl", json_lines(rows))
    return f"{store.url}/{name}", {"media_root": f"{store.url}/media"}


def s3_parquet(rows: Rows, folder: Path, store: Storage, name: str) -> Written:
    store.upload(Path(parquet(rows, folder)[0]), f"{name}.parquet")
    return f"{store.url}/{name}.parquet", {"media_root": f"{store.url}/media"}


def parquet(rows: Rows, folder: Path) -> Written:
    return str(write_parquet(folder / "rows.parquet", pyarrow.Table.from_pylist(list(rows)), batch_rows=1)), {}


def arrow_file(rows: Rows, folder: Path) -> Written:
    return str(write_file(folder / "rows.arrow", pyarrow.Table.from_pylist(list(rows)), compression="zstd")), {}


def arrow_stream(rows: Rows, folder: Path) -> Written:
    return str(write_stream(folder / "rows.arrow", pyarrow.Table.from_pylist(list(rows)), batch_rows=1)), {}


def saved(rows: Rows, folder: Path) -> Written:
    import datasets

    datasets.Dataset(pyarrow.Table.from_pylist(list(rows))).save_to_disk(folder / "saved")
    return str(folder / "saved"), {}


def hub(rows: Rows, folder: Path) -> Written:
    """As the hub's library finds it: a folder with a file for each split."""
    (folder / "set").mkdir()
    write_parquet(folder / "set" / "train.parquet", pyarrow.Table.from_pylist(list(rows)))
    write_parquet(folder / "set" / "test.parquet", pyarrow.Table.from_pylist([rows[0]]))
    return f"hf:{folder / 'set'}?split=train", {}


def delimited(rows: Rows, delimiter: str) -> bytes:
    """Lists and objects as JSON, nothing for null."""

    def cell(value: Any) -> str:
        return value if isinstance(value, str) else "" if value is None else json.dumps(value)

    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue().encode()


def comma_separated(rows: Rows, folder: Path) -> Written:
    return str(write(folder / "rows.csv", delimited(rows, ","))), {}


def tab_separated(rows: Rows, folder: Path) -> Written:
    write(folder / "rows.tsv", delimited(rows, "\t"))
    entries = orjson.dumps({"datasets": [{"path": "rows.tsv", "data_type": "tsv"}]})
    return str(write(folder / "rows.yaml", entries)), {"quote": "double"}


def tar(rows: Rows, folder: Path) -> Written:
    """A file for each value: text, bytes or JSON. The columns that they make are named by the user."""
    files: list[tuple[str, bytes]] = []
    columns: dict[str, str] = {}
    for number, row in enumerate(rows):
        for name, value in row.items():
            extension, data = (
                ("txt", value.encode()) if isinstance(value, str)
                else ("bin", value) if isinstance(value, bytes) else ("json", orjson.dumps(value))
            )  # fmt: skip
            if value is not None:
                files.append((f"train/{number:05}.{name}.{extension}", data))
                columns |= {role: f"{name}.{extension}"} if (role := ROLES.get(name, name)) else {}
    return str(write_tar(folder / "rows.tar", files)), {"columns": columns}


def texts(rows: Rows, folder: Path) -> Written:
    for number, row in enumerate(rows):
        write(folder / "texts" / "ä b" / f"{number}.txt", row["text"].encode())
    return str(folder / "texts"), {}


def lines(rows: Rows, folder: Path) -> Written:
    """The only format that is told by the user alone: an entry of a list tells it."""
    write(folder / "lines.txt.gz", gzip.compress(b"\n\n" + "\r\n".join(row["text"] for row in rows).encode()))
    entries = orjson.dumps({"datasets": [{"path": "lines.txt.gz", "data_type": "lines"}]})
    return str(write(folder / "lines.yaml", entries)), {}


def images(rows: Rows, folder: Path) -> Written:
    for row in rows:
        write(folder / "classes" / row["image"], FILES[row["image"]])
    return str(folder / "classes"), {"media_root": None}


LOCAL: Mapping[str, tuple[str, Callable[[Rows, Path], Written]]] = {
    "json": (JSON, json_array),
    "json-member": (JSON, json_member),
    "jsonl": (JSON, jsonl),
    "jsonl.gz": (JSON, jsonl_gz),
    "jsonl.zst": (JSON, jsonl_zst),
    "yaml": (JSON, yaml_list),
    "glob": (JSON, glob),
    "slice": (JSON, one_slice),
    "parquet": (TABLES, parquet),
    "arrow-file": (TABLES, arrow_file),
    "arrow-stream": (TABLES, arrow_stream),
    "saved": (TABLES, saved),
    "hub": (TABLES, hub),
    "csv": (CSV, comma_separated),
    "tsv": (CSV, tab_separated),
    "tar": (TAR, tar),
    "texts": (TEXTS, texts),
    "lines": (LINES, lines),
    "images": (IMAGES, images),
}
REMOTE: Mapping[str, tuple[str, Callable[[Rows, Path, Storage, str], Written]]] = {
    "s3": (JSON, s3_jsonl),
    "s3-parquet": (TABLES, s3_parquet),
}
