"""Files that are padded with zeros, and files that Git LFS has not downloaded."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from lmms_stream.converters.sources.files import DecompressedFile, LocalFile
from lmms_stream.doors.relax.rows import open_rows
from lmms_stream.errors import ConfigError, DataError, ShardError
from lmms_stream.mds.index import parse_index
from lmms_stream.processors.media.formats import mime_type
from lmms_stream.processors.tokenizers import load_tokenizer
from lmms_stream.train.model.build import ModelConfig

from .source_rows import MESSY, json_lines, opened, read, write

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "a.tar", "a.csv", "a.json", "a", "a.jsonl.gz"])
def test_a_git_lfs_pointer_is_named_with_the_command_that_brings_the_data(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "data" / name, LFS_POINTER)
    remedy = rf"{name} is a Git LFS pointer, .*: run git lfs pull in its repository"
    for spec, format in ((path, None), (path.parent, None), (path, "jsonl")):
        if name != "a" or spec == path:
            with pytest.raises(DataError, match=remedy):
                read(spec, format=format)


def test_a_git_lfs_pointer_is_neither_a_text_nor_an_image_nor_an_index(tmp_path: Path) -> None:
    write(tmp_path / "texts" / "a.txt", LFS_POINTER)
    with opened(tmp_path / "texts") as ((source,), _):
        assert [row.error[:28] for unit in source.units() for row in unit.rows()] == ["a.txt is a Git LFS pointer, "]
    with pytest.raises(DataError, match=r"it is a Git LFS pointer, .*: run git lfs pull"):
        mime_type(LFS_POINTER, "image")
    with pytest.raises(ShardError, match=r"index.json is a Git LFS pointer, .*: run git lfs pull"):
        parse_index(LFS_POINTER, source="index.json")
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(DataError, match=f"{name} is a Git LFS pointer, .*: run git lfs pull"):
            open_rows(write(tmp_path / name, LFS_POINTER))
    write(tmp_path / "model" / "tokenizer.json", LFS_POINTER)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a Git LFS pointer, .*: run git lfs pull"):
        load_tokenizer(str(tmp_path / "model"))
    write(tmp_path / "model" / "model-00001-of-00002.safetensors", LFS_POINTER)
    write(tmp_path / "model" / "config.json", b'{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"00002\.safetensors is a Git LFS pointer, .*: run git lfs pull"):
        ModelConfig(pretrained=str(tmp_path / "model")).build()


@pytest.mark.parametrize("member_bytes", [1 << 20, 100, 1])
def test_gzip_of_several_members_and_zeros_is_read_as_gzip_reads_it(tmp_path: Path, member_bytes: int) -> None:
    data = json_lines(MESSY)
    members = [gzip.compress(data[at : at + member_bytes]) for at in range(0, len(data), member_bytes)]
    for zeros in (0, 1, 512, 1 << 19):
        path = write(tmp_path / "a.jsonl.gz", b"".join(members) + bytes(zeros))
        assert gzip.decompress(path.read_bytes()) == data
        assert read(path) == MESSY
    for damaged in (path.read_bytes()[:-1] + b"x", members[0][:-5], members[0][:-6] + b"xx" + members[0][-4:]):
        with pytest.raises(DataError, match=r"its gzip data is damaged or breaks off .*: copy it again"):
            read(write(path, damaged))


def test_gzip_that_expands_a_thousand_times_is_read_piece_by_piece(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(b"\n" * 50_000_000 + json_lines(MESSY)))
    with DecompressedFile(LocalFile(path), name="a") as stream:
        pieces = iter(lambda: stream.read(1 << 16), b"")
        assert sum(map(len, pieces)) == 50_000_000 + len(json_lines(MESSY))
