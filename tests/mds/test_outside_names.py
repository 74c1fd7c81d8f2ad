"""Names that a dataset's JSON files give become paths, so each is checked before it is joined."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lmms_stream.errors import LengthsError
from lmms_stream.mds.lengths import lengths_names
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.text import TokensProcessor

from ..conftest import write_tokens

OUTSIDE = ["../../../x", "../x", "/tmp/lmms-outside", "a/b", "..", "", ".x", "x\x00", "F" * 32, "0" * 31, "x" * 300]


@pytest.mark.parametrize("content_hash", OUTSIDE)
def test_a_content_hash_that_is_no_hash_is_refused_before_it_becomes_a_path(content_hash: str, tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=30)
    path = tmp_path / "data" / lengths_names(processor_fingerprint(TokensProcessor()))[1]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"content_hash": content_hash}))
    dataset = PackedStreamingDataset(tmp_path / "data", tmp_path / "a" / "cache", processor=TokensProcessor())
    before = set(tmp_path.rglob("*"))
    with pytest.raises(LengthsError, match=r"content_hash .* is not 32 hexadecimal digits\): write it again"):
        dataset.length_index()
    assert set(tmp_path.rglob("*")) == before
    assert not Path("/tmp/lmms-outside").exists()


@pytest.mark.parametrize("fingerprint", ["../../../x", "/tmp/lmms-outside", "a/b", "", ".x", "x" * 300, 7, None])
def test_a_fingerprint_that_is_no_plain_name_is_refused_before_it_becomes_a_path(
    fingerprint: object, dataset_folder: Path, tmp_path: Path
) -> None:
    for path in dataset_folder.glob("*"):
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    described = json.loads((dataset_folder / "_lmms" / "dataset.json").read_bytes())
    (tmp_path / "_lmms").mkdir()
    (tmp_path / "_lmms" / "dataset.json").write_text(json.dumps(described | {"lengths": [fingerprint]}))
    with pytest.raises(LengthsError, match="is not the plain name of a lengths index: refused"):
        PackedStreamingDataset(tmp_path).length_index()
