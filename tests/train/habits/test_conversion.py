"""A datasets.Dataset is converted once, by one rank, into a folder that the next run finds."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from lmms_stream.doors.huggingface.conversion import Conversion
from lmms_stream.doors.huggingface.rows import RowSettings
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.mds.core import PackedDataset
from lmms_stream.types import World
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from . import rows

Resolve = Callable[..., PackedDataset]


@pytest.fixture
def resolve(tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path) -> Resolve:
    """The train_dataset that is made of one, with options of SFTConfig."""

    def make(dataset: Any, **options: Any) -> PackedDataset:
        args = rows.config(tmp_path, **options)
        made = rows.resolved(model=str(model_folder), args=args, train_dataset=dataset, processing_class=tok)
        found: PackedDataset = made.train_dataset  # type: ignore[assignment]
        return found

    return make


def folder_of(dataset: PackedDataset) -> Path:
    return Path(dataset.url)


def test_a_dataset_is_converted_once_and_found_again(
    resolve: Resolve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lmms_stream")
    first = resolve(rows.chats(), packing=True, max_length=64)
    folder = folder_of(first)
    assert folder.parent == tmp_path / "datasets"
    assert f"converting train_dataset (12 rows) once, into {folder}" in caplog.text
    assert f"12 samples, {first.plan.num_tokens(0)} tokens, of 12 rows" in caplog.text
    written = (folder / "index.json").stat().st_mtime_ns
    caplog.clear()
    assert folder_of(resolve(rows.chats(), packing=True, max_length=128)) == folder
    assert caplog.messages == [f"train_dataset is found converted in {folder}"]
    assert (folder / "index.json").stat().st_mtime_ns == written
    assert sorted(path.suffix for path in folder.parent.iterdir()) == ["", ".lock", ".tokenizer"]


def test_what_makes_other_tokens_has_another_folder(resolve: Resolve, tok: PreTrainedTokenizerFast) -> None:
    folders = [folder_of(resolve(rows.chats())), folder_of(resolve(rows.chats(11)))]
    folders += [folder_of(resolve(rows.chats(), **{name: value})) for name, value in (
        ("max_length", 20), ("assistant_only_loss", True), ("eos_token", "<|user|>"),
    )]  # fmt: skip
    tok.chat_template = rows.CHATML
    folders.append(folder_of(resolve(rows.chats())))
    tok.add_tokens("unheard")
    folders.append(folder_of(resolve(rows.chats())))
    assert len(set(folders)) == len(folders)


def test_a_cache_folder_may_be_named(resolve: Resolve, tmp_path: Path) -> None:
    made = resolve(rows.texts(), dataset_kwargs={"cache_folder": str(tmp_path / "kept")})
    assert folder_of(made).parent == tmp_path / "kept"


def test_several_processes_make_the_same_tokens_in_the_same_order(resolve: Resolve, tmp_path: Path) -> None:
    one = resolve(rows.chats(40))
    kept = {"cache_folder": str(tmp_path / "two")}
    two = resolve(rows.chats(40), dataset_num_proc=2, dataset_kwargs=kept)
    assert rows.tokens_of(two) == rows.tokens_of(one)


def test_a_selection_of_rows_is_converted_in_its_own_order(resolve: Resolve) -> None:
    whole, part = rows.tokens_of(resolve(rows.texts(9))), resolve(rows.texts(9).select([7, 2, 5]))
    assert rows.tokens_of(part) == [whole[7], whole[2], whole[5]]


def test_the_tokenizer_as_arguments_change_it_is_kept_for_exports(resolve: Resolve) -> None:
    made = resolve(rows.texts(), eos_token="<|user|>")
    processor: Any = made.processor
    assert AutoTokenizer.from_pretrained(processor.tokenizer.name).eos_token == "<|user|>"


def test_a_conversion_that_was_cut_off_is_done_again(resolve: Resolve) -> None:
    folder = folder_of(resolve(rows.texts()))
    (folder / "_lmms" / "dataset.json").unlink()
    (folder.with_name(f"{folder.name}.work")).mkdir()
    assert len(rows.tokens_of(resolve(rows.texts()))) == 12


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (IterableDataset.from_generator(lambda: iter([{"text": "x"}])), "IterableDataset.*lmms-stream convert"),
        (DatasetDict({"train": rows.texts(2)}), "DatasetDict of train: pass one of them, for example"),
        (rows.texts(2).with_transform(lambda row: row), "has a transform .*: apply it with the dataset's map"),
        (rows.texts(2).select([]), "has no rows: pass another"),
        ([{"text": "x"}], "train_dataset is a list: give a datasets.Dataset, or a PackedStreamingDataset"),
    ],
    ids=["iterable", "splits", "transform", "empty", "list"],
)
def test_what_is_no_dataset_of_rows_is_refused_with_the_remedy(dataset: Any, message: str, resolve: Resolve) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(dataset)


def conversion(tok: Any, folder: Path, *, wait_s: float, rank: int = 0) -> Conversion:
    return Conversion(
        processing_class=tok, settings=RowSettings(), formatting_func=None, folder=folder, num_proc=None,
        world=World(rank=rank, world_size=2), wait_s=wait_s,
    )  # fmt: skip


class Second(Conversion):
    """Another rank, told of the folder of the first."""

    def _agreed(self, folder: Path) -> Path:
        return folder


def second(tok: Any, folder: Path, *, wait_s: float) -> Second:
    return Second(**vars(conversion(tok, folder, wait_s=wait_s, rank=1)))


def test_a_rank_that_waits_too_long_says_which_folder_all_nodes_must_see(
    tok: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"not converted into {tmp_path}.* within 0.3 s: all nodes must see this"):
        second(tok, tmp_path, wait_s=0.3).stored(rows.texts(), name="train_dataset")


def test_a_rank_sees_the_one_that_converts_end(tok: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    waiting = second(tok, tmp_path, wait_s=30)
    dataset = rows.texts()
    lock = tmp_path / f"{dataset._fingerprint}-{waiting._digest()}.lock"
    program = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2); print(1); time.sleep(1)"
    with subprocess.Popen([sys.executable, "-uc", program, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(DataError, match=r"the rank that converted train_dataset ended before .* was complete"):
            waiting.stored(dataset, name="train_dataset")


def test_a_formatting_func_that_cannot_be_hashed_is_refused(
    tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    waits = multiprocessing.Lock()
    with pytest.raises(ConfigError, match=r"formatting_func cannot be identified .*: apply it to the dataset with map"):
        rows.resolved(
            model=str(model_folder), args=rows.config(tmp_path), train_dataset=rows.texts(), processing_class=tok,
            formatting_func=lambda row: str(waits),
        )  # fmt: skip


def test_rows_of_a_dataset_may_come_from_anywhere_that_datasets_reads(resolve: Resolve, tmp_path: Path) -> None:
    rows.texts().to_parquet(tmp_path / "rows.parquet")
    stored = Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    assert rows.tokens_of(resolve(stored)) == rows.tokens_of(resolve(rows.texts()))
