"""A datasets.Dataset -> shards of its tokens and their lengths: once, by one rank, while the others wait.

The folder is named by the dataset's fingerprint and all settings of tokenization; the next run finds it again.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...converters.convert import convert
from ...converters.report import ConvertReport
from ...converters.rows.options import SchemaOptions
from ...errors import ConfigError, DataError
from ...extras import need
from ...mds.core import PackedDataset
from ...mds.streams import StreamConfig
from ...plan.order import OrderConfig
from ...plan.packing import PackingConfig
from ...processors.base import Compared, Processor
from ...processors.text import TokensProcessor
from ...processors.tokenizers import FastTokenizer, digest
from ...storage.failures import disk_errors
from ...storage.locks import locked, wait_for_other
from ...train.run.distributed import from_rank_0
from ...types import World
from .answer_rows import AnswersProcessor, AnswersReader, as_chat, media_processor
from .rows import RowSettings, RowTokenizer
from .tokenizer import assistant_template, fast_tokenizer, tokenizer_of

_VERSION = 2  # raised when rows give different tokens
# kind of rows with media, by the objective of their answers
_KINDS: Mapping[Compared | None, str] = {None: "messages", "dpo": "preference", "kto": "kto"}
_DONE = "_lmms/dataset.json"  # exists in a complete dataset
WAIT_S = 7200.0  # timeout for ranks waiting for the conversion
logger = logging.getLogger("lmms_stream")


@dataclass(frozen=True, slots=True)
class RowsProcessor(TokensProcessor):
    """Processor of the shards: tokens unchanged. tokenizer: tokenizer of the rows; its files are exported."""

    tokenizer: FastTokenizer | None = None


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Tokenization of datasets, and the folder of their shards.

    objective: objective of rows with answers to compare. has_media: whether rows hold images, stored undecoded.
    """

    processing_class: Any
    settings: RowSettings
    formatting_func: Callable[..., str] | None
    folder: Path
    num_proc: int | None
    world: World
    objective: Compared | None = None
    has_media: bool = False
    trust_remote_code: bool = False
    wait_s: float = WAIT_S

    def stored(self, dataset: Any, *, name: str) -> Path:
        """Return the folder of a dataset's shards; one rank writes it if it does not exist; all ranks call this.

        Raises ConfigError and DataError for invalid rows, and DataError if another rank does not finish the conversion
        in time.
        """
        _check(dataset, name)
        folder = self._agreed(self.folder / f"{dataset._fingerprint}-{self._digest()}")
        if (folder / _DONE).is_file():
            if self.world.rank == 0:
                logger.info("%s is found converted in %s", name, folder)
        elif self.world.rank == 0:
            self._convert_once(dataset, folder, name)
        else:
            self._wait(folder, name)
        return folder

    def opened(self, folder: Path, *, packing: PackingConfig, order: OrderConfig) -> PackedDataset:
        """Open the dataset in a folder, with the given packing and order."""
        return PackedDataset(
            [StreamConfig(remote=str(folder))],
            processor=self._processor(folder),
            packing=packing,
            order=order,
            world=self.world,
        )

    def _processor(self, folder: Path) -> Processor:
        made = _tokenizer_folder(folder)
        if self.has_media:
            learns_all = not (self.settings.completion_only or self.settings.assistant_only)
            processor: Processor = media_processor(
                str(made), objective=self.objective, learns_all=learns_all, trust_remote_code=self.trust_remote_code
            )
            return processor
        tokenizer = fast_tokenizer(self.processing_class, name=str(made))
        if self.objective is not None:
            return AnswersProcessor(objective=self.objective, tokenizer=tokenizer)
        return RowsProcessor(tokenizer)

    def _digest(self) -> str:
        """Return a digest of all settings of tokenization, without the dataset."""
        processing_class, tokenizer = self.processing_class, tokenizer_of(self.processing_class)
        fast = fast_tokenizer(processing_class, name="")
        parts = [_VERSION, asdict(self.settings), processing_class.chat_template, tokenizer.eos_token]
        parts += [fast.digest if fast else sorted(tokenizer.get_vocab().items()), type(processing_class).__name__]
        parts += [value for value in (self.objective, self.has_media) if value]
        return digest(repr([*parts, _hash_of(self.formatting_func)]))[:16]

    def _agreed(self, folder: Path) -> Path:
        """Return rank 0's folder: a dataset with unhashable transforms has another fingerprint on each rank."""
        return folder if self.world.world_size == 1 else from_rank_0(folder)

    def _convert_once(self, dataset: Any, folder: Path, name: str) -> None:
        with disk_errors(str(folder)):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(_lock(folder), timeout_s=self.wait_s) as ours:
            if (folder / _DONE).is_file():  # another run converted meanwhile
                return
            if ours is None:
                raise _late(folder, name, self.wait_s)
            self._convert(dataset, folder, name)

    def _convert(self, dataset: Any, folder: Path, name: str) -> None:
        started = time.monotonic()
        logger.warning("converting %s (%d rows) once, into %s", name, len(dataset), folder)
        reader = None if self.has_media else self._reader(dataset[0])
        self.processing_class.save_pretrained(_tokenizer_folder(folder))
        work = folder.with_name(f"{folder.name}.work")
        with _emptied(work):
            if reader is None:
                report = convert(
                    dataset.with_format(None), str(work / "dataset"), kind=_KINDS[self.objective],
                    map=None if self.objective else as_chat, processor=self._processor(folder), num_workers=1,
                    work=work / "converting",
                )  # fmt: skip
            else:
                report = self._stored_tokens(dataset, reader, work, name=name)
            shutil.rmtree(folder, ignore_errors=True)  # a folder without dataset.json is incomplete
            with disk_errors(str(folder)):
                (work / "dataset").rename(folder)
        logger.info(
            "%s: %d samples, %d tokens, of %d rows in %.1f s: kept in %s",
            name, report.num_rows, report.num_tokens or 0, len(dataset), time.monotonic() - started, folder,
        )  # fmt: skip

    def _reader(self, first: dict[str, Any]) -> RowTokenizer:
        if self.objective is not None:
            return AnswersReader(self.processing_class, self.settings, first=first, objective=self.objective)
        template = assistant_template(self.processing_class) if self.settings.assistant_only else None
        return RowTokenizer(
            self.processing_class,
            self.settings,
            first=first,
            formatting_func=self.formatting_func,
            template=template,
        )

    def _stored_tokens(self, dataset: Any, reader: RowTokenizer, work: Path, *, name: str) -> ConvertReport:
        files = _tokenized(dataset, reader, work / "tokens.arrow", name=name, num_proc=self.num_proc)
        others = [f"{column}:ndarray:int32" for column in reader.columns if column not in ("input_ids", "labels")]
        return convert(
            files, str(work / "dataset"), format="arrow", schema=SchemaOptions(kind="tokens", keep=tuple(others)),
            processor=TokensProcessor(), num_workers=1, work=work / "converting",
        )  # fmt: skip

    def _wait(self, folder: Path, name: str) -> None:
        """Wait until the dataset exists; DataError if the converting process ends or takes too long."""
        waited = wait_for_other((folder / _DONE).is_file, lock=_lock(folder), begin_s=self.wait_s, end_s=self.wait_s)
        if waited.outcome == "ended":
            raise DataError(
                f"the rank that converted {name} ended before {folder} was complete: see the error of this rank"
            )
        if waited.outcome == "late":
            raise _late(folder, name, self.wait_s)


def _check(dataset: Any, name: str) -> None:
    """Raise ConfigError unless the dataset is a datasets.Dataset with rows."""
    datasets = need("datasets", by="rows of the hub's library")

    if isinstance(dataset, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise ConfigError(
            f"{name} is an IterableDataset, without a length and without access by number: write it to shards with "
            "lmms-stream convert and pass a PackedStreamingDataset of the shards, or load it without streaming=True"
        )
    if isinstance(dataset, datasets.DatasetDict):
        raise ConfigError(
            f"{name} is a DatasetDict of {', '.join(dataset)}: pass one of them, for example dataset['train']"
        )
    if not isinstance(dataset, datasets.Dataset):
        raise ConfigError(
            f"{name} is a {type(dataset).__name__}: give a datasets.Dataset, or a PackedStreamingDataset or "
            "DatasetConfig of lmms_stream"
        )
    if not len(dataset):
        raise ConfigError(f"{name} has no rows: pass another dataset")
    if dataset.format["type"] == "custom":
        raise ConfigError(
            f"{name} has a transform (with_transform), whose rows may differ at each read: apply it with the dataset's "
            "map method"
        )


def _tokenized(dataset: Any, reader: RowTokenizer, path: Path, *, name: str, num_proc: int | None) -> list[str]:
    """Return Arrow files of the dataset's tokens, in its order."""
    datasets = need("datasets", by="rows of the hub's library")

    ids = datasets.List(datasets.Value("int32"))
    made = dataset.with_format(None).map(
        reader,
        batched=True,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=datasets.Features(dict.fromkeys(reader.columns, ids)),
        cache_file_name=str(path),
        load_from_cache_file=False,
        new_fingerprint="0" * 16,
        num_proc=num_proc if num_proc and num_proc > 1 else None,
        desc=f"Tokenizing {name}",
    )
    if not len(made):
        raise DataError(
            f"no token of {name}, read as {reader.kind}, would be learnt: look at completion_only_loss, "
            "assistant_only_loss and max_length"
        )
    return [each["filename"] for each in made.cache_files]


def _hash_of(function: Callable[..., str] | None) -> str:
    if function is None:
        return ""
    from datasets.fingerprint import Hasher

    try:
        return str(Hasher.hash(function))
    except Exception as error:  # dill raises any error of the function's own objects
        raise ConfigError(
            f"formatting_func cannot be identified by its content ({type(error).__name__}): apply it to the dataset "
            "with map first"
        ) from error


@contextmanager
def _emptied(folder: Path) -> Any:
    """Create an empty folder, and remove it at the end."""
    shutil.rmtree(folder, ignore_errors=True)
    with disk_errors(str(folder)):
        folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tokenizer_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tokenizer")


def _lock(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _late(folder: Path, name: str, limit_s: float) -> DataError:
    return DataError(
        f"{name} was not converted into {folder} within {limit_s:g} s: all nodes must see this folder; name another "
        "by dataset_kwargs={'cache_folder': …}, or convert it before with lmms-stream convert"
    )
