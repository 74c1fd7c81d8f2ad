"""With the hard dependencies alone: what works, and which extra the rest asks for."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml
from lmms_stream.tools.demo.corpus import Corpus

from .arrows import ROOT
from .forks import Ended, command, limited, run_forks
from .minimal import make
from .processes import ENVIRONMENT
from .processors.tiny_vlm import picture, save_processor
from .train.test_model import TINY

pytestmark = limited
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUN = {
    "dataset": {
        "remote": "data", "packing_length": 512, "overlong": "drop", "processor": {"tokenizer": "tokenizer"},
    },
    "model": {"config": {"model_type": "llama", **TINY, "vocab_size": 4096, "max_position_embeddings": 512}},
    "train": {
        "output_dir": "run", "global_batch": 2, "max_steps": 2, "num_workers": 0, "save_steps": 1,
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
OWN_WORDS = """
import sys
from lmms_stream.train.__main__ import main
assert main(["run.yaml", "train.output_dir=words", "train.max_steps=1"]) == 0
names = {"transformers.training_args", "transformers.trainer_callback", "transformers.trainer"}
assert not names & sys.modules.keys(), names & sys.modules.keys()
"""
CALLS = """
import contextlib, io, json
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

answers = [answer(call) for call in json.load(open("calls.json"))]
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
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus, tokenizer: Path) -> Path:
    """Files to work on."""
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
    (folder / "calls.json").write_text(json.dumps([*DONE, *ASKS_FOR]))
    return folder


@pytest.fixture(scope="module")
def ends(python: Path, folder: Path) -> dict[str, Ended]:
    """The end of each script in that environment. `data` is the dataset of all scripts after its conversion."""
    scripts = {
        "import": PUBLIC,
        "convert": command("convert", "chats.jsonl", "data", "--tokenizer", "tokenizer", "--compression", "zstd"),
        "read": READ,
        "train": command("train", "run.yaml"),
        "export": command("export", "run/checkpoints/step-00000002", "model"),
        "words": OWN_WORDS,
        "calls": CALLS,
    }
    libraries = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers")
    return run_forks(scripts, folder, imports=libraries, python=python, environment=ENVIRONMENT)


def test_there_are_twelve_at_most_each_with_its_reason() -> None:
    assert len(SETTINGS["dependencies"]) <= 12
    lines = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]\n")[0].splitlines()[1:]
    assert all("# " in line for line in lines), lines


@pytest.mark.parametrize("script", ["import", "convert", "read", "train", "export", "words"])
def test_public_names_are_imported_packs_are_read_and_a_model_is_trained_and_exported(
    script: str, ends: dict[str, Ended]
) -> None:
    assert ends[script].status == 0, ends[script].stderr


def test_commands_work_or_name_the_extra_that_they_need(ends: dict[str, Ended], folder: Path) -> None:
    assert ends["calls"].status == 0, ends["calls"].stderr
    answers = dict(zip([*DONE, *ASKS_FOR], json.loads((folder / "answers.json").read_text()), strict=True))
    assert {call: answers[call] for call in DONE if answers[call][0] != 0} == {}
    wrong = {
        call: answers[call] for call, extra in ASKS_FOR.items()
        if f"lmms-stream[{extra}]" not in "".join(map(str, answers[call])) or answers[call][0] == 0
    }  # fmt: skip
    assert wrong == {}
