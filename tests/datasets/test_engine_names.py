"""LMMS Engine's modules by their names: what they register, make and collate, and scripts with the import changed."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from lmms_stream.datasets import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from lmms_stream.doors.huggingface.data import open_config
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.doors.lmms_engine import mapping_func
from lmms_stream.doors.lmms_engine.datasets.collator import VisionCollator
from lmms_stream.doors.lmms_engine.datasets.moot import NOT_CALLED
from lmms_stream.doors.lmms_engine.datasets.naive import BaseDataset
from lmms_stream.doors.lmms_engine.datasets.names import OWN_PROCESSORS, OWN_TYPES
from lmms_stream.doors.lmms_engine.datasets.processor import (
    ProcessorConfig,
    PureTextDataProcessor,
    Qwen2_5OmniDataProcessor,
    Qwen2VLDataProcessor,
    _film,
)
from lmms_stream.doors.lmms_engine.launch.cli import create_train_task
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processes.own_code import class_source
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import end_distributed
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.types import World
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, LlamaConfig

from ..processors.tile_vlm import save_tile_processor, tile_config
from ..processors.tiny_sound import clip, save_sound_processor, tone
from ..processors.tiny_vlm import save_processor, tiny_config
from ..rounds import in_long_rounds
from ..train.habits.rows import SIZES
from .chats import rows, text_config, write_jsonl

MODULES = {
    "mapping_func": "DATASET_MAPPING DATAPROCESSOR_MAPPING AUTO_REGISTER_MODEL_MAPPING register_dataset register_model "
    "register_processor create_model_from_pretrained create_model_from_config",
    "datasets": "DatasetConfig MultiModalDataset VisionSFTDataset VisionAudioSFTDataset FinewebEduDataset "
    "MultiModalIterableDataset VisionSFTIterableDataset",
    "datasets.naive": "BaseDataset LLaVAVideoDataset MultiModalDataset Qwen3VLDataset QwenOmniSFTDataset RaeDataset "
    "SitDataset VisionAudioSFTDataset VisionSFTDataset",
    "datasets.iterable": "BaseIterableDataset FinewebEduDataset MultiModalIterableDataset VisionSFTIterableDataset "
    "BagelIterableDataset Qwen3VLIterableDataset QwenOmniIterableDataset",
    "datasets.collator": "VisionCollator BagelCollator LLaVACollator",
    "datasets.processor": "ProcessorConfig BaseQwen2_5_DataProcessor LLaVADataProcessor LLaVAVideoDataProcessor "
    "Qwen2_5OmniDataProcessor Qwen3OmniMoeDataProcessor Qwen2_5_VLDataProcessor Qwen2VLDataProcessor "
    "PureTextDataProcessor Qwen2DataProcessor BagelDataProcessor RaeSiglipDataProcessor SitDataProcessor "
    "Qwen3_VLDataProcessor",
    "train": "FSDP2SFTTrainer TrainRunner TrainingArguments",
    "launch.cli": "create_train_task",
}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    end_distributed()
    for table in (OWN_TYPES, OWN_PROCESSORS):
        for name in list(table):
            del table[name]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_theirs_has_its_names(module: str) -> None:
    found = importlib.import_module(f"lmms_stream.lmms_engine.{module}")
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []


class Reversed:
    """A processor as LMMS Engine's are written: texts of a conversation, one token a word, all of them trained on."""

    def __init__(self, config: ProcessorConfig):
        self.config = config

    def build(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.config.processor_name)

    def process(self, images: Any, hf_messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        parts = [part for message in hf_messages for part in message["content"]]
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        ids = torch.tensor(self.tokenizer(text)["input_ids"])
        made = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        return made | ({} if images is None else {"pixel_values": torch.zeros(len(images), 3)})


def registered(tokenizer: Path, tmp_path: Path) -> dict[str, Any]:
    """A dataset_config with a type and a processor of the user's own."""

    class Numbered(BaseDataset):
        pass

    mapping_func.register_dataset("numbered")(Numbered)
    mapping_func.register_processor("reversed")(Reversed)
    assert mapping_func.DATASET_MAPPING.pop("numbered") is Numbered
    assert mapping_func.DATAPROCESSOR_MAPPING.pop("reversed") is Reversed
    config = text_config(write_jsonl(tmp_path / "chats.jsonl"), tokenizer, tmp_path / "cache")
    said = {"processor_name": str(tokenizer), "processor_type": "reversed"}
    return config | {"dataset_type": "numbered", "processor_config": said}


def test_a_dataset_and_a_processor_that_are_registered_are_trained_on(tokenizer: Path, tmp_path: Path) -> None:
    config = registered(tokenizer, tmp_path)
    task = create_train_task(
        {
            "trainer_type": "fsdp2_trainer",
            "dataset_config": config,
            "model_config": {"load_from_config": {"model_type": "llama", "config": SIZES}},
            "trainer_args": {
                "output_dir": str(tmp_path / "run"),
                "max_steps": 2,
                "logging_steps": 1,
                "use_cpu": True,
                "report_to": "none",
            },
        }
    )
    task.build()
    task.run()
    assert [record["step"] for record in read_log(tmp_path / "run") if "loss" in record] == [1, 2]
    dataset = MultiModalDataset(config)
    texts = AutoTokenizer.from_pretrained(tokenizer).decode(dataset[0].input_ids[0])
    assert "It is a number." in texts
    pack = dataset[0]
    others = [token for token in range(pack.num_tokens) if token not in pack.cu_seqlens]  # no sample's first is learnt
    assert torch.equal(pack.labels[0, others], pack.input_ids[0, others])


def test_what_is_registered_twice_or_cannot_be_read_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    config = registered(tokenizer, tmp_path)
    for register, name, what in (
        (mapping_func.register_dataset, "numbered", "dataset_type"),
        (mapping_func.register_dataset, "vision", "dataset_type"),
        (mapping_func.register_processor, "qwen2", "processor_type"),
    ):
        with pytest.raises(ConfigError, match=f"{what} '{name}' is already registered: choose another name"):
            register(name)(BaseDataset)
    with pytest.raises(ConfigError, match="dict is not a dataset of packs: inherit from BaseDataset or a class"):
        mapping_func.register_dataset("x")(dict)
    for base in (BaseDataset, MultiModalIterableDataset):
        for name, remedy in NOT_CALLED.items():
            with pytest.raises(
                ConfigError, match=re.escape(f"Own overrides {name}, which nothing here calls: {remedy}")
            ):
                type("Own", (base,), {name: lambda *_: None})
        type("Own", (base,), {"load_rows": lambda *_: None, "get_collator": lambda *_: None})
    parts: Any
    for parts, caller in ((Qwen2VLDataProcessor, "process"), (VisionCollator, "__call__")):
        for name, remedy in parts.NOT_CALLED.items():
            with pytest.raises(ConfigError, match=re.escape(f"overrides {name}, which nothing here calls: {remedy}")):
                type("Own", (parts,), {name: lambda *_: None})
            type("Own", (parts,), {name: lambda *_: None, caller: lambda *_: None})
    mapping_func.register_processor("none")(type("Bare", (), {"__init__": lambda *_: None}))
    with pytest.raises(ConfigError, match=r"Bare has no process: write process\(images, hf_messages\)"):
        _ = MultiModalDataset(
            config | {"processor_config": {"processor_name": "x", "processor_type": "none"}}
        ).processor


class Odd:
    """A processor whose results hold other values than a pack can."""

    def __init__(self, **others: Any):
        self.others = others

    def process(self, images: Any, hf_messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"input_ids": torch.arange(3), "labels": torch.arange(3), **self.others}


def test_positions_of_a_registered_processor_are_those_of_its_samples_and_odd_values_are_named() -> None:
    sample = {"messages": "[]", "media": b""}
    axes = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 1, 3]])
    for given in (axes, axes[:, None]):
        made = mapping_func.EngineProcessor(Odd(position_ids=given), {}).process(sample)
        assert made["position_ids"].tolist() == axes.tolist()
    for given in (torch.arange(3), torch.arange(3)[None]):
        made = mapping_func.EngineProcessor(Odd(position_ids=given), {}).process(sample)
        assert {*made} == {"input_ids", "labels", "media"}
    with pytest.raises(DataError, match=r"Odd\.process returned position_ids that do not count from 0: leave them out"):
        mapping_func.EngineProcessor(Odd(position_ids=torch.ones(3)), {}).process(sample)
    wrong: dict[str, Any]
    for wrong in ({"labels": torch.arange(2)}, {"labels": None}, {"x": torch.ones(1, dtype=torch.bfloat16)}):
        with pytest.raises(
            DataError, match=r"Odd\.process returned values that cannot be read \(.*\): return input_ids"
        ):
            mapping_func.EngineProcessor(Odd(**wrong), {}).process(sample)


class Clean(MultiModalDataset):
    """Rows changed by a dataset: another answer, and without the question of a number."""

    def load_from_json(self, data: dict[str, Any], data_folder: str | None = None) -> Any:
        question, answer = data["messages"]
        if "3" in str(question):
            return None
        answer["content"] = [{"type": "text", "text": f"{Path(str(data_folder)).name}, {self.config.packing_length}."}]
        return MultiModalDataset.load_from_json(self, data, data_folder)


class CleanStream(MultiModalIterableDataset):
    load_from_json = Clean.load_from_json


class Tensors(MultiModalDataset):
    def load_from_hf(self, data: dict[str, Any]) -> Any:
        return {"input_ids": torch.ones(3), "labels": torch.ones(3)}


def test_the_overridden_load_from_json_is_called_at_every_entrance(tokenizer: Path, tmp_path: Path) -> None:
    config = text_config(write_jsonl(tmp_path / "chats.jsonl", 12), tokenizer, tmp_path / "cache")
    entry = {"path": config.pop("dataset_path"), "data_folder": f"{tmp_path}/photos"}
    config |= {"datasets": [entry], "dataset_format": "yaml"}
    decode = AutoTokenizer.from_pretrained(tokenizer).decode
    packs: Any
    for packs in (Clean(config).build(), CleanStream(config | {"cache_dir": None})):
        text = "".join(decode(pack.input_ids[0]) for pack in packs)
        assert (text.count(f"photos, {config['packing_length']}."), text.count("It is a number")) == (11, 0)
    mapping_func.register_dataset("clean")(Clean)
    registered: Any = open_config(DatasetConfig(**config | {"dataset_type": "clean"}), World())
    assert registered.num_samples == 11
    assert MultiModalDataset(config).build().core.num_samples == 12
    loader = Tensors(config | {"dataset_format": "hf_dataset"}).row_loader
    assert loader is not None
    with pytest.raises(
        DataError, match=r"load_from_hf returned input_ids, labels, expected a row: end it with `return"
    ):
        loader.rows({"messages": []}, None)
    with pytest.raises(ConfigError, match=r"and load_from_json of .*Clean both change its rows: leave one of them out"):
        Clean(config | {"datasets": [entry | {"map": "a:b"}]}).build()
    with pytest.raises(ConfigError, match=r"are shards, whose samples load_from_json of .*CleanStream cannot change"):
        CleanStream(text_config(tmp_path, tokenizer, tmp_path) | {"dataset_format": "mds"})


@pytest.mark.parametrize(
    ("before", "after"), [("return 1", "return 2"), ("LIMIT = 1", "LIMIT = 2"), ("class Own", "class Own(Helper)")]
)
def test_a_change_of_what_a_class_names_in_its_module_is_a_change_of_its_code(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "LIMIT = 1\nclass Helper: pass\ndef clean(): return 1\nclass Own:\n    def load(self): return clean() + LIMIT\n"
    )
    texts = []
    for number, text in enumerate((source, source, source.replace(before, after))):
        (tmp_path / f"abc{number}_rows.py").write_text(text)
        own = importlib.import_module(f"abc{number}_rows").Own
        texts.append(class_source(own, asked="Own"))
    assert texts[0] == texts[1] != texts[2]


def test_models_are_chosen_as_theirs_are(tmp_path: Path) -> None:
    cls, made = mapping_func.create_model_from_config("llama", SIZES)
    assert (cls, made.hidden_size) == (AutoModelForCausalLM, SIZES["hidden_size"])
    cls.from_config(made).save_pretrained(tmp_path)
    assert mapping_func.create_model_from_pretrained(str(tmp_path)) is AutoModelForCausalLM
    named = mapping_func.create_model_from_pretrained(str(tmp_path), "image_text_to_text")
    assert named is AutoModelForImageTextToText
    with pytest.raises(ConfigError, match="model_type 'lama' is unknown to the installed transformers"):
        mapping_func.create_model_from_config("lama", {})
    with pytest.raises(ConfigError, match="model_general_type 'text' is not one of causal_lm, masked_lm"):
        mapping_func.create_model_from_config("llama", {}, "text")
    own = type("OwnConfig", (LlamaConfig,), {"model_type": "registered_llama"})
    of_own = type("OwnModel", (AutoModelForCausalLM._model_mapping[LlamaConfig],), {"config_class": own})
    mapping_func.register_model("registered_llama", own, of_own)
    made_by, config = mapping_func.create_model_from_config("registered_llama", SIZES)
    assert type(made_by.from_config(config)) is of_own


def test_a_processor_by_its_name_makes_what_a_dataset_has(tokenizer: Path, tmp_path: Path) -> None:
    processor = PureTextDataProcessor({"processor_name": str(tokenizer), "processor_type": "pure_text"})
    with pytest.raises(ConfigError, match=r"is not built: call build\(\) before"):
        _ = processor.processor
    processor.build()
    config = text_config(write_jsonl(tmp_path / "chats.jsonl"), tokenizer, tmp_path / "cache", packing=False)
    dataset = MultiModalDataset(config)
    made = [processor.process(None, row["messages"]) for row in rows(60)]
    ids = {tuple(each["input_ids"].tolist()): each["labels"].tolist() for each in made}
    pack = dataset[7]
    assert ids[tuple(pack.input_ids[0].tolist())] == pack.labels[0].tolist()
    padded = VisionCollator(processor)([made[:2], made[2:3]])
    lengths = [len(each["input_ids"]) for each in made[:3]]
    assert padded["attention_mask"].sum(1).tolist() == lengths
    assert padded["input_ids"].shape == padded["labels"].shape == (3, max(lengths))
    assert len(VisionCollator(processor)([dataset[0], dataset[1]]).sample_ids) == 2


def test_images_of_a_processor_by_its_name_are_those_of_a_dataset(tmp_path: Path) -> None:
    save_processor(tmp_path / "folder", "qwen2_vl")
    said = ProcessorConfig(str(tmp_path / "folder"), "qwen2_vl")
    processor = Qwen2VLDataProcessor(said)
    processor.build()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8))
    image.save(tmp_path / "image.png")
    question = [{"type": "image_url", "image_url": {"url": "image.png"}}, {"type": "text", "text": "What is it?"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}, {"role": "assistant", "content": "noise"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    config = DatasetConfig(
        dataset_type="vision", dataset_format="jsonl", dataset_path=str(tmp_path / "rows.jsonl"),
        processor_config=vars(said), cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    pack, made = MultiModalDataset(config)[0], processor.process([image], messages)
    assert made["input_ids"].tolist() == pack.input_ids[0].tolist()
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(made[name], pack.inputs[name])
    processor.save_pretrained(str(tmp_path / "saved"))
    saved = Qwen2VLDataProcessor(ProcessorConfig(str(tmp_path / "saved"), "qwen2_vl"))
    saved.build()
    assert torch.equal(saved.process([image], messages)["input_ids"], made["input_ids"])
    with pytest.raises(DataError, match="1 images are left over: name each by a part of type image"):
        processor.process([image, image], messages)
    with pytest.raises(DataError, match="a part of type 'image_url' has no image: pass an entry of images, audios or"):
        processor.process(None, messages)
    wrong: Any
    for wrong in (
        "text",
        [{"role": "user", "content": ["text"]}],
        [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "user"}],
    ):
        with pytest.raises(DataError, match=r"hf_messages are .*, expected \[\{'role': …, 'content': …\}\], a content"):
            processor.process(None, wrong)
    with pytest.raises(DataError, match=r"an image is a ndarray, expected Pillow's: give Image\.open"):
        processor.process([np.asarray(image)], messages)
    two = processor.process([image, image], [{"role": "user", "content": question * 2}, messages[1]])
    padded = VisionCollator(processor)([made, two])
    lengths = [len(each["input_ids"]) for each in (made, two)]
    assert lengths[0] < lengths[1]
    assert padded["position_ids"].shape == (3, 2, lengths[1])
    for row, each in enumerate((made, two)):
        assert torch.equal(padded["position_ids"][:, row, : lengths[row]], each["position_ids"])
    assert padded["image_grid_thw"].shape == (3, 3)


def test_videos_and_audios_of_a_processor_by_its_name_are_those_of_a_dataset(tmp_path: Path) -> None:
    save_sound_processor(tmp_path / "folder", "qwen2_5_omni")
    said = ProcessorConfig(str(tmp_path / "folder"), "Qwen2_5OmniProcessor")
    processor = Qwen2_5OmniDataProcessor(said)
    processor.build()
    frames, sound = np.random.default_rng(0).integers(0, 256, (6, 3, 56, 84), np.uint8), tone(9000)[:, 0]
    (tmp_path / "0.mkv").write_bytes(_film(frames, 2.0))
    (tmp_path / "0.wav").write_bytes(clip(9000))
    parts = [("video_url", "0.mkv"), ("audio_url", "0.wav")]
    asked: list[dict[str, Any]] = [{"type": kind, kind: {"url": name}} for kind, name in parts]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [*asked, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "noise"},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    config = DatasetConfig(
        dataset_type="qwen_omni", dataset_format="jsonl", dataset_path=str(tmp_path / "rows.jsonl"),
        processor_config=vars(said), cache_dir=str(tmp_path / "cache"), fps=2,
    )  # fmt: skip
    pack = MultiModalDataset(config)[0]
    for video in (frames, frames.transpose(0, 2, 3, 1), torch.from_numpy(frames).float()):
        made = processor.process(None, messages, audios=[sound], sampling_rate=16000, videos=[video])
        assert made["input_ids"].tolist() == pack.input_ids[0].tolist()
        for name in ("pixel_values_videos", "video_grid_thw", "audio_frames", "audio_lengths"):
            assert torch.equal(made[name], pack.inputs[name]), name
    assert made["video_grid_thw"][0, 0] == 3  # all six frames, two of them a step
    with pytest.raises(ConfigError, match="audios need sampling_rate: give how many samples a second they have"):
        processor.process(None, messages, audios=[sound])
    with pytest.raises(DataError, match=r"a video has the shape \[3, 56, 84\]: give \[frames, 3, height, width\], a"):
        processor.process(None, messages, videos=frames)
    with pytest.raises(DataError, match=r"a sound has the shape \[1, 9000\]: give \[samples\]"):
        processor.process(None, messages, audios=[sound[None]], sampling_rate=16000, videos=[frames])
    for strange, level in ((np.full(frames.shape, np.nan), "nan"), (frames.astype(np.uint16) * 257, "0 to 65535")):
        with pytest.raises(DataError, match=f"a video has levels from .*{level}, expected 0 to 255"):
            processor.process(None, messages, audios=[sound], sampling_rate=16000, videos=[strange])
    with pytest.raises(DataError, match=r"a video has 0.0 frames a second, expected 0.001"):
        processor.process(None, messages, audios=[sound], sampling_rate=16000, videos=[frames], fps=0.0)
    with pytest.raises(DataError, match="1 videos are left over: name each by a part of type video"):
        processor.process(None, messages, audios=[sound], sampling_rate=16000, videos=[frames, frames])


@pytest.mark.parametrize("streams", [False, True])
def test_a_processor_of_a_type_alone_is_the_models(streams: bool, tokenizer: Path, tmp_path: Path) -> None:
    model = ModelConfig(config={"model_type": "llama", **SIZES}).build()
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(tmp_path / "model")
    config = text_config(write_jsonl(tmp_path / "chats.jsonl"), tokenizer, tmp_path / "cache")
    config |= {"processor_config": {"processor_type": "qwen2"}, "cache_dir": None if streams else config["cache_dir"]}
    made_by = MultiModalIterableDataset if streams else MultiModalDataset
    dataset: Any = made_by(DatasetConfig(**config))
    assert dataset.build() is dataset
    message = (
        "processor_config.processor_name is missing: name .*, or give the dataset to a trainer, which takes the mod"
    )
    for read in (lambda: next(iter(dataset)),) if streams else (lambda: len(dataset), lambda: dataset[0]):
        with pytest.raises(ConfigError, match=message):
            read()
    args = TrainConfig(output_dir=str(tmp_path / "run"), global_batch=1, max_steps=2, num_workers=0)
    with pytest.raises(ConfigError, match="has no processor_name, and the model has no folder or name that may have a"):
        FSDP2SFTTrainer(ModelConfig(config={"model_type": "llama", **SIZES}), args, train_dataset=dataset)
    trainer = FSDP2SFTTrainer(
        ModelConfig(pretrained=str(tmp_path / "model")),
        args,
        train_dataset=dataset,
        data_collator=dataset.get_collator(),
    )
    trainer.train()
    assert [record["step"] for record in read_log(tmp_path / "run") if "loss" in record] == [1, 2]
    pack = next(iter(dataset)) if streams else dataset[0]
    assert "It is a number." in AutoTokenizer.from_pretrained(tokenizer).decode(pack.input_ids[0])


SCRIPTS = [  # of LMMS Engine's tests: dataset_type, processor_type, format, gradient_accumulation_steps, the layer
    ("vision", "qwen2_5_vl", "parquet", 2, "Qwen2_5_VLDecoderLayer"),
    pytest.param("vision", "qwen3_vl", "arrow", 1, "Qwen3VLTextDecoderLayer", marks=in_long_rounds),
    pytest.param("vision_iterable", "llava", "arrow", 1, "Qwen2DecoderLayer", marks=in_long_rounds),
]


@pytest.mark.parametrize(("dataset_type", "name", "data_type", "accumulated", "layer"), SCRIPTS)
def test_a_script_of_their_tests_trains(
    dataset_type: str, name: str, data_type: str, accumulated: int, layer: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    if name == "llava":
        save_tile_processor(folder, "llava_onevision")
        fields = tile_config("llava_onevision", folder).to_dict()
    else:
        save_processor(folder, name)
        fields = tiny_config(name, folder).to_dict()
    ModelConfig(config=fields).build().save_pretrained(folder)
    table = pyarrow.Table.from_pylist([{"messages": json.dumps(row["messages"])} for row in rows(24)])
    if data_type == "parquet":
        path = tmp_path / "texts.parquet"
        pyarrow.parquet.write_table(table, path)
    else:
        import datasets

        path = tmp_path / "texts"
        datasets.Dataset(table).save_to_disk(path)
    task = create_train_task(
        {
            "trainer_type": "fsdp2_trainer",
            "dataset_config": {
                "dataset_type": dataset_type,
                "dataset_format": "yaml",
                "datasets": [{"path": str(path), "data_folder": "", "data_type": data_type}],
                "processor_config": {"processor_name": str(folder), "processor_type": name},
                "packing": False,
                "video_backend": "qwen_vl_utils",
                **({} if dataset_type.endswith("iterable") else {"cache_dir": str(tmp_path / "cache")}),
            },
            "model_config": {"load_from_pretrained_path": str(folder), "attn_implementation": "flash_attention_2"},
            "trainer_args": {
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": accumulated,
                "gradient_checkpointing": True,
                "num_train_epochs": 1,
                "max_steps": 2,
                "logging_steps": 1,
                "report_to": "none",
                "output_dir": str(tmp_path / "run"),
                "warmup_ratio": 0.0,
                "eval_strategy": "no",
                "dataloader_num_workers": 0,
                "bf16": True,
                "lr_scheduler_type": "cosine",
                "use_liger_kernel": True,
                "use_rmpad": True,
                "fsdp2": True,
                "group_by_length": True,
                "fsdp_config": {"transformer_layer_cls_to_wrap": [layer], "reshard_after_forward": False},
                "sp_ulysses_degree": 1,
                "print_batch_input_steps": 5,
                "use_cpu": True,
            },
        }
    )
    task.build()
    task.run()
    assert [record["step"] for record in read_log(tmp_path / "run") if "loss" in record] == [1, 2]
