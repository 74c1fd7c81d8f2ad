from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.converters.stored.verify import VerifyReport, verify_dataset
from lmms_stream.converters.stored.verify_shards import MAX_LISTED
from lmms_stream.errors import ConfigError, StorageError, WorkerError
from lmms_stream.mds.decoding import decompress
from lmms_stream.mds.index import DATASET_NAME, INDEX_NAME
from lmms_stream.mds.lengths import LengthIndex, lengths_names
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.corpus import Corpus
from PIL import Image
from streaming import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter
from streaming.base.format.mds import encodings

from ...conftest import run_cli, write_tokens
from ...mds.measures import Dying

NUM_SAMPLES = 300
TOKENS = processor_fingerprint(TokensProcessor())
ARRAY, DESCRIPTION = lengths_names(TOKENS)
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def converted(corpus: Corpus, chat_processor: ChatProcessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted dataset of several shards, with a lengths index and rejects."""
    folder = tmp_path_factory.mktemp("converted")
    rows = folder / "rows.jsonl"
    rows.write_text(corpus.functions.read_text() + '{"messages": []}\n')
    convert([rows], str(folder / "chats"), processor=chat_processor, shard_bytes=1 << 15, on_error="skip")
    return folder / "chats"


@pytest.fixture
def chats(converted: Path, tmp_path: Path) -> Path:
    """A copy of the dataset, to be damaged."""
    return copytree(converted, tmp_path / "chats")


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_shard(folder: Path, number: int, **values: Any) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    for key, value in values.items():
        target = index["shards"][number]
        target["raw_data"][key] = value
    (folder / INDEX_NAME).write_text(json.dumps(index))


def described(report: VerifyReport) -> list[str]:
    return [f"{problem.where} {problem.what}" for problem in report.problems]


def the_problem(report: VerifyReport) -> str:
    (problem,) = described(report)
    return problem


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd", "gz"])
def test_a_sound_plain_dataset_has_no_problems(compression: str | None, deep: bool, tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=NUM_SAMPLES, compression=compression)
    told: list[int] = []
    report = verify_dataset(
        str(tmp_path), deep=deep, num_workers=1, on_start=told.append, on_shard=lambda: told.append(1)
    )
    assert described(report) == []
    assert (report.num_samples, report.num_lengths_indexes, report.num_problems) == (NUM_SAMPLES, 1, 0)
    assert told == [report.num_shards, *[1] * report.num_shards]
    assert report.num_shards > 2
    assert report.notes == (f"there is no {DATASET_NAME}: a plain MDS dataset, checked by its {INDEX_NAME} alone",)


def test_a_sound_conversion_has_no_problems_however_many_processes_look(
    chats: Path, chat_processor: ChatProcessor
) -> None:
    for num_workers in (1, 2):
        report = verify_dataset(str(chats), deep=True, processor=chat_processor, num_workers=num_workers)
        assert (described(report), report.notes) == ([], ())
    report = verify_dataset(str(chats), deep=True, num_workers=1)
    assert report.notes == ("the lengths were not compared with those of the samples: pass --tokenizer",)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_dataset_in_an_object_store_is_checked_and_no_copy_is_left(
    compression: str | None, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3}/verify-{compression}"
    write_tokens(tmp_path / "made", num_samples=NUM_SAMPLES, compression=compression)
    store = open_storage(url)
    for path in (tmp_path / "made").rglob("*.*"):
        store.upload(path, str(path.relative_to(tmp_path / "made")))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert described(verify_dataset(url, deep=True, num_workers=2)) == []
    name = "shard.00001.mds" + (f".{compression}" if compression else "")
    store.write(name, (tmp_path / "made" / name).read_bytes()[:-1] + b"\xff")
    assert (
        f"{name} was changed: its xxh3_64 is not the one that the dataset lists: upload it again"
        in described(verify_dataset(url))[0]
    )
    store.delete(name)
    assert the_problem(verify_dataset(url)) == f"{name} is missing: upload it again, or convert the dataset again"
    assert [path for path in (tmp_path / "temporary").rglob("*") if path.is_file() and "verify" in str(path)] == []


def test_a_merged_dataset_is_checked_below_its_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tokens(tmp_path / name, num_samples=NUM_SAMPLES)
    merge_datasets(str(tmp_path), [str(tmp_path / "a"), str(tmp_path / "b")])
    assert described(verify_dataset(str(tmp_path), deep=True, num_workers=1)) == []
    flip(tmp_path / "b" / "shard.00001.mds")
    assert the_problem(verify_dataset(str(tmp_path))).startswith("b/shard.00001.mds was changed")


SHARD = "shard.00001.mds"


def truncate(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1])


def descend(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[8:12] = (1 << 31).to_bytes(4, "little")
    (folder / SHARD).write_bytes(data)


def drop_array(folder: Path) -> None:
    (folder / ARRAY).unlink()


def shorten(folder: Path) -> None:
    lengths = np.load(folder / ARRAY)[:-1]
    LengthIndex.from_array(lengths, fingerprint=TOKENS).write(folder)


def other_dtype(folder: Path) -> None:
    np.save(folder / ARRAY, np.load(folder / ARRAY).astype(np.int64))


def zero(folder: Path) -> None:
    lengths = np.load(folder / ARRAY)
    lengths[7] = 0
    LengthIndex.from_array(lengths, fingerprint=TOKENS).write(folder)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            lambda folder: flip(folder / SHARD),
            f"{SHARD} was changed: its xxh3_64 is not the one that the dataset lists",
        ),
        (truncate, f"{SHARD} has "),
        (
            lambda folder: (folder / SHARD).unlink(),
            f"{SHARD} is missing: upload it again, or convert the dataset again",
        ),
        (lambda folder: change_shard(folder, 1, bytes=9000), f"bytes, {INDEX_NAME} says 9000: upload it again"),
        (
            lambda folder: change_shard(folder, 1, hashes={"sha9": "0"}),
            f"{INDEX_NAME} shard 'shard.00001.mds' has chec",
        ),
        (
            lambda folder: change_shard(folder, 1, basename="../x"),
            "'../x' is not a plain path below the dataset: refused",
        ),
        (lambda folder: (folder / INDEX_NAME).write_text("{"), f"{INDEX_NAME} not a valid MDS index"),
        (lambda folder: flip(folder / ARRAY), f"{ARRAY} does not hold the lengths that {DESCRIPTION} was written for"),
        (shorten, f"{ARRAY} has 299 lengths, the dataset 300 samples: write it again with lmms-stream index"),
        (other_dtype, f"{ARRAY} lengths index {TOKENS} should be uint32[300], found int64[300]"),
        (drop_array, f"{ARRAY} is missing: write it again with lmms-stream index"),
        (zero, f"{ARRAY} gives sample 7 a length of 0: write it again with lmms-stream index"),
        (lambda folder: change(folder / DESCRIPTION, num_tokens=3), f"tokens, {DESCRIPTION} says 3: write it again"),
        (
            lambda folder: (folder / DESCRIPTION).write_text("{"),
            f"{ARRAY} the description of lengths index {TOKENS} can",
        ),
    ],
)
def test_each_kind_of_damage_is_one_problem_that_names_the_file_and_the_remedy(
    damage: Damage, problem: str, tmp_path: Path
) -> None:
    write_tokens(tmp_path, num_samples=NUM_SAMPLES)
    damage(tmp_path)
    assert problem in the_problem(verify_dataset(str(tmp_path)))


def test_what_the_samples_and_offsets_of_a_shard_do_wrong_is_found_behind_a_wrong_checksum(tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=NUM_SAMPLES)
    descend(tmp_path)
    changed, offsets = described(verify_dataset(str(tmp_path)))
    assert "was changed" in changed
    assert offsets.startswith(f"{SHARD} has offsets that descend or leave the file: it is corrupt: upload it again")


def test_compressed_shards_are_checked_as_they_are_stored_and_decompressed(tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=NUM_SAMPLES, compression="zstd")
    flip(tmp_path / f"{SHARD}.zstd", at=200)
    changed, *rest = described(verify_dataset(str(tmp_path)))
    assert changed.startswith(f"{SHARD}.zstd was changed: its xxh3_64 is not the one that the dataset lists")
    assert rest
    assert all(problem.startswith(SHARD) for problem in rest)  # what it decompresses to is wrong, too
    (tmp_path / f"{SHARD}.zstd").write_bytes(b"")
    empty = described(verify_dataset(str(tmp_path)))
    assert "has 0 bytes, index.json says" in empty[0]
    assert "does not decompress" in empty[1]


def test_a_dataset_of_kept_columns_alone_is_sound(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"n": 1, "words": "a"}\n')
    options = SchemaOptions(kind="columns", keep=True)
    convert([tmp_path / "rows.jsonl"], str(tmp_path / "out"), schema=options)
    assert verify_dataset(str(tmp_path / "out"), deep=True, num_workers=1).problems == ()


def write_texts(folder: Path, kind: str, **settings: Any) -> str:
    """Shards of texts, each with a file that says where samples begin."""
    writers: dict[str, Any] = {"json": JSONWriter, "csv": CSVWriter, "tsv": TSVWriter, "xsv": XSVWriter}
    separator = {"separator": "|"} if kind == "xsv" else {}
    columns = {"text": "str"}
    with writers[kind](columns=columns, out=str(folder), size_limit=200, **separator, **settings) as writer:
        for number in range(20):
            writer.write({"text": f"{number}"})
    return str(folder)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", ["json", "csv", "tsv", "xsv"])
def test_sound_shards_of_texts_have_no_problems(kind: str, compression: str | None, tmp_path: Path) -> None:
    remote = write_texts(tmp_path, kind, compression=compression, hashes=["xxh64"])
    for deep in (False, True):
        report = verify_dataset(remote, deep=deep, num_workers=1)
        assert (described(report), report.num_samples, len(report.notes)) == ([], 20, 1)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "shard.00000.json.meta").unlink(), "shard.00000.json.meta is missing: upload it"),
        (lambda folder: flip(folder / "shard.00000.json.meta", at=0), "shard.00000.json.meta does not hold the "),
        (lambda folder: flip(folder / "shard.00000.json", at=0), "sample 0 (number 0 of shard.00000.json) cannot be"),
    ],
)
def test_damage_of_either_file_of_a_shard_of_texts_names_the_file(damage: Damage, problem: str, tmp_path: Path) -> None:
    write_texts(tmp_path, "json")
    damage(tmp_path)
    report = verify_dataset(str(tmp_path), deep=True, num_workers=1)
    assert the_problem(report).startswith(problem)
    assert "shards have no checksum, so changed bytes are not found" in report.notes[1]


def test_decompressed_shards_of_a_local_dataset_are_enough_and_must_be_those_of_the_compressed(tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=10, compression="zstd")
    (shard,) = json.loads((tmp_path / INDEX_NAME).read_text())["shards"]
    zipped, raw = (tmp_path / shard[key]["basename"] for key in ("zip_data", "raw_data"))
    raw.write_bytes(decompress("zstd", zipped.read_bytes(), size=shard["raw_data"]["bytes"]))
    assert described(verify_dataset(str(tmp_path), deep=True, num_workers=1)) == []
    flip(raw)
    changed = "shard.00000.mds is not what shard.00000.mds.zstd decompresses to: delete it"
    assert the_problem(verify_dataset(str(tmp_path))) == changed
    flip(raw)
    zipped.unlink()
    assert described(verify_dataset(str(tmp_path), deep=True, num_workers=1)) == []


def test_a_column_that_is_refused_is_a_problem_and_the_others_are_checked(tmp_path: Path) -> None:
    with MDSWriter(columns={"text": "str", "thing": "pkl"}, out=str(tmp_path)) as writer:
        writer.write({"text": "packs", "thing": {1}})
    refused = (
        f"{INDEX_NAME} column 'thing' is pickled, and unpickling can run code: write it in another encoding; "
        "the other columns were checked"
    )
    assert described(verify_dataset(str(tmp_path), deep=True, num_workers=1)) == [refused]
    data = (tmp_path / "shard.00000.mds").read_bytes()
    (tmp_path / "shard.00000.mds").write_bytes(data.replace(b"packs", b"\xffacks"))
    _, torn = described(verify_dataset(str(tmp_path), deep=True, num_workers=1))
    assert "cannot be decoded ('utf-8' codec" in torn


def test_a_deep_check_decodes_the_pixels_of_images(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "JPEG")
    whole, cut = file.getvalue(), file.getvalue()[:-500]
    samples = [{"one": whole, "all": [whole, whole]}, {"one": cut, "all": [whole]}, {"one": whole, "all": [whole, cut]}]
    remote = write_samples(tmp_path, {"one": "jpeg", "all": "jpeg_array"}, samples)
    first, second = described(verify_dataset(remote, deep=True, num_workers=1))
    assert first.startswith("sample 1 (number 1 of shard.00000.mds) column 'one' holds a damaged image (")
    assert second.startswith("sample 2 (number 2 of shard.00000.mds) column 'all' holds a damaged image (")


def test_all_problems_of_a_dataset_are_listed_not_the_first(chats: Path, chat_processor: ChatProcessor) -> None:
    names = [shard["name"] for shard in json.loads((chats / DATASET_NAME).read_text())["shards"]]
    assert len(names) > 3
    (chats / names[0]).unlink()
    flip(chats / names[1])
    (chats / names[2]).write_bytes(b"short")
    (chats / "_lmms" / "rejects.jsonl").unlink()
    array = lengths_names(processor_fingerprint(chat_processor))[0]
    flip(chats / array)
    change(chats / DATASET_NAME, num_samples=1)
    report = verify_dataset(str(chats))
    assert [problem.where for problem in report.problems] == [
        DATASET_NAME, array, "_lmms/rejects.jsonl", names[0], names[1], names[2],
    ]  # fmt: skip
    assert report.num_problems == 6


def edit_dataset(**values: Any) -> Damage:
    return lambda folder: change(folder / DATASET_NAME, **values)


def edit_shards(edit: Callable[[list[dict[str, Any]]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        shards = json.loads((folder / DATASET_NAME).read_text())["shards"]
        edit(shards)
        change(folder / DATASET_NAME, shards=shards)

    return damage


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (edit_dataset(num_samples=7), "says 7 samples, index.json"),
        (edit_dataset(version=2), "has the version 2, expected 1: use a newer lmms_stream"),
        (edit_dataset(columns={"messages": "str"}), "says the columns {'messages': 'str'}, index.json"),
        (edit_dataset(schema="tokens"), "says the schema 'tokens', which the columns do not fit"),
        (edit_shards(lambda shards: shards.pop()), ".mds, index.json does: they are of two conversions"),
        (edit_shards(lambda shards: shards.append(shards[0] | {"name": "x.mds"})), "lists x.mds, index.json does not"),
        (edit_shards(lambda shards: shards.reverse()), "lists the shards in another order than index.json"),
        (edit_shards(lambda shards: shards[0].update(size=9)), "says size 9 of shard.00000.mds, index.json"),
        (edit_shards(lambda shards: shards[0].update(num_samples=9)), "says num_samples 9 of shard.00000.mds"),
        (edit_shards(lambda shards: shards[0].update(xxh3_64="0")), "says xxh3_64 '0' of shard.00000.mds, index.json"),
        (
            edit_dataset(lengths=["0" * 32]),
            f"is missing, {DATASET_NAME} lists it: write it again with lmms-stream index",
        ),
        (edit_dataset(other_files=["_lmms/more.json"]), f"_lmms/more.json is missing, {DATASET_NAME} lists it"),
        (edit_dataset(other_files=["../secret"]), "names '../secret', which is not a plain path below the dataset"),
        (edit_dataset(lengths=["../x"]), "names '../x', which is not a plain path below the dataset: refused"),
        (lambda folder: (folder / DATASET_NAME).write_text("[]"), "not the description of a dataset"),
        (lambda folder: (folder / INDEX_NAME).unlink(), f"{INDEX_NAME} is missing, so no shard was checked"),
    ],
)
def test_a_description_that_disagrees_is_a_problem(damage: Damage, problem: str, chats: Path) -> None:
    damage(chats)
    assert problem in the_problem(verify_dataset(str(chats)))


def write_samples(folder: Path, columns: Mapping[str, str], samples: list[dict[str, Any]]) -> str:
    with MDSWriter(columns=dict(columns), out=str(folder), hashes=["xxh3_64"]) as writer:
        for sample in samples:
            writer.write(sample)
    return str(folder)


def tokens_sample(num_tokens: int, *spans: tuple[int, int]) -> dict[str, Any]:
    return {
        "input_ids": np.arange(num_tokens, dtype=np.int32),
        "loss_spans": np.array(spans, np.int32).reshape(-1, 2),
    }


def test_a_deep_check_finds_samples_that_do_not_fit_their_schema(tmp_path: Path) -> None:
    columns = {"input_ids": "ndarray:int32", "loss_spans": "ndarray:int32"}
    samples = [tokens_sample(5, (1, 3)), tokens_sample(5, (1, 9)), tokens_sample(5, (3, 4), (1, 2))]
    remote = write_samples(tmp_path / "tokens", columns, samples)
    assert described(verify_dataset(remote)) == []
    assert described(verify_dataset(remote, deep=True)) == [
        "sample 1 (number 1 of shard.00000.mds) loss span [1, 9) lies outside the sample's 5 tokens: convert the "
        "dataset again",
        "sample 2 (number 2 of shard.00000.mds) loss span [1, 2) comes after a span that begins later: sort the "
        "spans: convert the dataset again",
    ]
    image = {"type": "image", "mime": "image/png", "span": [0, 4]}

    def message(*content: Any) -> dict[str, Any]:
        return {"messages": json.dumps([{"role": "user", "content": list(content)}]), "media": b"four"}

    samples = [
        message(image, {"type": "text", "text": "?"}),
        message(image | {"span": [1, 4]}),
        message(image | {"span": "all"}),
        message({"type": "text"}),
        {"messages": "{", "media": b""},
        {"messages": "[1]", "media": b""},
        {"messages": '[{"role": "user", "content": 7}]', "media": b""},
        {"messages": "{}", "media": b""},
    ]
    found = described(
        verify_dataset(write_samples(tmp_path / "m", {"messages": "str", "media": "bytes"}, samples), deep=True)
    )
    for number, what in enumerate(
        (
            "a part of type 'image' lies at bytes [1, 5) of 4 bytes of media: convert the dataset again",
            "has no span [offset, size] but 'all'",
            "a part of a message is neither text nor media",
            "its messages are not JSON",
            "a message has no role",
            "the content of a message is int",
            "its messages are not a list of messages",
        ),
        start=1,
    ):
        assert found[number - 1].startswith(f"sample {number} (number {number} of shard.00000.mds)")
        assert what in found[number - 1]
    assert len(found) == 7


def test_lengths_that_disagree_with_the_samples_are_listed_up_to_a_number_a_shard(tmp_path: Path) -> None:
    lengths = write_tokens(tmp_path, num_samples=NUM_SAMPLES)
    lengths[[3, 200]] += 1
    LengthIndex.from_array(lengths, fingerprint=TOKENS).write(tmp_path)
    assert described(verify_dataset(str(tmp_path))) == []
    for num_workers in (1, 2):
        first, second = described(verify_dataset(str(tmp_path), deep=True, num_workers=num_workers))
        assert first == (
            f"sample 3 (number 3 of shard.00000.mds) has {lengths[3] - 1} tokens, its lengths index says {lengths[3]}: "
            "write it again with lmms-stream index"
        )
        assert second.startswith("sample 200 (number ")
    columns = {"input_ids": "ndarray:int32", "loss_spans": "ndarray:int32"}
    many = write_samples(tmp_path / "many", columns, [tokens_sample(2, (0, 9)) for _ in range(MAX_LISTED + 5)])
    found = described(verify_dataset(many, deep=True, num_workers=1))
    assert len(found) == MAX_LISTED + 1
    assert found[-1].startswith("shard.00000.mds has 5 more samples with problems")


def test_torn_samples_are_found_by_a_deep_check(tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=NUM_SAMPLES)
    data = bytearray((tmp_path / SHARD).read_bytes())
    begin = int.from_bytes(data[4:8], "little")
    data[begin : begin + 4] = (1 << 30).to_bytes(4, "little")
    (tmp_path / SHARD).write_bytes(data)
    changed, torn = described(verify_dataset(str(tmp_path), deep=True, num_workers=1))
    assert "was changed" in changed
    assert f"(number 0 of {SHARD}) cannot be decoded (" in torn
    assert torn.endswith("upload it again, or convert the dataset again")


def test_a_tokenizer_that_did_not_measure_the_dataset_is_a_problem(
    corpus: Corpus, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    convert([corpus.functions], str(tmp_path))
    problem = the_problem(verify_dataset(str(tmp_path), deep=True, processor=chat_processor, num_workers=1))
    assert "is missing: the dataset has no lengths index for this tokenizer; pass the one that measured it" in problem


def test_a_process_that_dies_is_an_error(tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=NUM_SAMPLES)
    died = (
        r"worker process \d+ ended \(status 3\) at shard\.0000\d\.mds: run the same command again, with fewer --workers"
    )
    with pytest.raises(WorkerError, match=died):
        verify_dataset(str(tmp_path), deep=True, processor=Dying(), num_workers=2)


def test_settings_that_contradict_are_refused(chat_processor: ChatProcessor, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"holds no dataset \(index\.json is missing\): check the path or URL"):
        verify_dataset(str(tmp_path / "none"))
    for name, named in (("a", "a"), ("b", "a, b"), ("c", "a, b, c"), ("d", "a, b, c, …")):
        write_tokens(tmp_path / "all" / name, num_samples=1)
        with pytest.raises(StorageError, match=rf"but folders in it do \({named}\): name one of these, or make one"):
            verify_dataset(str(tmp_path / "all"))
    write_tokens(tmp_path / "tokens", num_samples=10)
    with pytest.raises(ConfigError, match="holds tokens, and this processor reads messages: leave --tokenizer out"):
        verify_dataset(str(tmp_path / "tokens"), deep=True, processor=chat_processor)
    with pytest.raises(ConfigError, match="samples are measured by a deep check only: pass --deep as well"):
        verify_dataset(str(tmp_path / "tokens"), processor=chat_processor)
    with pytest.raises(ConfigError, match="the number of workers must be at least 1, got 0"):
        verify_dataset(str(tmp_path / "tokens"), num_workers=0)


def test_the_command_lists_problems_and_says_so_by_its_status(chats: Path, tokenizer: Path) -> None:
    result = run_cli("verify", str(chats), "--deep", "--tokenizer", str(tokenizer), "--workers", "2")
    assert result.returncode == 0, result.stderr
    assert "no problems" in result.stdout
    (chats / "shard.00000.mds").unlink()
    result = run_cli("verify", str(chats))
    assert result.returncode == 1
    assert "shard.00000.mds is missing: upload it again, or convert the dataset again" in result.stdout
    result = run_cli("verify", str(chats), "--json")
    assert result.returncode == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["where"] == "shard.00000.mds"


class Marked(encodings.Encoding):
    """An encoding that a program registers."""

    def encode(self, obj: Any) -> bytes:
        return b"+" + str(obj).encode()

    def decode(self, data: bytes) -> Any:
        if not data.startswith(b"+"):
            raise ValueError("no mark")
        return data[1:].decode()


def test_damage_in_an_encoding_that_the_program_registered_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(encodings._encodings, "marked", Marked)
    with MDSWriter(columns={"text": "marked"}, out=str(tmp_path), size_limit=400) as writer:
        for number in range(100):
            writer.write({"text": number})
    path = sorted(tmp_path.glob("*.mds"))[1]
    path.write_bytes(path.read_bytes().replace(b"+", b"-", 1))
    for num_workers in (1, 2):
        (problem,) = verify_dataset(str(tmp_path), deep=True, num_workers=num_workers).problems
        assert "cannot be decoded (marked: ValueError('no mark'))" in problem.what
