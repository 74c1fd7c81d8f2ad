"""Values of other types than a constructor takes are errors of ours, which name the value and what to write."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from lmms_stream import (
    ChatProcessor,
    ConvertOptions,
    DatasetConfig,
    FetchConfig,
    MDSWriter,
    ModelConfig,
    OrderConfig,
    PackedDataset,
    PackedLoader,
    PackedStreamingDataset,
    PackingConfig,
    StreamingDataset,
    TokensProcessor,
    TrainConfig,
    World,
)
from lmms_stream.__main__ import main
from lmms_stream.cli.command import local_file
from lmms_stream.config import load_mapping
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.sources.specs import parse_spec
from lmms_stream.datasets import MultiModalDataset, MultiModalIterableDataset
from lmms_stream.doors.lmms_engine.datasets.streaming_packs import StreamingPackConfig
from lmms_stream.doors.relax.rows import open_rows
from lmms_stream.errors import ConfigError
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.source_ranges import checked_epochs, parse_schedule
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.bagel_images import VaeInput
from lmms_stream.rl import Dataset as Prompts
from lmms_stream.rl import StreamingDataset as StreamedPrompts
from lmms_stream.storage.retry import Retry
from lmms_stream.storage.storage import open_storage
from torch.utils.data import DataLoader

from .conftest import write_tokens
from .datasets.chats import text_config, write_jsonl
from .processes import PROCESSES
from .rl.rows import prompts, write_lines

Make = Callable[..., Any]
TRAIN = {"output_dir": "run", "global_batch": 8, "max_steps": 3}
WRONG: list[tuple[Make, dict[str, Any], str]] = [
    (PackingConfig, {"packing_length": "5"}, "packing_length must be a whole number, got '5': write 5"),
    (PackingConfig, {"packing_length": 1e3}, "packing_length must be a whole number, got 1000.0: write 1000"),
    (PackingConfig, {"packing_length": True}, "packing_length must be a whole number, got True$"),
    (PackingConfig, {"packing_length": 8, "max_samples_per_pack": 1.5}, "max_samples_per_pack must be a whole number"),
    (OrderConfig, {"seed": 1.5}, "seed must be a whole number, got 1.5$"),
    (OrderConfig, {"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
    (FetchConfig, {"threads": True}, "threads must be a whole number, got True"),
    (FetchConfig, {"cache_limit": True}, "cache_limit must be a whole number, got True"),
    (FetchConfig, {"timeout_s": "5"}, "timeout_s must be a number, got '5': write 5"),
    (FetchConfig, {"timeout_s": float("inf")}, "timeout_s must be above 0, and at most 1,000,000,000 seconds, got inf"),
    (Retry, {"attempts": None}, "attempts must be a whole number, got None"),
    (World, {"world_size": 2.0}, "world_size must be a whole number, got 2.0: write 2"),
    (DatasetConfig, {"remote": "x", "packing_length": "1e3"}, "packing_length must be a whole number, .*: write 1000"),
    (StreamingPackConfig, {"packing_length": 2.5}, "packing_length must be a whole number, got 2.5"),
    (ModelConfig, {"pretrained": "x", "seed": 0.5}, r"model\.seed must be a whole number"),
    (ConvertOptions, {"limit": 1.5}, "limit must be a whole number, got 1.5"),
    (TrainConfig, {**TRAIN, "num_workers": "1"}, r"train\.num_workers must be a whole number, got '1': write 1"),
    (TrainConfig, {**TRAIN, "learning_rate": "3e-4"}, r"learning_rate must be a number, .*: write 0.0003"),
    (ModelConfig, {"pretrained": "x", "seed": 1 << 64}, r"model\.seed must be from -2\^63 to 2\^64 - 1, got 1844"),
    (TrainConfig, {**TRAIN, "alerts": {"spike": float("nan")}}, r"train\.alerts\.spike must be a number, got nan"),
    (StreamConfig, {"remote": "x", "num_parts": "1"}, "num_parts must be a whole number, got '1': write 1"),
    (StreamConfig, {"remote": 5}, "remote must be a path or a URL, got 5"),
    (SchemaOptions, {"max_image_pixels": 1e6}, "max_image_pixels must be a whole number, got 1000000.0: write 1000000"),
    (SchemaOptions, {"keep": "label"}, r"keep must be names of columns, got 'label': write \('label',\)"),
    (ProcessorConfig, {"learn_stop": "no"}, r"processor\.learn_stop must be True or False, got 'no'"),
    (ProcessorConfig, {"type": "image", "image_size": "64"}, r"processor\.image_size must be a whole number, .* 64"),
    (ProcessorConfig, {"type": "vision", "path": "x", "fps": "2"}, r"processor\.fps must be a number, .*: write 2"),
    (ProcessorConfig, {"tokenizer": 5}, r"processor\.tokenizer must be a path or a URL, got 5"),
    (VaeInput, {"stride": 2.5}, r"processor\.bagel\.vae\.stride must be a whole number, got 2.5"),
    (TrainConfig, {**TRAIN, "output_dir": ""}, r"train\.output_dir is an empty text: write a path, or"),
    (DatasetConfig, {"remote": "x", "local": ""}, r"local is an empty text: write a path, or \."),
    (TrainConfig, {**TRAIN, "output_dir": "s3://b/run"}, r"train\.output_dir s3://b/run is a URL"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "given", "why"), WRONG)
def test_a_value_of_another_type_is_named_with_what_to_write(make: Make, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make(**given)


def test_numbers_of_numpy_are_numbers() -> None:
    whole: Any = np.int64(64)
    fraction: Any = np.float32(3)
    config = PackingConfig(packing_length=whole)
    assert (config, type(config.packing_length)) == (PackingConfig(packing_length=64), int)
    assert FetchConfig(timeout_s=fraction).timeout_s == 3
    assert type(FetchConfig(timeout_s=fraction).timeout_s) is float
    truth: Any = np.bool_(True)
    assert OrderConfig(shuffle=truth).shuffle is True
    assert parse_schedule({"a": fraction, "b": 1}, ["a", "b"]) == [(0, {"a": 3, "b": 1})]
    assert ConvertOptions(splits={"train": fraction / 4, "test": 0.25}).splits == {"train": 0.75, "test": 0.25}
    with pytest.raises(ConfigError, match="shuffle must be True or False"):
        OrderConfig(shuffle=10**400)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [2.5, True, -1])
def test_a_phase_begins_at_a_whole_step(step: Any) -> None:
    with pytest.raises(ConfigError, match="a first step of weights must be"):
        parse_schedule({0: {"a": 1.0}, step: {"a": 1.0}}, ["a"])


def test_epochs_are_mapped_from_sources() -> None:
    wrong: Any = 1.5
    with pytest.raises(ConfigError, match=r"max_epochs must map sources .*, got 1.5: write \{SOURCE: 2\}"):
        checked_epochs(wrong)
    with pytest.raises(ConfigError, match="weights must map sources to shares, or first steps to such maps, got "):
        parse_schedule(wrong, ["a"])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"batch_size": "1"}, "batch_size must be a whole number, got '1': write 1"),
        ({"num_canonical_nodes": 1.5}, "num_canonical_nodes must be a whole number, got 1.5"),
        ({"epoch_size": 1.5}, "epoch_size must be a whole number, got 1.5"),
        ({"download_timeout": "x"}, "download_timeout must be a number, got 'x'"),
        ({"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
    ],
)
def test_datasets_check_their_keywords(folder: Path, given: dict[str, Any], why: str) -> None:
    for make in (PackedStreamingDataset, StreamingDataset):
        options: dict[str, Any] = {"batch_size": 1, **given}
        with pytest.raises(ConfigError, match=why):
            make(remote=str(folder), **options)


def test_conversions_and_prompts_check_their_arguments(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"workers": 1.5}, "num_workers must be a whole number, got 1.5"),
        ({"ray_timeout_s": "x"}, "ray_timeout_s must be a number, got 'x'"),
        ({"overwrite": "no"}, "overwrite must be True or False, got 'no'"),
        ({"splits": {"a": "x"}}, "the shares of {'a': 'x'} must be above 0 and add up to 1"),
    ]
    for options, why in wrong:
        with pytest.raises(ConfigError, match=why):
            convert([{"text": "a"}], tmp_path / "target", kind="text", **options)
    (tmp_path / "prompts.jsonl").write_text('{"text": "x"}\n')
    buffer: Any = {"buffer_size": "5"}
    with pytest.raises(ConfigError, match="buffer_size must be a whole number, got '5': write 5"):
        StreamedPrompts(tmp_path / "prompts.jsonl", **buffer)
    path: Any = 5
    with pytest.raises(ConfigError, match="prompt data must be a path, a URL or several in a list, got 5"):
        open_rows(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "a b", num_samples=40)
    return tmp_path / "a b"


def test_loaders_check_their_numbers(folder: Path) -> None:
    dataset = PackedDataset(str(folder), processor=TokensProcessor(), packing=PackingConfig(packing_length=64))
    for given, why in (
        ({"global_batch": 2, "num_workers": -1}, "num_workers must be at least 0, got -1"),
        ({"global_batch": 1e3}, "global_batch must be a whole number, got 1000.0: write 1000"),
        ({"global_batch": 2, "pad_to": 1.5}, "pad_to must be a whole number"),
        ({"global_batch": 2, "timeout_s": "x"}, "timeout_s must be a number, got 'x'"),
        ({"global_batch": 2, "drop_last": "no"}, "drop_last must be True or False, got 'no'"),
        ({"global_batch": 2, "weights": {"data": 1.0}, "max_epochs": {"data": 1.5}}, "max_epochs of 'data' must be"),
    ):  # fmt: skip
        options: dict[str, Any] = given
        with pytest.raises(ConfigError, match=why):
            PackedLoader(dataset, **options)


def test_a_dataset_is_named_by_a_path_a_file_url_or_streams(folder: Path, tmp_path: Path) -> None:
    url = f"file://{str(folder).replace(' ', '%20')}"
    for sources in (str(folder), folder, [folder], url):
        assert PackedDataset(sources).num_samples == 40
    for make in (PackedStreamingDataset, StreamingDataset):
        dataset: Any = make(remote=url, local=f"file://{tmp_path}/local", batch_size=1)
        assert len(dataset[:]) == 40
    assert (tmp_path / "local/index.json").exists()
    assert open_storage(url).url == str(folder)
    wrong: Any = 5
    with pytest.raises(ConfigError, match="a dataset is read from a folder, a URL or StreamConfigs, got 5"):
        PackedDataset(wrong)
    with pytest.raises(ConfigError, match=r"local s3://b/x is a URL, and a path of this machine belongs there"):
        PackedStreamingDataset(folder, "s3://b/x")
    with pytest.raises(ConfigError, match="remote file://host/x has a host or no whole path: write file:///"):
        PackedDataset("file://host/x")


def test_file_urls_are_paths_wherever_a_path_is_taken(tmp_path: Path, tokenizer: Path) -> None:
    data = tmp_path / "a b"
    data.mkdir()
    shutil.copytree(tokenizer, data / "tokenizer")
    (data / "rows.jsonl").write_text('{"prompt": "x"}\n')
    url = f"file://{tmp_path}/a%20b"
    assert ChatProcessor.from_pretrained(f"{url}/tokenizer").tokenizer.name == f"{data}/tokenizer"
    assert ProcessorConfig(tokenizer=f"{url}/tokenizer").tokenizer == f"{data}/tokenizer"
    assert ProcessorConfig(type="vision", path=url).path == str(data)
    assert ModelConfig(pretrained=url).pretrained == str(data)
    run: Any = {**TRAIN, "output_dir": url, "checkpoint_dir": url}
    assert (TrainConfig(**run).output_dir, TrainConfig(**run).checkpoint_dir) == (str(data), str(data))
    assert DatasetConfig(remote=url, local=url).remote == str(data)
    assert SchemaOptions(media_root=url).media_root == str(data)
    assert open_rows(f"{url}/rows.jsonl@[0:1]").num_rows == 1
    assert parse_spec(f"{url}/rows.jsonl@[0:1]", folder=url).path == f"{data}/rows.jsonl"
    report = convert(
        f"{url}/*.jsonl", f"{url}/shards", work=Path(f"{url}/work"), columns={"text": "prompt"}, kind="text", workers=1
    )
    assert (report.num_rows, (data / "shards/index.json").is_file()) == (1, True)
    (data / "run.yaml").write_text("a: 1")
    assert load_mapping(Path(f"{url}/run.yaml")) == {"a": 1}
    assert local_file(f"{url}/run.yaml") == data / "run.yaml"
    assert not list(Path.cwd().glob("file:*"))


def test_a_url_in_place_of_a_path_of_this_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "a.jsonl", "b", "--work", "s3://b/work"])
    assert "--work: the path s3://b/work is a URL, and a path of this machine belongs there" in capsys.readouterr().err


def test_a_processor_of_a_path_says_how_it_is_made(folder: Path) -> None:
    path: Any = str(folder)
    with pytest.raises(ConfigError, match=r"is not a tokenizer: .* by from_pretrained"):
        ChatProcessor(path)


# A DataLoader, or transformers' Trainer, that joins what a dataset gives by its default.

COLLATOR = r"pass collate_fn=dataset.get_collator\(\)"
TRAINER = "pass the dataset to FSDP2SFTTrainer of lmms_stream, which takes the same arguments"
DATASETS: dict[str, tuple[str, str]] = {  # class -> what to do with a DataLoader, with transformers' Trainer
    "MultiModalDataset": (COLLATOR, TRAINER),
    "MultiModalIterableDataset": (COLLATOR, TRAINER),
    "PackedStreamingDataset": (
        r"read packs with PackedLoader\(dataset, global_batch=8\), or pass collate_fn=list",
        TRAINER,
    ),
    "Dataset of prompts": ("pass collate_fn=list", "pass a data_collator that makes a model's inputs of prompts"),
    "StreamingDataset of prompts": ("pass collate_fn=list", "pass a data_collator that makes a model's inputs"),
}


@pytest.fixture(scope="module")
def datasets(
    tokenizer: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Callable[[], Any]]:
    folder = tmp_path_factory.mktemp("collated")
    config = text_config(write_jsonl(folder / "chats.jsonl", num_rows=12), tokenizer, folder / "cache")
    rows = write_lines(folder / "prompts.jsonl", prompts(8))
    return {
        "MultiModalDataset": lambda: MultiModalDataset(config),
        "MultiModalIterableDataset": lambda: MultiModalIterableDataset(config),
        "PackedStreamingDataset": lambda: PackedStreamingDataset(dataset_folder),
        "Dataset of prompts": lambda: Prompts(rows),
        "StreamingDataset of prompts": lambda: StreamedPrompts(rows),
    }


def tiny_model() -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", DATASETS)
def test_a_data_loader_without_a_collate_fn_says_which_to_pass(
    name: str, num_workers: int, datasets: dict[str, Callable[[], Any]]
) -> None:
    options: dict[str, Any] = {}
    if num_workers:  # threads and open files of StreamingDataset cannot be pickled
        options = {"multiprocessing_context": "fork" if name.startswith("Streaming") else PROCESSES, "timeout": 60}
    dataset = datasets[name]()
    with pytest.raises(
        ConfigError, match=f"a DataLoader without a collate_fn cannot join what {name} gives: {DATASETS[name][0]}"
    ):
        next(iter(DataLoader(dataset, batch_size=2, num_workers=num_workers, **options)))
    assert len(next(iter(DataLoader(dataset, batch_size=2, collate_fn=list)))) == 2
    assert next(iter(DataLoader(dataset, batch_size=None))) is not None


@pytest.mark.parametrize("has_tokenizer", [False, True], ids=["default", "padding"])
@pytest.mark.parametrize("name", DATASETS)
def test_the_trainer_of_transformers_without_a_data_collator_says_what_takes_the_dataset(
    name: str, has_tokenizer: bool, datasets: dict[str, Callable[[], Any]], tokenizer: Path, tmp_path: Path
) -> None:
    trainer = transformers.Trainer(
        tiny_model(),
        transformers.TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True),
        train_dataset=datasets[name](),
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer) if has_tokenizer else None,
    )
    with pytest.raises(
        ConfigError, match=f"transformers' Trainer without a data_collator .* {name} gives: {DATASETS[name][1]}"
    ):
        trainer.train()


def test_columns_that_are_no_conversations_are_joined_by_torch(tmp_path: Path) -> None:
    with MDSWriter(columns={"number": "int"}, out=str(tmp_path)) as writer:
        for number in range(4):
            writer.write({"number": number})
    loader: DataLoader[Any] = DataLoader(PackedStreamingDataset(tmp_path, shuffle=False), batch_size=4)
    assert next(iter(loader))["number"].tolist() == [0, 1, 2, 3]


def test_a_data_collator_of_the_users_own_is_called_by_the_trainer_of_transformers(
    dataset_folder: Path, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def collator(samples: list[Any]) -> dict[str, Any]:
        seen.extend(samples)
        raise KeyboardInterrupt  # the rest is the trainer's

    trainer = transformers.Trainer(
        tiny_model(),
        transformers.TrainingArguments(
            str(tmp_path), max_steps=1, report_to="none", use_cpu=True, remove_unused_columns=False
        ),
        train_dataset=PackedStreamingDataset(dataset_folder),
        data_collator=collator,
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [{*sample} for sample in seen] == [{"messages", "media"}] * 8
