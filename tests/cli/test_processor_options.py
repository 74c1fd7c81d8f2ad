"""--processor vision on the command line, and the same processor in a run's YAML file."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.cli.command import processor_choice
from lmms_stream.config import build_config
from lmms_stream.converters.convert import convert
from lmms_stream.converters.stored.catalog import stored_processor
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors import ProcessorChoice, ProcessorConfig
from lmms_stream.processors.bagel import BagelProcessor
from lmms_stream.processors.base import Processor, processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.tools.inspect.summary import inspect_dataset

from tests.conftest import run_cli
from tests.processors.tiny_vlm import picture, save_processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("processor")
    save_processor(made, "qwen2_5_vl")
    return made


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with none to two pictures each."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with file.open("w") as lines:
        for number in range(12):
            images = [base64.b64encode(picture(60 + 10 * number, 90, seed=each)).decode() for each in range(number % 3)]
            messages = [
                {"role": "user", "content": "<image>" * len(images) + f"Which is number {number}?"},
                {"role": "assistant", "content": f"It is {number}."},
            ]
            lines.write(json.dumps({"messages": messages, "images": images}) + "\n")
    return file


def config_of(**values: object) -> ProcessorConfig:
    return build_config(ProcessorConfig, values, source="run.yaml")


def chosen(tokenizer: str, kind: str, settings: list[str]) -> Processor:
    choice = processor_choice(tokenizer, kind, settings)
    assert choice is not None
    return choice.build()


def test_the_settings_of_a_run_are_those_of_the_processor(folder: Path) -> None:
    built = config_of(type="vision", path=str(folder), image_max_pixels=20000, frame_num=8, learn="last").build()
    made = MultimodalProcessor.from_pretrained(str(folder), image_max_pixels=20000, frame_num=8, learn="last")
    assert isinstance(built, MultimodalProcessor)
    assert (built.learn, built.description) == ("last", made.description)


def test_settings_of_a_section_are_named_with_it(folder: Path) -> None:
    made = chosen(str(folder), "bagel", ["bagel.vae.max_side=768", "bagel.vit.dropout=0.5"])
    assert isinstance(made, BagelProcessor)
    assert (made.settings.vae.max_side, made.settings.vit.dropout) == (768, 0.5)
    with pytest.raises(ConfigError, match=r"--setting: unknown key 'bagel\.vae\.side': did you mean 'bagel\.vae\.m"):
        chosen(str(folder), "bagel", ["bagel.vae.side=768"])


def test_settings_that_are_unknown_or_misplaced_are_named(folder: Path) -> None:
    path = str(folder)
    for values, message in (
        ({"type": "vision"}, r"processor\.path is missing: name the folder or hub id of a processor"),
        ({"type": "vision", "tokenizer": path}, r"processor\.tokenizer is for texts, and .* is vision: name path"),
        (
            {"tokenizer": path, "fps": 1},
            r"processor\.fps is for processor\.type vision, and that is chat: leave fps out",
        ),
        (
            {"type": "text", "path": path},
            r"processor\.path is for processor\.type vision, and that is text: leave path",
        ),
        ({"type": "vision", "path": path, "fps": 1, "frame_num": 2}, "both set the number of frames"),
        (
            {"type": "vision", "path": path, "max_pixels": 9},
            "unknown key 'max_pixels': did you mean 'image_max_pixels' or 'video_max_pixels'",
        ),
        ({"type": "vision", "path": path, "frame_num": "two"}, "frame_num: .* got 'two'"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_of(**values).build()


def test_commands_measure_and_show_images_with_the_settings_of_a_run(rows: Path, folder: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "chats")
    settings = ("--setting", "image_max_pixels=12000", "fps=1")
    chosen = ("--tokenizer", str(folder), "--processor", "vision", *settings)
    converted = run_cli("convert", str(rows), target, *chosen, "--workers", "1")
    assert converted.returncode == 0, converted.stderr
    processor = config_of(type="vision", path=str(folder), image_max_pixels=12000, fps=1).build()
    name = f"_lmms/lengths/{processor_fingerprint(processor)}.npy"
    lengths = np.load(tmp_path / "chats" / name)
    plain = run_cli("convert", str(rows), str(tmp_path / "plain"), "--workers", "1")
    assert plain.returncode == 0, plain.stderr
    measured = run_cli("index", *chosen, str(tmp_path / "plain"), "--workers", "1")
    assert measured.returncode == 0, measured.stderr
    assert np.load(tmp_path / "plain" / name).tolist() == lengths.tolist()
    assert len(lengths) == 12
    planned = run_cli("plan", target, *chosen, "--packing-length", "256", "--json")
    assert planned.returncode == 0, planned.stderr
    shown = run_cli("inspect", target, "-i", "2", *chosen)
    assert shown.returncode == 0, shown.stderr
    assert "<|vision_start|>[image of 84 x 84, 9 tokens]<|vision_end|>" in shown.stdout
    assert "It is 2.<|im_end|>" in shown.stdout
    checked = run_cli("verify", target, "--deep", *settings, "--tokenizer", str(folder), "--processor", "vision")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("index", "data", "--processor", "vision"),
            "--processor vision needs tokens: pass --tokenizer",
        ),
        (
            ("index", "data", "--setting", "fps=1"),
            "--setting fps=1 needs tokens: pass --tokenizer",
        ),
        (("convert", "rows.jsonl", "data", "--processor", "vision"), "--processor vision needs tokens"),
        (("plan", "data", "--packing-length", "9", "--tokenizer", "x", "--setting", "fps"), "fps: expected NAME=VALUE"),
        (
            ("inspect", "data", "--tokenizer", "x", "--processor", "chat", "--setting", "fps=1"),
            "processor.fps is for processor.type vision",
        ),
        (
            ("verify", "data", "--tokenizer", "x", "--processor", "vision", "--setting", "pixels=1"),
            "--setting: unknown key 'pixels': choose one of",
        ),
        (("inspect", "data", "--source", "rows.jsonl:1", "-i", "0"), "--source selects the shown samples: leave"),
        (("convert", "rows.jsonl", "data", "--split-seed", "1"), "--split-seed draws the datasets of --split: pass"),
    ],
)
def test_options_that_do_not_fit_are_named(arguments: tuple[str, ...], message: str, rows: Path) -> None:
    result = run_cli(*arguments, cwd=rows.parent)
    assert result.returncode != 0
    assert message in " ".join(result.stderr.split())


def test_chats_with_media_are_measured_by_the_processor_of_the_folder_though_no_type_is_named(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    report = convert(str(rows), tmp_path / "chats", tokenizer=str(folder), num_workers=1)
    lengths = tmp_path / "chats" / "_lmms" / "lengths"
    built = config_of(path=str(folder)).build()
    assert [file.stem for file in lengths.glob("*.json")] == [processor_fingerprint(built)]
    assert isinstance(built, MultimodalProcessor)
    assert report.num_rows == 12
    texts = tmp_path / "texts.jsonl"
    said = [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "so"}]
    texts.write_text(json.dumps({"messages": said}) + "\n")
    convert(str(texts), tmp_path / "texts", tokenizer=str(folder), num_workers=1)  # of which a run may be of text alone
    (file,) = (tmp_path / "texts" / "_lmms" / "lengths").glob("*.json")
    assert file.stem == processor_fingerprint(config_of(tokenizer=str(folder)).build())


def test_stored_chats_with_media_are_read_by_the_processor_of_the_folder_though_no_type_is_named(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    """By each command and by inspect_dataset."""
    target = str(tmp_path / "chats")
    convert(str(rows), target, num_workers=1)
    name = processor_fingerprint(config_of(path=str(folder)).build())
    for command in (
        ("index", target, "--workers", "1"),
        ("plan", target, "--packing-length", "256"),
        ("verify", target, "--deep", "--workers", "1"),
        ("inspect", target, "-i", "2", "--setting", "image_max_pixels=12000"),
    ):
        done = run_cli(*command, "--tokenizer", str(folder))
        assert done.returncode == 0, done.stdout + done.stderr
    assert "[image of 84 x 84, 9 tokens]" in done.stdout
    assert [file.stem for file in (tmp_path / "chats" / "_lmms" / "lengths").glob("*.json")] == [name]
    (sample,) = inspect_dataset(target, first=2, tokenizer=str(folder)).samples
    assert [seen.kind for seen in sample.seen] == ["image", "image"]


def test_stored_chats_of_text_alone_are_read_by_the_chat_processor_of_a_folder_with_media(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    """Until media were measured; chats of text before those with media are refused with a remedy that works."""
    late, target = tmp_path / "late.jsonl", tmp_path / "late"
    lines = rows.read_text().splitlines()
    late.write_text("\n".join([lines[0]] * 100 + lines[1:]) + "\n")
    with pytest.raises(DataError, match=r"does not read: take the .* with --processor vision --tokenizer FOLDER"):
        convert(str(late), tmp_path / "refused", tokenizer=str(folder), num_workers=1)
    choice = ProcessorChoice(tokenizer=folder)
    convert(str(late), target, num_workers=1, samples_per_shard=100)
    assert isinstance(stored_processor(str(target), choice), ChatProcessor)
    convert(
        str(late), tmp_path / "measured", tokenizer=folder, processor="vision", num_workers=1, samples_per_shard=100
    )
    assert isinstance(stored_processor(str(tmp_path / "measured"), choice), MultimodalProcessor)
