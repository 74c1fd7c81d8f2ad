"""Python files of a tokenizer, a processor or a model run only if they are trusted; nobody is asked on stdin."""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.cli.main import main
from lmms_stream.converters.convert import convert
from lmms_stream.doors.huggingface.tokenizer import _take_template
from lmms_stream.doors.lmms_engine.datasets.names import EngineDatasetConfig, processor_of
from lmms_stream.doors.lmms_engine.datasets.processor import PureTextDataProcessor
from lmms_stream.doors.lmms_engine.launch.file import dataset_of
from lmms_stream.doors.relax.opening import load_processor, open_dataset
from lmms_stream.errors import ConfigError
from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.tokenizers import load_tokenizer
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.train.run_config import RunConfig
from transformers import AutoTokenizer

from ..rounds import in_long_rounds

ROOT = Path(__file__).parents[2]
LOADERS = {"from_pretrained", "from_config"}
OF_DOORS = {"load_processor", "load_processing_class", "media_processor"}
# Calls without the setting: of classes that run no code, and of an export's processor, which is not trusted.
WITHOUT = {
    "AutoencoderKL.from_pretrained", "GenerationConfig.from_pretrained", "config_class.from_pretrained",
    "kind.from_pretrained", "kind.from_config",
    "imported('processors.multimodal:MultimodalProcessor').from_pretrained",
}  # fmt: skip
REFUSED = "has its own Python files, which can run any code: read the files, and set trust_remote_code to true"


def loads(folder: Path) -> list[tuple[str, ast.Call]]:
    """Calls that load a tokenizer, a processor or a model, with their class."""
    calls = []
    texts = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    for text in (text for text in texts if any(f"{name}(" in text for name in LOADERS | OF_DOORS)):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OF_DOORS:
                calls.append((node.func.id, node))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS:
                owner = node.func.value
                name = owner.attr if isinstance(owner, ast.Attribute) else ast.unparse(owner)
                calls.append((f"{name}.{node.func.attr}", node))
    return calls


def test_each_load_says_whether_code_is_trusted() -> None:
    found = [*loads(ROOT / "lmms_stream"), *loads(ROOT / "converters")]
    assert len(found) > 20
    for name, call in found:
        named = {each.arg for each in call.keywords}
        options = " ".join(ast.unparse(each.value) for each in call.keywords if each.arg is None)
        is_passed = "trust_remote_code" in named or "trust_remote_code" in options or options == "options"
        assert is_passed or name in WITHOUT, f"{ast.unparse(call)} does not pass trust_remote_code"
        assert not any(
            each.arg == "trust_remote_code" and isinstance(each.value, ast.Constant) for each in call.keywords
        )


@pytest.fixture
def own_code(tokenizer: Path, tmp_path: Path) -> Path:
    """A folder whose tokenizer has a class of its own, which leaves a file where it runs."""
    folder = tmp_path / "own"
    folder.mkdir()
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = ["own.OwnTokenizer", "own.OwnTokenizer"]
    config |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": names}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    lines = [
        "from transformers import PreTrainedTokenizerFast",
        f"open({str(tmp_path / 'ran')!r}, 'w').close()",
        "class OwnTokenizer(PreTrainedTokenizerFast): pass",
    ]
    (folder / "own.py").write_text("\n".join(lines))
    return folder


def test_code_of_a_tokenizer_runs_only_if_it_is_trusted_and_the_dataset_says_so(
    own_code: Path, tmp_path: Path, code_cache: Path
) -> None:
    with pytest.raises(ConfigError, match=REFUSED):
        ProcessorConfig(type="chat", tokenizer=str(own_code)).build()
    assert not (tmp_path / "ran").exists()
    processor = ProcessorConfig(type="chat", tokenizer=str(own_code), trust_remote_code=True).build()
    assert (tmp_path / "ran").exists()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}))
    convert([tmp_path / "rows.jsonl"], str(tmp_path / "out"), processor=processor, num_workers=1)
    assert json.loads((tmp_path / "out/_lmms/dataset.json").read_bytes())["trust_remote_code"] is True


def test_the_printed_remedy_of_a_command_works(own_code: Path, tmp_path: Path, code_cache: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}))
    command = ["convert", str(tmp_path / "rows.jsonl"), str(tmp_path / "out"), "--tokenizer", str(own_code)]
    with pytest.raises(ConfigError, match=REFUSED) as refused:
        load_tokenizer(str(own_code))
    remedy = re.search(r"pass (--setting \S+) to a command", str(refused.value))
    assert remedy is not None
    assert (main([*command, "--workers", "1"]), main([*command, "--workers", "1", *remedy[1].split()])) == (1, 0)


@pytest.mark.parametrize("trusts", [False, True])
def test_doors_pass_the_setting_on(
    own_code: Path, tokenizer: Path, tmp_path: Path, code_cache: Path, trusts: bool
) -> None:
    said: dict[str, Any] = {"processor_name": str(own_code), "processor_type": "pure_text"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input": "a"}))
    data: dict[str, Any] = {"dataset_type": "vision", "dataset_path": str(rows)}
    extra = {"extra_kwargs": {"trust_remote_code": trusts}}
    args = argparse.Namespace(
        hf_checkpoint=str(own_code), trust_remote_code=trusts, rollout_max_prompt_len=9, prompt_data=str(rows)
    )
    loads: list[Callable[[], Any]] = [
        lambda: processor_of(EngineDatasetConfig(**data, processor_config=said | extra)),
        lambda: processor_of(dataset_of(data | {"processor_config": said}, extra, source="x")),
        lambda: PureTextDataProcessor(said | extra).tokenizer,
        lambda: open_dataset(args)[0],
        lambda: _take_template(AutoTokenizer.from_pretrained(tokenizer), str(own_code), trusts=trusts),
    ]
    for load in loads:
        if trusts:
            load()
            continue
        with pytest.raises((ConfigError, ValueError), match=r"has its own Python files|trust_remote_code"):
            load()


def test_a_processor_of_own_code_is_not_taken_for_a_missing_one(own_code: Path, code_cache: Path) -> None:
    named = {"processor_class": "OwnTokenizer", "auto_map": {"AutoProcessor": "own.OwnTokenizer"}}
    (own_code / "processor_config.json").write_text(json.dumps(named))
    with pytest.raises(ConfigError, match=REFUSED):
        load_processor(str(own_code))


@in_long_rounds
def test_nobody_is_asked_on_stdin(own_code: Path, tmp_path: Path) -> None:
    program = f"from lmms_stream.processors.tokenizers import load_tokenizer; load_tokenizer({str(own_code)!r})"
    made = subprocess.run([sys.executable, "-c", program], input=b"y\n" * 9, capture_output=True, timeout=120)
    assert REFUSED in made.stderr.decode()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("trusts", [False, True])
def test_a_trusted_model_has_a_trusted_tokenizer(tmp_path: Path, trusts: bool) -> None:
    run = RunConfig(
        dataset=DatasetConfig(remote=str(tmp_path)),
        model=ModelConfig(pretrained=str(tmp_path), trust_remote_code=trusts),
        train=TrainConfig(output_dir=str(tmp_path / "run"), max_steps=1, global_batch=1),
    )
    assert run.dataset is not None
    assert run._trusting(run.dataset).processor.trust_remote_code is trusts


def test_a_plain_tokenizer_is_loaded_alike(tokenizer: Path) -> None:
    assert load_tokenizer(str(tokenizer)).digest == load_tokenizer(str(tokenizer), trust_remote_code=True).digest
