"""A target inside its own source: what is written there is not read the next time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import convert
from lmms_stream.converters.dry_run import dry_run
from lmms_stream.converters.part import convert_part
from lmms_stream.errors import ConfigError
from lmms_stream.storage.storage import open_storage
from PIL import Image

OPTIONS: dict[str, Any] = {"num_workers": 1}


def write_rows(path: Path, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"{path.stem} {number}"}) + "\n" for number in range(count)))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("data/a.jsonl"), 3)
    return Path("data")


@pytest.mark.parametrize(
    ("source", "target"), [("data", "data/out"), ("data/", "./data/x/out"), ("data/**/*.json*", "data"), (".", "data")]
)
def test_a_dataset_in_its_source_is_converted_again_appended_to_and_replaced(
    data: Path, source: str, target: str
) -> None:
    if (source, target) == (".", "data"):
        write_rows(Path("b/b.jsonl"), 3)
        Path("data/a.jsonl").unlink()
    assert convert([source], target, **OPTIONS).num_rows == 3
    assert convert([source], target, **OPTIONS).was_there
    assert dry_run([source], target=target).num_samples == 3
    write_rows(Path("data/c.jsonl" if source != "." else "b/c.jsonl"), 2)
    assert append([source], target, **OPTIONS).num_new_sources == 1
    assert append([source], target, **OPTIONS).num_new_sources == 0
    assert convert([source], target, overwrite=True, **OPTIONS).num_rows == 5


def test_parts_and_lists_with_weights_leave_their_target_out(data: Path) -> None:
    for number in (0, 1):
        convert_part(["data"], "data/out", f"{number}/2", **OPTIONS)
    assert convert(["data"], "data/out", **OPTIONS).num_rows == 3
    entries = [{"path": "rows", "weight": 1}, {"path": "more", "weight": 2}]
    write_rows(Path("rows/a.jsonl"), 3)
    write_rows(Path("more/b.jsonl"), 2)
    Path("list.yaml").write_text(json.dumps({"datasets": entries}))
    for _ in range(2):
        assert convert(["list.yaml"], "rows/out", overwrite=True, **OPTIONS).num_rows == 5


def test_a_dataset_in_a_folder_of_images_or_of_a_saved_dataset_is_left_out(tmp_path: Path) -> None:
    from datasets import Dataset

    (tmp_path / "photos" / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "cat" / "1.png")
    Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "saved")
    for source in ("photos", "saved"):
        for is_again in (False, True):
            report = convert([tmp_path / source], str(tmp_path / source / "out"), **OPTIONS)
            assert (report.num_rows, report.was_there) == (1, is_again)


def test_a_dataset_in_its_source_in_a_store_is_left_out(s3_folder: str) -> None:
    open_storage(s3_folder).write("data/a.jsonl", b'{"text": "a"}\n')
    for is_again in (False, True):
        assert convert([f"{s3_folder}/data"], f"{s3_folder}/data/out", **OPTIONS).was_there is is_again
    with pytest.raises(ConfigError, match=r"data is a source and the target: choose another target"):
        convert([f"{s3_folder}/data"], f"{s3_folder}/data", **OPTIONS)


@pytest.mark.parametrize("call", [convert, append, lambda sources, to, **options: dry_run(sources, target=to)])
def test_a_folder_that_is_source_and_target_is_refused_at_once(data: Path, call: Callable[..., Any]) -> None:
    if call is append:
        convert(["data/a.jsonl"], "data", **OPTIONS)
    with pytest.raises(ConfigError, match="data is a source and the target: choose another target"):
        call(["data/"], "data", **OPTIONS)
