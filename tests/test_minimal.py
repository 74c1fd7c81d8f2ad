"""With the hard dependencies alone: what works, and which extra the rest asks for."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from lmms_stream.tools.demo.corpus import Corpus

from .arrows import ROOT
from .minimal import make
from .processes import ENVIRONMENT
from .processors.tiny_vlm import picture, save_processor
from .train.test_model import TINY

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUN = {
    "dataset": {
        "remote": "data", "packing_length": 512, "overlong": "drop", "processor": {"tokenizer": "tokenizer"},
    },
    "model": {"config": {"model_type": "llama", **TINY, "vocab_size": 4096, "max_position_embeddings": 512}},
    "train": {
        "output_dir": "run", "global_batch": 2, "max_steps": 2, "num_workers": 1, "save_steps": 1,
        "learning_rate": 0.001,
    },
}  # fmt: skip
PUBLIC = """
import sys
import lmms_stream
for name in lmms_stream.__all__:
    getattr(lmms_stream, name)
missing = ("streaming", "PIL", "accelerate", "datasets", "google", "azure", "torchvision", "matplotlib", "boto3")
assert not [name for name in missing if name in sys.modules]
"""
READ = """
from lmms_stream import ChatProcessor, PackedLoader, PackedStreamingDataset, PackingConfig

dataset = PackedStreamingDataset(
    "data", processor=ChatProcessor.from_pretrained("tokenizer"),
    packing=PackingConfig(packing_length=512, overlong="drop"),
)
assert sum(1 for _ in dataset) == dataset.size
loader = PackedLoader(dataset, global_batch=1, num_workers=1)
batches = iter(loader)
next(batches)
state = loader.state_dict()
expected = next(batches).input_ids
again = PackedLoader(dataset, global_batch=1, num_workers=0)
again.load_state_dict(state)
assert (next(iter(again)).input_ids == expected).all()
"""
CALLS = """
import contextlib, io, json, sys
import yaml
from lmms_stream import FSDP2SFTTrainer, ModelConfig, MultimodalProcessor
from lmms_stream.errors import ConfigError
from lmms_stream.__main__ import main

def read_image():
    sample = {"messages": open("sample.json").read(), "media": open("0.png", "rb").read()}
    MultimodalProcessor.from_pretrained("vision").process(sample)

CODE = {
    "an adapter": lambda: ModelConfig(**yaml.safe_load(open("run.yaml"))["model"], adapter={"r": 4}).build(),
    "a trainer's defaults": lambda: FSDP2SFTTrainer("model", None, None),
    "an image": read_image,
}

def answer(call):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            status = CODE[call]() if call in CODE else main(call.split())
        except ConfigError as error:
            status = str(error)
        except SystemExit as ended:
            status = ended.code
    return [status, errors.getvalue()]

answers = [answer(call) for call in json.load(sys.stdin)]
print(json.dumps(answers), file=open("answers.json", "w"))
"""
DONE = (
    "plan data --packing-length 512 --overlong drop --global-batch 2", "verify data --deep", "inspect data",
    "unload data rows --format parquet", "simulate data --packing-length 512 --overlong drop",
)  # fmt: skip
ASKS_FOR = {
    "convert images.jsonl to --media-root .": "media",
    "convert hf:someone/dataset?split=train to": "huggingface",
    "convert gs://bucket/chats.jsonl to": "gcs",
    "convert azure://account.blob.core.windows.net/bucket/chats.jsonl to": "azure",
    "convert oci://bucket/chats.jsonl to": "mosaicml",
    "convert chats.jsonl to --engine ray": "ray",
    "plan data --packing-length 512 --overlong drop --plot plan.png": "demo",
    "--completion bash": "completion",
    "an adapter": "lora",
    "a trainer's defaults": "huggingface",
    "an image": "media",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("minimal") / "environment")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus, tokenizer: Path, python: Path) -> Path:
    """Files to work on, and the dataset `data`, converted in that environment."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "tokenizer").symlink_to(tokenizer)
    (folder / "chats.jsonl").symlink_to(corpus.functions)
    (folder / "0.png").write_bytes(picture(60, 40))
    asked = [{"type": "image", "image": "0.png"}, {"type": "text", "text": "What?"}]
    chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": "A wave."}]
    (folder / "images.jsonl").write_text(json.dumps({"messages": chat}))
    asked[0] = {"type": "image", "mime": "", "span": [0, (folder / "0.png").stat().st_size], "width": 60, "height": 40}  # type: ignore[dict-item]
    (folder / "sample.json").write_text(json.dumps(chat))
    save_processor(folder / "vision")
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    done = run(
        python,
        folder,
        *["-m", "lmms_stream", "convert", "chats.jsonl", "data", "--tokenizer", "tokenizer", "--compression", "zstd"],
    )
    assert done.returncode == 0, done.stderr
    return folder


def run(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False
    )


def test_there_are_twelve_at_most_each_with_its_reason() -> None:
    assert len(SETTINGS["dependencies"]) <= 12
    lines = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]\n")[0].splitlines()[1:]
    assert all("# " in line for line in lines), lines


@pytest.mark.parametrize("code", [PUBLIC, READ])
def test_public_names_are_imported_and_packs_are_read(code: str, python: Path, folder: Path) -> None:
    done = run(python, folder, "-c", code)
    assert done.returncode == 0, done.stderr


def test_a_model_is_trained_and_exported(python: Path, folder: Path) -> None:
    for command in ("train run.yaml", "export run/checkpoints/step-00000002 model"):
        done = run(python, folder, "-m", "lmms_stream", *command.split())
        assert done.returncode == 0, done.stderr


def test_commands_work_or_name_the_extra_that_they_need(python: Path, folder: Path) -> None:
    calls = [*DONE, *ASKS_FOR]
    done = subprocess.run(
        [str(python), "-c", CALLS], cwd=folder, env=ENVIRONMENT, input=json.dumps(calls), capture_output=True,
        text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = dict(zip(calls, json.loads((folder / "answers.json").read_text()), strict=True))
    assert {call: answers[call] for call in DONE if answers[call][0] != 0} == {}
    wrong = {
        call: answers[call] for call, extra in ASKS_FOR.items()
        if f"lmms-stream[{extra}]" not in "".join(map(str, answers[call])) or answers[call][0] == 0
    }  # fmt: skip
    assert wrong == {}
