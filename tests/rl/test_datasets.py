"""Eager and lazy datasets give the same samples in the same order, of every kind of file."""

from __future__ import annotations

import concurrent.futures
import gzip
import itertools
import json
import multiprocessing
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.sources.sources import open_sources
from lmms_stream.doors.relax.cursor import BLOCK, SMALL, Permutation
from lmms_stream.doors.relax.rows import open_rows
from lmms_stream.errors import ConfigError, CursorError, DataError, ObjectChangedError, ObjectMissingError
from lmms_stream.rl import BaseDataset, Dataset, Sample, StreamingDataset
from lmms_stream.storage.storage import open_storage
from streaming import MDSWriter
from transformers import AutoTokenizer

from ..rounds import rounds
from ..strategies import examples
from .rows import KINDS, prompt, prompts, write_as, write_lines, write_parquet, write_shards

NUM_ROWS = 100
_reader: list[Callable[[int], tuple[list[Sample], int]]] = []


def _next_labels(count: int) -> list[int]:
    """In a forked process: of the dataset that its parent had."""
    return labels(_reader[0](count)[0])


def labels(samples: Any) -> list[int]:
    return [int(sample.label) for sample in samples]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    return {kind: write_as(kind, folder / kind, prompts(NUM_ROWS)) for kind in KINDS}


@pytest.fixture(scope="module")
def fast_tokenizer(tokenizer: Path) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_eager_and_lazy_datasets_give_the_same_samples_of_every_kind_of_file(kind: str, paths: dict[str, Path]) -> None:
    eager = Dataset(paths[kind], label_key="label")
    lazy = StreamingDataset(paths[kind], label_key="label")
    assert len(eager) == len(lazy) == NUM_ROWS
    assert labels(eager) == labels(lazy) == list(range(NUM_ROWS))
    assert eager[3].metadata == lazy[3].metadata == {"number": 3}
    for epoch in (0, 3):
        eager.shuffle(epoch)
        lazy.shuffle(epoch)
        assert list(eager) == list(lazy)
        assert sorted(labels(eager)) == list(range(NUM_ROWS)) != labels(eager)
        assert eager.samples[0:32] == lazy.samples[0:32] == list(itertools.islice(lazy, 32))
        assert eager[-1] == lazy[-1] == lazy.samples[-5:][-1]
        assert lazy.samples[0:0] == []
        assert labels(eager.origin_samples) == list(range(NUM_ROWS))
    with pytest.raises(IndexError, match="sample 100 of a dataset of 100 rows"):
        lazy[NUM_ROWS]
    with pytest.raises(IndexError, match="a sample before the first"):
        lazy[-NUM_ROWS - 1]


def looked_at(dataset: BaseDataset, number: int) -> Sample | str:
    try:
        return dataset[number]
    except IndexError as error:
        return str(error)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), st.integers(0, 70)),
        st.tuples(st.just("shuffle"), st.integers(0, 3)),
        st.tuples(st.just("reopen"), st.just(0)),
        st.tuples(st.just("look"), st.integers(0, 24)),
    ),
    max_size=12,
)


@examples(64)
@given(
    steps=steps,
    kind=st.sampled_from(KINDS),
    max_length=st.sampled_from([None, 4]),
    buffer_size=st.integers(0, 40),
    chunk_size=st.integers(1, 40),
    max_cached=st.integers(0, 90),
)
def test_eager_and_lazy_datasets_agree_whatever_is_done_with_them(
    steps: list[tuple[str, int]],
    kind: str,
    max_length: int | None,
    buffer_size: int,
    chunk_size: int,
    max_cached: int,
    paths: dict[str, Path],
    fast_tokenizer: Any,
) -> None:
    def open_eager() -> BaseDataset:
        return Dataset(str(paths[kind]) + "@[10:-30]", fast_tokenizer, None, max_length, label_key="label")

    def open_lazy() -> StreamingDataset:
        return StreamingDataset(
            str(paths[kind]) + "@[10:-30]", fast_tokenizer, None, max_length, label_key="label",
            buffer_size=buffer_size, prefetch_chunk_size=chunk_size, prefetch_max_cached=max_cached,
        )  # fmt: skip

    eager, lazy = open_eager(), open_lazy()
    for what, number in steps:
        if what == "batch":
            found, expected = lazy.get_batch(number), eager.get_batch(number)
            assert found == expected
            assert len(found[0]) == number
        elif what == "shuffle":
            eager.shuffle(number)
            lazy.shuffle(number)
        elif what == "look":
            assert looked_at(lazy, number) == looked_at(eager, number)
        else:
            states = eager.state_dict(), lazy.state_dict()
            assert states[0] == states[1]
            lazy.close()
            eager, lazy = open_eager(), open_lazy()
            eager.load_state_dict(json.loads(json.dumps(states[1])))
            lazy.load_state_dict(json.loads(json.dumps(states[0])))
    assert (eager.epoch_id, eager.position) == (lazy.epoch_id, lazy.position)
    lazy.close()


@pytest.mark.parametrize("kind", ["eager", "lazy"])
def test_a_batch_has_all_its_samples_and_counts_each_end_of_an_epoch(kind: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(10))
    dataset = Dataset(path, label_key="label") if kind == "eager" else StreamingDataset(path, label_key="label")
    assert [labels(dataset.get_batch(5)[0]) for _ in range(2)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert dataset.epoch_id == 0  # an epoch that was read to its end is passed by the next batch
    batch, crossed = dataset.get_batch(35)
    assert (len(batch), crossed, dataset.epochs_crossed, dataset.epoch_id) == (35, True, 4, 4)
    assert labels(batch) == [*range(10)] * 3 + [*range(5)]
    assert dataset.get_batch(0) == ([], False)
    given: Any = "3"
    with pytest.raises(ConfigError, match="the number of samples must be a whole number, got '3': write 3"):
        dataset.get_batch(given)
    with pytest.raises(ConfigError, match="an epoch's number must be a whole number, got '3': write 3"):
        dataset.shuffle(given)


def test_each_epoch_has_an_order_of_its_own_that_seed_and_epoch_tell(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(50))
    dataset = StreamingDataset(path, label_key="label", shuffle=True)
    epochs = [labels(dataset.get_batch(50)[0]) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    other = Dataset(path, label_key="label")
    other.shuffle(1)
    assert labels(other) == epochs[1]
    other.get_batch(7)
    other.shuffle(1)  # nothing, at the same epoch
    assert (other.position, labels(other)) == (7, epochs[1])
    other.shuffle(0)  # of the rows' order, not of the last one
    assert labels(other) == epochs[0]
    assert labels(Dataset(path, label_key="label")) == list(range(50))  # nothing is shuffled unasked


def test_what_is_too_long_is_dropped_and_counted_once(tmp_path: Path, fast_tokenizer: Any) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(70))
    texts = [row["text"] for row in prompts(70)]
    lengths = [len(ids) for ids in fast_tokenizer(texts, add_special_tokens=False)["input_ids"]]
    limit = sorted(lengths)[35]
    kept = [number for number, length in enumerate(lengths) if length <= limit]
    assert 0 < len(kept) < 70
    eager = Dataset(path, fast_tokenizer, None, limit, label_key="label")
    lazy = StreamingDataset(path, fast_tokenizer, None, limit, label_key="label")
    assert len(eager) == len(kept)
    assert eager.num_overlong == 70 - len(kept)
    assert lazy.num_overlong == 0
    assert lazy[len(kept) - 1] == eager[-1] == lazy[-1]
    batch, crossed = lazy.get_batch(2 * len(kept) + 1)
    assert (labels(batch), crossed, lazy.epochs_crossed) == (kept * 2 + kept[:1], True, 2)
    assert lazy.num_overlong == eager.num_overlong
    for dataset in (eager, lazy):
        with pytest.raises(IndexError):
            dataset[len(kept)]
    nothing = StreamingDataset(path, fast_tokenizer, None, limit, system_prompt="very " * 99, apply_chat_template=True)
    with pytest.raises(DataError, match=r"no sample is left of 70 rows \(70 have more tokens than max_length"):
        nothing.get_batch(1)


@pytest.mark.parametrize("prefetch", [0, 256])
def test_a_row_that_cannot_be_read_is_an_error_that_names_it_or_is_counted(prefetch: int, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(30), blank_every=4)
    lines = path.read_text().splitlines(keepends=True)
    broken = next(number for number, line in enumerate(lines) if '"label": "20"' in line)
    lines[broken] = "{broken\n"
    path.write_text("".join(lines))
    with pytest.raises(DataError, match=rf"rows\.jsonl:{broken + 1}: not valid JSON"):
        Dataset(path)
    lazy = StreamingDataset(path, label_key="label", prefetch_max_cached=prefetch)
    assert labels(lazy.get_batch(20)[0]) == list(range(20))
    for _ in range(2):  # the batch can be asked for again
        with pytest.raises(DataError, match=rf"rows\.jsonl:{broken + 1}: not valid JSON"):
            lazy.get_batch(5)
    skipping = StreamingDataset(path, label_key="label", on_error="skip", prefetch_max_cached=prefetch)
    assert labels(skipping) == [number for number in range(30) if number != 20]
    assert skipping.num_unreadable == Dataset(path, on_error="skip").num_unreadable == 1
    with pytest.raises(DataError, match=r"other\.jsonl: row 1: 'prompt' is missing, not a text .*prompt_key"):
        Dataset(write_lines(tmp_path / "other.jsonl", prompts(1)), prompt_key="prompt")


def test_prefetch_follows_shuffle_and_a_loaded_state(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(60))
    lazy = StreamingDataset(path, label_key="label", prefetch_chunk_size=4, prefetch_max_cached=40)
    plain = Dataset(path, label_key="label")
    lazy.get_batch(5)
    for epoch in (1, 2, 1):
        lazy.shuffle(epoch)
        plain.shuffle(epoch)
        assert lazy.get_batch(9) == plain.get_batch(9)
    state = lazy.state_dict()
    expected = lazy.get_batch(30)
    lazy.load_state_dict(state)
    assert lazy.get_batch(30) == expected


def test_a_dataset_tells_its_counts_and_its_place_by_relaxs_names(tmp_path: Path, fast_tokenizer: Any) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(20))
    plain = StreamingDataset(path, label_key="label")
    first, second = plain[0], plain[1]
    assert (len(plain.buffer), plain.buffer.get(0), plain.buffer.get(1)) == (2, first, second)
    assert plain.buffer.get(7) is None
    lazy = StreamingDataset(path, fast_tokenizer, None, 12, label_key="label", prefetch_max_cached=0)
    samples, _ = lazy.get_batch(8)
    stats = lazy.get_stats()
    dropped = lazy.position - 8
    assert (stats["total_size"], stats["current_epoch"], stats["current_position"]) == (20, 0, lazy.position)
    assert (stats["buffer_size"], stats["total_processed"]) == (lazy.position, lazy.position)
    assert stats["filter_count"] == dropped == lazy.num_overlong > 0
    assert stats["buffer_hit_rate"] == 0
    assert plain.get_stats()["buffer_hit_rate"] == 2 / 5
    state = lazy.get_state()
    assert (state["epoch_id"], state["position"], state["filter_count"]) == (0, lazy.position, dropped)
    eager = Dataset(path, fast_tokenizer, None, 12, label_key="label")
    eager.load_state(state)
    assert eager.get_batch(5)[0] == lazy.get_batch(5)[0]
    lazy.index_manager.reset(position=3, epoch_id=1)
    eager.shuffle(1)
    eager.index_manager.position = 3
    assert lazy.get_batch(5)[0] == eager.get_batch(5)[0] != samples[:5]


def test_a_folder_of_several_splits_is_read_by_one_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    for split, number in (("train", 5), ("test", 2)):
        lines = "".join(json.dumps({"prompt": f"{split} {i}"}) + "\n" for i in range(number))
        (folder / f"{split}-00000-of-00001.jsonl").write_text(lines)
    with pytest.raises(DataError, match=r"prompts: holds splits test \(1 files\), train .* or several in a list$"):
        open_rows(folder)
    assert open_rows(f"{folder}?split=train").num_rows == 5
    assert open_rows(f"[{folder}?split=train@[1:3], {folder}?split=test]").num_rows == 4
    with pytest.raises(DataError, match=r"holds no files of split dev, found test .* correct \?split="):
        open_rows(f"{folder}?split=dev")
    (folder / "README.md").write_text("---\nconfigs: [{config_name: a, data_files: train-*.jsonl},"
                                      " {config_name: b, data_files: test-*.jsonl}]\n---\n")  # fmt: skip
    with pytest.raises(DataError, match="holds 2 configurations, a, b: name one, as "):
        open_rows(folder)
    assert open_rows(f"{folder}?config=b").num_rows == 2


def test_the_files_of_a_folder_are_chosen_as_for_a_conversion(tmp_path: Path) -> None:
    rows, folder = prompts(3), tmp_path / "prompts"
    write_lines(folder / "lang=en" / "a.jsonl", rows)
    write_lines(folder / "lang=en" / ".ipynb_checkpoints" / "a-checkpoint.jsonl", rows)
    (tmp_path / "elsewhere").mkdir()
    write_lines(tmp_path / "elsewhere" / "B.JSONL", rows)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "notes.txt").write_text("notes")
    lazy = StreamingDataset(folder, label_key="lang", on_error="skip")
    assert [sample.label for sample in lazy] == ["en"] * 3  # those that are linked have no language
    assert lazy.num_rows == 6
    for name, message in (
        ("lang=en/a.parquet", "another format, and rows would be read twice: remove one, or name the files .* in"),
        ("b.json", r"holds several formats: 1 json, 2 jsonl: name the files to be read in a list"),
        ("c.jsonl.gz", r"holds c\.jsonl\.gz, whose rows are not read: unpack or convert it, or name the files to be"),
        (
            "d-00000-of-00002.jsonl",
            "1 of the 2 files d-NNNNN-of-00002: download the missing files, or name the existing files in a list",
        ),
        ("_delta_log/0.json", "the log is not read: .* or name the valid files in a list"),
        ("e.jsonl.part", "unpack it or complete its download, or name the files to read in a list"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        if name.endswith(".parquet"):
            write_parquet(folder / name, rows)
        elif name.endswith(".gz"):
            (folder / name).write_bytes(gzip.compress(b"{}"))
        else:
            write_lines(folder / name, rows)
        with pytest.raises(DataError, match=message):
            open_rows(folder)
        (folder / name).unlink()
        (folder / "_delta_log").rmdir() if name.startswith("_delta") else None


def test_paths_are_files_folders_and_lists_with_slices_of_each_and_of_all(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "all" / "a.jsonl", prompts(10))
    b = write_parquet(tmp_path / "all" / "sub" / "b.parquet", prompts(10))
    (tmp_path / "all" / "README.md").write_text("not data")
    for path, expected in (
        (f"{a}@[2:5]", [2, 3, 4]),
        (f"{a}@[-3:]", [7, 8, 9]),
        (f"{a}@[:-8]", [0, 1]),
        (f"{a}@[0:0]", []),
        (f"{tmp_path}/all@[8:12]", [8, 9, 0, 1]),
        (f"[{a}@[:2], {b}@[:3]]", [0, 1, 0, 1, 2]),
        (f"['{b}', '{a}']@[9:11]", [9, 0]),
        ([f"{b}@[1:2]", a], [1, *range(10)]),
    ):
        for dataset in (Dataset(path, label_key="label"), StreamingDataset(path, label_key="label")):
            assert labels(dataset) == expected, path
            assert len(dataset) == len(expected)
    with pytest.raises(DataError, match=r"no sample is left of 0 rows"):
        Dataset(f"{a}@[0:0]").get_batch(1)
    wrong: list[tuple[str | Path, type[Exception], str]] = [
        (f"{a}@[1:2:3]", ConfigError, r"@\[1:2:3\] is no slice of rows: write @\[START:STOP\]"),
        ("[]", ConfigError, "names no files"),
        ("", ConfigError, "names no file"),
        (tmp_path / "none.jsonl", ObjectMissingError, "does not exist"),
        (tmp_path / "none", ObjectMissingError, "does not exist, or is empty"),
        (tmp_path / "all" / "README.md", DataError, r"expected a name that ends in .jsonl or .parquet"),
    ]
    for named, error, message in wrong:
        with pytest.raises(error, match=message):
            Dataset(named)
    b.unlink()
    a.unlink()
    with pytest.raises(DataError, match=r"none of its 1 files has the extension .jsonl or .parquet"):
        Dataset(tmp_path / "all")


def test_a_file_that_is_changed_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(10))
    lazy = StreamingDataset(path)
    write_lines(path, prompts(11))
    with pytest.raises(ObjectChangedError, match=r"rows\.jsonl was changed during reading"):
        lazy.get_batch(1)


def test_a_parquet_file_that_is_replaced_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", prompts(21))
    lazy = StreamingDataset(path, label_key="label", prefetch_max_cached=0)
    assert labels(lazy.get_batch(7)[0]) == list(range(7))
    write_parquet(path, prompts(42)[21:])
    with pytest.raises(ObjectChangedError, match=r"rows\.parquet was changed during reading"):
        lazy.get_batch(7)


def test_lines_of_all_kinds_of_white_space_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row).encode() for row in prompts(200)]
    white = [b"", b"\x0c", b"\x0b \r", b" " * 70_000, b"\t"]
    path.write_bytes(b"\n".join(line for number, row in enumerate(lines) for line in (white[number % 5], row)))
    lazy = StreamingDataset(path, label_key="label")
    assert labels(lazy) == list(range(200))
    lazy.shuffle(3)
    assert sorted(labels(lazy)) == list(range(200))
    path.write_bytes(path.read_bytes().replace(b'"label": "77"', b'"label": "7'))
    with pytest.raises(DataError, match=rf"rows\.jsonl:{2 * 77 + 2}: not valid JSON"):
        list(StreamingDataset(path, label_key="label"))


@pytest.mark.parametrize("longest", [10, 40_000, 3_000_000])
def test_lines_of_any_length_are_found_in_any_order(longest: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(longest)
    num_rows, num_asked = (16, 30) if longest > 10**6 else (300, 100)
    texts = ["é" * int(length) + "x" for length in rng.integers(0, longest, num_rows)]
    path = write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    lazy = StreamingDataset(path, prefetch_max_cached=0, buffer_size=0)
    for numbers in (rng.permutation(len(texts)), rng.integers(0, len(texts), num_asked), np.arange(len(texts))):
        found = lazy._outcomes(numbers)
        assert all(
            isinstance(each, Sample) and each.prompt == texts[at] for each, at in zip(found, numbers, strict=True)
        )


MAP = pyarrow.map_(pyarrow.string(), pyarrow.int64())


def mixed_table() -> pyarrow.Table:
    """Rows of types that Python has no values for, or other values; row 150 has a date beyond Python's years."""
    numbers = range(400)
    days = pyarrow.array([10**7 if number == 150 else number for number in numbers], pyarrow.int32())
    labels = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}}}}
    return pyarrow.table(
        {
            "text": [None if number % 7 == 0 else f"row {number}" for number in numbers],
            "day": days.cast(pyarrow.date32()),
            "kind": pyarrow.array([f"k{number % 3}" for number in numbers]).dictionary_encode(),
            "part": [{"a": number} if number % 2 else {"a": number, "b": "b"} for number in numbers],
            "price": pyarrow.array([Decimal(number) / 4 for number in numbers], pyarrow.decimal128(12, 2)),
            "map": pyarrow.array(
                [[("x", number)] for number in numbers], pyarrow.map_(pyarrow.string(), pyarrow.int64())
            ),
            "label": [number % 2 for number in numbers],
        }
    ).replace_schema_metadata({"huggingface": json.dumps(labels)})


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_row_is_the_same_as_in_a_conversion_in_any_order(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(mixed_table(), path, row_group_size=130)
    else:
        lines = [json.dumps({"text": f"row {number}", "n": [number, {"a": None}]}) for number in range(400)]
        lines[150], lines[200] = '{"text": "row 150", "n": ', ""
        path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    (source,) = open_sources([str(path)], scratch=tmp_path / "scratch", unit_bytes=lambda _: 3000)
    expected = [(row.values, row.error) for unit in source.units() for row in unit.rows()]
    source.close()
    order = np.random.default_rng(1).permutation(len(expected))
    rows = open_rows(path).read(order).rows
    assert len(rows) == len(expected) == 400 - (kind == "jsonl")
    for row, number in zip(rows, order.tolist(), strict=True):
        values, error = expected[number]
        assert number == 150 or values is not None
        assert row == values if values is not None else error.partition(" (")[0] in str(row)


def test_a_process_that_is_forked_while_samples_are_made_in_the_background_reads_on(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(3000))
    lazy = StreamingDataset(path, label_key="label", prefetch_chunk_size=200, prefetch_max_cached=2000)
    lazy.get_batch(7)
    _reader[:] = [lazy.get_batch]
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        found = pool.submit(_next_labels, 600).result(timeout=60)
    _reader.clear()
    assert found == labels(lazy.get_batch(600)[0])


def test_what_threads_have_not_begun_is_made_by_who_asks_for_it(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(100))
    may_go_on, begun = threading.Event(), threading.Event()
    makers: list[str] = []

    def slowly(prompt: str, row: dict[str, Any]) -> str:
        makers.append(threading.current_thread().name)
        if int(row["label"]) == 10:
            begun.set()
            assert may_go_on.wait(60)
        return prompt

    lazy = StreamingDataset(
        path, label_key="label", custom_prompt_func=slowly, prefetch_chunk_size=10, prefetch_max_cached=50
    )
    assert labels(lazy.get_batch(10)[0]) == list(range(10))
    assert begun.wait(60)  # the second chunk is being made by a thread, and those after it wait
    threading.Timer(0.01, may_go_on.set).start()
    assert labels(lazy.get_batch(60)[0]) == list(range(10, 70))
    assert threading.current_thread().name in makers[20:]
    lazy.close()


def test_what_is_no_state_or_stands_beyond_the_rows_is_refused(tmp_path: Path) -> None:
    dataset = Dataset(write_lines(tmp_path / "rows.jsonl", prompts(10)), label_key="label")
    none: Any
    for none in (None, [], "state"):
        for load in (dataset.load_state, dataset.load_state_dict):
            with pytest.raises(CursorError, match="the state is not a dataset's: it has no 'digest'"):
                load(none)
    with pytest.raises(CursorError, match="the state is not a dataset's: it has no 'digest'"):
        dataset.load_state_dict({"sample_offset": 3, "epoch_id": 0})
    with pytest.raises(CursorError, match=r"the state's position is row 11 of epoch 0, which does not exist \(10"):
        dataset.load_state_dict({**dataset.state_dict(), "position": 11})
    with pytest.raises(ConfigError, match="the number of samples must be at least 0, got -1"):
        dataset.get_batch(-1)
    assert dataset.samples[np.int64(3)] == dataset[3]  # type: ignore[call-overload]


def test_a_state_is_refused_by_other_data_and_another_seed(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", prompts(10))
    dataset = Dataset(a)
    dataset.shuffle(1)
    moved = a.rename(tmp_path / "moved.jsonl")
    StreamingDataset(moved).load_state_dict(dataset.state_dict())
    others: Iterator[Path | str] = iter(
        (write_lines(tmp_path / "b.jsonl", prompts(11)), f"{moved}@[:9]", write_shards(tmp_path / "c", prompts(10)))
    )
    for other in others:
        with pytest.raises(CursorError, match=r"the state belongs to other data \(10 rows"):
            StreamingDataset(other).load_state_dict(dataset.state_dict())
    with pytest.raises(CursorError, match="the state follows seed 42 and this dataset has seed 43"):
        Dataset(moved, seed=43).load_state_dict(dataset.state_dict())


@pytest.mark.parametrize("kind", ["mds", "parquet"])
def test_a_state_is_refused_by_rows_in_another_order_in_files_of_the_same_sizes(kind: str, tmp_path: Path) -> None:
    rows = [{"text": f"{number:04}", "label": str(number % 10)} for number in range(40)]
    swapped = [rows[0], rows[7], *rows[2:7], rows[1], *rows[8:]]

    def write(folder: Path, written: list[dict[str, str]]) -> Path:
        if kind == "parquet":
            return write_parquet(folder / "rows.parquet", written, group_rows=20)
        with MDSWriter(columns={"text": "str", "label": "str"}, out=str(folder), size_limit=1 << 9) as writer:
            for row in written:
                writer.write(row)
        return folder

    dataset = Dataset(write(tmp_path / "a", rows))
    state = dataset.state_dict()
    other = StreamingDataset(write(tmp_path / "b", swapped))
    assert [each.prompt for each in other.samples[0:40]] != [each.prompt for each in dataset.samples]
    with pytest.raises(CursorError, match=r"the state belongs to other data \(40 rows"):
        other.load_state_dict(state)
    StreamingDataset(write(tmp_path / "c", rows)).load_state_dict(state)
    earlier = {**state, "digest": open_rows(tmp_path / "a" / ("rows.parquet" * (kind == "parquet"))).old_digest}
    assert earlier != state
    StreamingDataset(tmp_path / "c" / ("rows.parquet" * (kind == "parquet"))).load_state_dict(earlier)


@pytest.mark.parametrize("kind", ["mds", "parquet"])
def test_a_state_is_refused_by_rows_in_another_order_in_the_middle_of_large_files(kind: str, tmp_path: Path) -> None:
    rows = [{"text": f"{number:04} {random.Random(number).randbytes(500).hex()}"} for number in range(1000)]
    middle = 500  # between the pieces that are sampled
    swapped = [*rows[:middle], rows[middle + 1], rows[middle], *rows[middle + 2 :]]

    def write(folder: Path, written: list[dict[str, str]]) -> Path:
        if kind == "parquet":
            return write_parquet(folder / "rows.parquet", written, group_rows=1000)
        with MDSWriter(columns={"text": "str"}, out=str(folder)) as writer:
            for row in written:
                writer.write(row)
        return folder

    dataset, other = Dataset(write(tmp_path / "a", rows)), StreamingDataset(write(tmp_path / "b", swapped))
    state = dataset.state_dict()
    assert other.digest == dataset.digest
    with pytest.raises(CursorError, match=r"the state belongs to other data \(1000 rows"):
        other.load_state_dict(state)
    earlier = {name: value for name, value in state.items() if name != "all_bytes"}
    same = StreamingDataset(write(tmp_path / "c", rows))
    for each in (state, earlier, {**state, "all_bytes": None}):  # of earlier releases, and of files in a store
        same.load_state_dict(each)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": "7"}, "seed must be a whole number, got '7': write 7"),
        ({"prompt_keys": "x"}, "StreamingDataset takes no prompt_keys: did you mean 'prompt_key'"),
        ({"bufer_size": 1}, "StreamingDataset takes no bufer_size: did you mean 'buffer_size'"),
        ({"apply_chat_template_kwargs": [1]}, r"apply_chat_template_kwargs must be a dict, got \[1\]: write"),
        ({"custom_prompt_func": "a.b"}, r"custom_prompt_func must be a function of \(prompt, row\), got 'a.b'"),
        ({"on_error": "ignore"}, "on_error must be 'error' or 'skip', got 'ignore'"),
        ({"use_audio_in_video": True}, "use_audio_in_video is not supported"),
        ({"multimodal_config": {}}, "multimodal_config must be a MultimodalConfig, got {}"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"max_length": "512"}, "max_length must be a whole number of tokens, got '512'"),
        ({"multimodal_keys": "image"}, "multimodal_keys must be a kind of media -> column, got 'image'"),
        ({"max_length": 9}, "apply_chat_template and max_length need a tokenizer"),
        ({"multimodal_keys": {"smell": "x"}}, "media of kind 'smell': expected image, video, audio"),
        ({"apply_chat_template_kwargs": {"tokenize": True}}, "cannot set 'tokenize'"),
        ({"buffer_size": -1}, "buffer_size must be at least 0, got -1"),
        ({"prefetch_chunk_size": 0}, "prefetch_chunk_size must be at least 1, got 0"),
        ({"prefetch_max_cached": -1}, "prefetch_max_cached must be at least 0, got -1"),
        ({"prefetch_num_workers": 0}, "prefetch_num_workers must be at least 1, got 0"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(1))
    with pytest.raises(ConfigError, match=message):
        StreamingDataset(path, **wrong)


def test_files_and_shards_in_a_store_are_read(s3_folder: str, tmp_path: Path) -> None:
    store = open_storage(s3_folder)
    for kind in ("jsonl", "parquet", "mds"):
        path = write_as(kind, tmp_path / kind, prompts(20))
        for file in [path] if path.is_file() else path.iterdir():
            store.upload(file, f"{kind}/{file.name}")
        here = Dataset(path, label_key="label")
        for there in (
            f"{s3_folder}/{kind}/{path.name}" if path.is_file() else f"{s3_folder}/{kind}",
            f"{s3_folder}/{kind}",
        ):
            lazy = StreamingDataset(f"{there}@[5:]", label_key="label")
            assert labels(lazy) == list(range(5, 20))
            assert StreamingDataset(there).digest == here.digest


class CountingStore:
    """Requests for ranges and whole objects of a store, while they are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        from lmms_stream.storage.s3 import S3Storage

        self.ranges: list[int] = []
        self.whole: list[str] = []
        read_range, download = S3Storage.read_range, S3Storage.download

        def counted_range(store: S3Storage, key: str, *, start: int, stop: int, tag: str) -> bytes:
            self.ranges.append(stop - start)
            return read_range(store, key, start=start, stop=stop, tag=tag)

        def counted_download(store: S3Storage, key: str, path: Path) -> None:
            self.whole.append(key)
            download(store, key, path)

        monkeypatch.setattr(S3Storage, "read_range", counted_range)
        monkeypatch.setattr(S3Storage, "download", counted_download)


def test_parquet_in_a_store_and_lines_beyond_the_limit_are_read_by_ranges(
    s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    rows = [prompt(number) | {"unread": rng.bytes(2500).hex()} for number in range(400)]
    lines = write_lines(tmp_path / "a.jsonl", rows, blank_every=7)
    parquet = write_parquet(tmp_path / "b.parquet", rows, group_rows=50)
    store = open_storage(s3_folder)
    for path in (lines, parquet):
        store.upload(path, f"rows/{path.name}")
    here = Dataset([lines, parquet], label_key="label")
    here.shuffle(1)
    counted = CountingStore(monkeypatch)
    there = StreamingDataset(
        f"{s3_folder}/rows",
        label_key="label",
        cache_limit=lines.stat().st_size - 1,
        prefetch_max_cached=0,
        buffer_size=0,
    )
    assert there.digest == here.digest
    assert counted.whole == []
    assert sum(counted.ranges) < lines.stat().st_size + parquet.stat().st_size // 2  # lines are looked through once
    counted.ranges.clear()
    there.shuffle(1)
    assert there.get_batch(800) == here.get_batch(800)
    assert counted.whole == []
    counted.ranges.clear()
    assert [sample.label for sample in there.samples[0:3]] == [sample.label for sample in here.samples[0:3]]
    assert sum(counted.ranges) < lines.stat().st_size  # blocks of lines; row groups are on this node
    counted.ranges.clear()
    copied = StreamingDataset(f"{s3_folder}/rows/a.jsonl", label_key="label", cache_limit=lines.stat().st_size)
    assert labels(copied) == list(range(400))
    assert counted.ranges == []  # of its copy on this node, which an earlier run may have made
    store.write("rows/a.jsonl", lines.read_bytes()[:-9] + b"12345678\n")
    with pytest.raises(DataError, match=r"a\.jsonl was changed during reading"):
        [there[number] for number in range(800)]


@given(num_rows=st.integers(1, 3 * SMALL), seed=st.integers(0, 5), epoch=st.integers(0, 5))
@examples(40)
def test_an_order_has_each_row_once(num_rows: int, seed: int, epoch: int) -> None:
    order = Permutation(num_rows, seed=seed, epoch=epoch)
    rows = order(np.arange(num_rows))
    assert np.array_equal(np.sort(rows), np.arange(num_rows))
    some = np.arange(num_rows // 3, num_rows // 2)
    assert np.array_equal(order(some), rows[some])
    for start, stop in ((0, min(7, num_rows)), (num_rows // 3, min(num_rows, num_rows // 3 + BLOCK)), (0, num_rows)):
        assert np.array_equal(order.between(start, stop), rows[start:stop])


def test_a_large_order_is_as_even_as_chance() -> None:
    """Of neighbours in the order, distances are spread as those of independent numbers."""
    num_rows = SMALL * 3
    rows = Permutation(num_rows, seed=1, epoch=2)(np.arange(num_rows))
    counts, _, _ = np.histogram2d(rows[:-1], rows[1:], bins=16)
    expected = (num_rows - 1) / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert 150 < chi_squared < 380  # 255 degrees of freedom: mean 255, standard deviation 23
    assert not np.array_equal(rows, Permutation(num_rows, seed=1, epoch=3)(np.arange(num_rows)))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_a_lazy_dataset_keeps_in_memory_does_not_grow_with_the_rows(kind: str, tmp_path: Path) -> None:
    def kept_bytes(num_rows: int) -> int:
        rows = [{"text": "word " * 20, "label": str(number)} for number in range(num_rows)]
        path = tmp_path / f"{num_rows}.{kind}"
        if kind == "jsonl":
            write_lines(path, rows)
        else:
            write_parquet(path, rows, group_rows=20_000)
        del rows
        tracemalloc.start()
        lazy = StreamingDataset(path, label_key="label", buffer_size=64, shuffle=True)
        for _ in range(rounds(10, 3000)):
            lazy.get_batch(16)
        lazy.close()
        found, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return found

    kept_bytes(100)  # what is imported or compiled once
    num_rows = rounds(SMALL * 2, 300_000)
    assert kept_bytes(num_rows) - kept_bytes(2000) < 2 * num_rows  # bytes; offsets take one a row


def test_samples_are_copied_without_sharing_what_is_changed() -> None:
    sample = Sample(prompt=[{"role": "user", "content": "hi"}], multimodal_inputs={"images": [1]}, metadata={"a": [1]})
    sample.extra = [1]  # type: ignore[attr-defined]
    copied = sample.copy()
    assert vars(copied) == vars(sample)
    copied.metadata["a"].append(2)
    copied.tokens.append(3)
    copied.prompt[0]["content"] = "bye"  # type: ignore[index]
    assert (sample.metadata, sample.tokens, sample.prompt[0]["content"]) == ({"a": [1]}, [], "hi")  # type: ignore[index]
    assert copied.multimodal_inputs is sample.multimodal_inputs
    assert vars(Sample.from_dict(sample.to_dict())) == vars(sample)
    assert Sample(response_length=3).effective_response_length == 3
    assert Sample(response_length=3, loss_mask=[1, 0, 1]).effective_response_length == 2
