"""Known folders and files of tables are converted as they are, or by the command that the error prints."""

from __future__ import annotations

import io
import json
import re
import shlex
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from lmms_stream.cli.main import main
from lmms_stream.converters.convert import convert
from lmms_stream.errors import DataError
from lmms_stream.storage.storage import open_storage
from streaming import StreamingDataset

from ..media_files import image_bytes, wav_bytes
from .source_rows import read

Files = dict[str, Any]  # name -> bytes, text or an object for JSON


def flac_bytes() -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(160, np.float32), 16000, format="FLAC")
    return buffer.getvalue()


def tar_bytes(files: Files) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


IMAGES = [{"license": 1, "file_name": f"{number:012}.jpg", "id": number} for number in (9, 7)]
JPEG = {number: image_bytes("JPEG", color=number) for number in (9, 7)}
WAV = [wav_bytes(value=number) for number in range(3)]


def coco(text: str) -> Files:
    captions = [{"image_id": 7, "id": 1, "caption": text}, {"image_id": 9, "id": 2, "caption": "b"}]
    boxes = [{"image_id": 7, "id": 1, "category_id": 3, "bbox": [0, 1, 2, 3], "segmentation": [[1, 2]]}]
    head = {"info": {"year": 2017}, "licenses": [{"id": 1}], "images": IMAGES}
    classes = [{"id": 3, "name": "cat", "supercategory": "animal"}]
    return {"captions": head | {"annotations": captions},
            "instances": head | {"annotations": boxes, "categories": classes}}  # fmt: skip


COCO: Files = {
    f"annotations/{name}_{split}2017.json": content for split in ("train", "val") for name, content in coco("a").items()
} | {f"{split}2017/{number:012}.jpg": JPEG[number] for split in ("train",) for number in JPEG}
VQA: Files = {
    "v2_OpenEnded_mscoco_val2014_questions.json": {
        "info": {}, "data_subtype": "val2014",
        "questions": [{"image_id": 9, "question": "q", "question_id": 90}]},
    "v2_mscoco_val2014_annotations.json": {
        "info": {}, "annotations": [{"image_id": 9, "question_id": 90, "multiple_choice_answer": "a"}]},
    "val2014/COCO_val2014_000000000009.jpg": JPEG[9],
    "train2014/COCO_train2014_000000000009.jpg": JPEG[7],
}  # fmt: skip
PROBLEM = {"question": "q", "choices": ["x", "a"], "answer": 1, "hint": "", "image": None, "lecture": "l",
           "solution": "because it is", "split": "train"}  # fmt: skip
SCIENCE_QA: Files = {
    "problems.json": {"1": PROBLEM | {"image": "image.png"}, "2": PROBLEM | {"split": "val"}},
    "pid_splits.json": {"train": ["1"], "val": ["2"]},
    "images/train/1/image.png": image_bytes(color=1),
}
SPEECH: Files = {"wav.scp": "u2 /old/place/b.wav\nu1 wav/a.wav\n", "text": "u1 a\nu2 b\n", "utt2spk": "u1 s\nu2 s\n",
                 "wav/a.wav": WAV[1], "wav/b.wav": WAV[2]}  # fmt: skip
LIBRI: Files = {
    "dev-clean/1/2/1-2.trans.txt": "1-2-0000 a\n", "dev-clean/1/2/1-2-0000.flac": flac_bytes(), "README.TXT": "read",
}  # fmt: skip
COMMON_VOICE: Files = {
    "train.tsv": 'client_id\tpath\tsentence\tup_votes\nc\tone.wav\ta "so\t2\n', "clips/one.wav": WAV[1],
    "reported.tsv": "sentence\treason\nx\ty\n",
}  # fmt: skip
LJ_SPEECH: Files = {"metadata.csv": 'L-1|the 1st, "a|the first, a\n', "wavs/L-1.wav": WAV[1], "README": "read"}
LAB: Files = {
    "skills/a/qna.yaml": "version: 2\nseed_examples:\n- question: q\n  answer: a\n",
    "skills/b/qna.yaml": "seed_examples:\n- context: c\n  questions_and_answers:\n  - question: q\n    answer: |\n"
    "      a\n",
}
SQUAD: Files = {"dev-v2.0.json": {"version": "v2.0", "data": [{"title": "T", "paragraphs": [{"context": "c", "qas": [
    {"id": "1", "question": "q", "answers": [{"text": "a", "answer_start": 0}], "is_impossible": False},
    {"id": "2", "question": "r", "answers": [], "is_impossible": True}]}]}]}}  # fmt: skip
OF_YAML: dict[str, Files] = {
    "ChatterBot": {"faq.yaml": "categories:\n- c\nconversations:\n- - q\n  - a\n"},
    "Rasa": {"nlu.yml": "nlu:\n- intent: a\n  examples: |\n    - q [x](y)\n- synonym: s\n  examples: |\n    - t\n"},
    "a list of rows": {"rows.yaml": "- question: q\n  answer: a\n"},
}
INTENTS: Files = {
    "a.json": {
        "intents": [
            {"tag": "t", "patterns": ["q", "r"], "responses": ["a"]},
            {"tag": "none", "patterns": [], "responses": ["b"]},
        ]
    }
}
NESTED: Files = {"a.json": [{"title": "t", "contents": [{"source": "q", "target": "a"}]}]}
SOUNDS: Files = {"shard.tar": tar_bytes({"1.wav": WAV[1], "1.txt": b"a"})}

# Data -> files, what the user names in their folder, options, and the first question and answer.
SHAPES: dict[str, tuple[Files, str, str, list[str]]] = {
    "COCO captions": (COCO, "?config=captions&split=train", "", ["<image>", "a"]),
    "COCO instances": (COCO, "?config=instances&split=train", "--columns text=objects",
                       ["<image>", "[]"]),
    "COCO of Roboflow": ({f"{split}/{name}": content for split in ("train", "valid") for name, content in {
        "_annotations.coco.json": coco("a")["instances"], f"{9:012}.jpg": JPEG[9], f"{7:012}.jpg": JPEG[7]}.items()},
        "?split=train", "--columns text=objects", ["<image>", "[]"]),
    "VQAv2, OK-VQA": (VQA, "", "", ["<image>q", "a"]),
    "ScienceQA": (SCIENCE_QA, "?split=train", "", ["<image>q\n\nA. x\nB. a", "B. a"]),
    "Kaldi": (SPEECH, "", "", ["<audio>", "b"]),
    "LibriSpeech": (LIBRI, "", "", ["<audio>", "a"]),
    "Common Voice": (COMMON_VOICE, "?split=train", "", ["<audio>", 'a "so']),
    "LJSpeech": (LJ_SPEECH, "", "", ["<audio>", "the first, a"]),
    "InstructLab": (LAB, "", "", ["q", "a"]),
    "ChatterBot": (OF_YAML["ChatterBot"], "", "", ["q", "a"]),
    "Rasa": (OF_YAML["Rasa"], "", "--columns prompt=text response=intent", ["q x", "a"]),
    "a list of rows in YAML": (OF_YAML["a list of rows"], "", "", ["q", "a"]),
    "intents of a chatbot": (INTENTS, "", "", ["q", "a"]),
    "a list of pairs in a row": (NESTED, "", "", ["q", "a"]),
    "SQuAD as published": (SQUAD, "", "", ["c\n\nq", "a"]),
    "WebDataset with sounds": (SOUNDS, "", "", ["<audio>", "a"]),
}  # fmt: skip


def written(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def converted(words: str, out: Path, options: str = "") -> list[Any]:
    """The samples that the command writes."""
    source, *others = shlex.split(f"{words} {options}")
    assert main(["convert", source, str(out), "--workers", "1", *others]) == 0
    return list(StreamingDataset(local=str(out), batch_size=1))


def texts(sample: Any) -> list[str]:
    found = []
    for message in json.loads(sample["messages"]):
        parts = message["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        found.append("".join(part.get("text") or f"<{part['type']}>" for part in parts))
    return found


PAGE = Path(__file__).parents[3] / "docs" / "rows.md"
LINES = re.findall(r"^\| ([^|]+?) \| `[^{\[|][^|]*` \| (.*?) ?\|$", PAGE.read_text().partition("## Chats")[0], re.M)


def test_the_page_has_a_line_for_all_shapes_with_their_commands() -> None:
    assert {name: options.strip("`") for name, options in LINES if name in SHAPES} == {
        name: " ".join(filter(None, (f"SOURCE{choice}" if choice else "", options))).strip()
        for name, (_, choice, options, _) in SHAPES.items()
    }


@pytest.mark.parametrize("name", SHAPES)
def test_a_known_folder_is_converted_by_the_command_of_the_page(name: str, tmp_path: Path) -> None:
    files, choice, options, wanted = SHAPES[name]
    source = written(tmp_path / "data", files)
    assert texts(converted(f"'{source}{choice}'", tmp_path / "out", options)[0]) == wanted


@pytest.mark.parametrize("name", ["COCO captions", "ScienceQA", "COCO without its images"])
def test_the_command_that_the_error_prints_converts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, *_ = SHAPES.get(name, SHAPES["COCO captions"])
    source = str(written(tmp_path / "data", files))
    source += "/annotations/captions_train2017.json" if name not in SHAPES else ""
    assert main(["convert", source, str(tmp_path / "out"), "--workers", "1"]) == 1
    said = capsys.readouterr().err
    assert "--on-error" not in said
    (words,) = re.findall(r"name one, as (\S+?)(?:,|$)|pass (--media-root \S+),", said.replace("\n", " ").strip())
    command = words[0] or f"{source} {words[1]}"
    assert len(converted(command, tmp_path / "out")) == (1 if name == "ScienceQA" else 2)


def test_each_pattern_and_each_response_is_in_a_row(tmp_path: Path) -> None:
    intents = [{"tag": "t", "patterns": ["q", "r"], "responses": ["a", "b", "c"]}]
    rows = read(written(tmp_path / "data", {"a.json": intents}))
    assert [(row["prompt"], row["response"]) for row in rows] == [("q", "a"), ("r", "b"), ("q", "c")]


def test_files_next_to_rows_are_not_read_in_place_of_the_rows(tmp_path: Path) -> None:
    files = {"rows.jsonl": '{"text": "x"}\n', **OF_YAML["ChatterBot"], "list.yml": "- a: b\n"}
    assert read(written(tmp_path / "data", files)) == [{"text": "x"}]


def test_a_joined_image_is_of_its_annotation(tmp_path: Path) -> None:
    source = written(tmp_path / "data", COCO)
    samples = converted(f"'{source}?config=captions&split=train'", tmp_path / "out")
    assert [(texts(sample)[1], sample["media"]) for sample in samples] == [("a", JPEG[7]), ("b", JPEG[9])]
    (sample,) = converted(str(written(tmp_path / "vqa", VQA)), tmp_path / "out2")
    assert sample["media"] == JPEG[9]


def test_sounds_below_another_folder_are_named_by_the_media_root(tmp_path: Path) -> None:
    files = {name: content for name, content in LJ_SPEECH.items() if "wavs/" not in name}
    source = written(tmp_path / "data", files | {"wavs/other.wav": WAV[2], "../sounds/L-1.wav": WAV[1]})
    with pytest.raises(DataError, match=rf"'wavs/L-1.wav' is missing below the media root {source}: .* --media-root"):
        convert([source], str(tmp_path / "out"), num_workers=1)
    (sample,) = converted(f"{source} --media-root {tmp_path}/sounds", tmp_path / "out")
    assert sample["media"] == WAV[1]


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (SPEECH | {"wav.scp": "u1 sox a.wav -t wav - |\n"}, "the sound of u1 is a command, and commands are not run: "),
        (SPEECH | {"wav.scp": "u3 wav/a.wav\n"}, "utterance u3 has no line in text: add the line"),
        (SPEECH | {"wav.scp": "u1 wav/a.wav\n"}, "utterance u2 of text has no sound in wav.scp: add it"),
        (SPEECH | {"segments": "u1 r 0 1\n"}, r"segments: cuts sounds into utterances, and only whole sounds are read"),
        (SPEECH | {"text": b"u1 \xff\n"}, r"text: not valid UTF-8"),
        (
            {"a.json": coco("a")["captions"] | {"images": IMAGES[:1]}},
            "annotation 1 is of image 7, which is not in imag",
        ),
        (VQA | {"v2_mscoco_val2014_annotations.json": {"annotations": []}}, "question 90 has no answer in v2_mscoco"),
        (COMMON_VOICE | {"train.tsv": "path\tsentence\nx\n"}, "the row has another number of fields than the header"),
        (LJ_SPEECH | {"metadata.csv": "L-1|a\nL-2\n"}, "metadata.csv:2: no text after 'L-2': add it"),
        (
            {"qna.yaml": "seed_examples:\n- question: q\n"},
            r"qna.yaml: an entry has another form \(KeyError: 'answer'\)",
        ),
    ],
)
def test_tables_that_do_not_fit_together_are_errors_of_their_rows(files: Files, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=wanted):
        convert([written(tmp_path / "data", files)], str(tmp_path / "out"), num_workers=1)


def test_rows_are_the_same_in_a_store_in_small_units_and_in_slices(tmp_path: Path, s3_folder: str) -> None:
    sounds = {f"dev-clean/1/3/1-3-000{number}.flac": flac_bytes() for number in (0, 1)}
    files = LIBRI | {"dev-clean/1/3/1-3.trans.txt": "1-3-0000 b\n1-3-0001 c\n"} | sounds
    local, store = written(tmp_path / "data", files), open_storage(s3_folder)
    for path in local.rglob("*.*"):
        store.write(path.relative_to(local).as_posix(), path.read_bytes())
    rows = read(local)
    assert [row["text"] for row in rows] == ["a", "b", "c"]
    assert read(store.url) == read(local, unit_bytes=1) == rows
    assert read(f"{local}@[1:]", unit_bytes=1) == rows[1:]
    assert converted(store.url, tmp_path / "a") == converted(str(local), tmp_path / "b")
    written(tmp_path / "json", COCO)
    name = "annotations/captions_train2017.json"
    store.write(name, (tmp_path / "json" / name).read_bytes())
    assert read(f"{store.url}/{name}") == read(tmp_path / "json" / name)


def test_other_files_of_these_names_are_read_as_before(tmp_path: Path) -> None:
    files = {
        "chats.json": [{"images": ["a.png"], "text": "t"}], "voice.tsv": "path\tsentence\na\tb\n",
        "metadata.csv": "text,label\na,b\n", "list.yaml": "datasets: [{path: metadata.csv}]\n",
        "rows.json": {"images": [{"file_name": "a.png"}], "messages": [{"role": "user", "content": "q"}] * 2},
        "questions.json": [{"question": "q", "answer": "a"}],
    }  # fmt: skip
    written(tmp_path, files)
    assert [read(tmp_path / name)[0] for name in files] == [
        {"images": ["a.png"], "text": "t"}, {"path": "a", "sentence": "b"}, {"text": "a", "label": "b"},
        {"text": "a", "label": "b"}, files["rows.json"], {"question": "q", "answer": "a"},
    ]  # fmt: skip
