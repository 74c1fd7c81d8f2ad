from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lmms_stream.config import load_config
from lmms_stream.errors import CheckpointError, ConfigError
from lmms_stream.storage.storage import open_storage
from lmms_stream.train.checkpoint import export, weight_files
from lmms_stream.train.checkpoint.checkpoint import Checkpointer, checkpoints
from lmms_stream.train.checkpoint.export import export_checkpoint, model_files, save_folder
from lmms_stream.train.checkpoint.tensors import read_tensors
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run_config import RunConfig
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from ..conftest import run_cli, write_tokens
from ..processors.tiny_vlm import save_processor, tiny_config
from ..proxy import FaultProxy
from ..rounds import in_long_rounds
from ..versions import IS_5
from .runs import MODEL, VOCABULARY, trainer_of, write_small_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_tokens(folder, num_samples=300)
    return folder


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids).logits
    return logits


def train_one(run: Path, *overrides: str) -> tuple[Path, torch.Tensor]:
    """A run's last checkpoint, and the logits of the model as the trainer leaves it."""
    trainer = trainer_of(run, *overrides)
    trainer.train()
    trained = load_config(RunConfig, run, overrides).model.build()
    weights = {name: each.to_local() for name, each in trainer.model.model.state_dict().items()}  # one rank has all
    trained.load_state_dict(weights)
    return checkpoints(Path(trainer.args.output_dir) / "checkpoints")[-1], logits_of(trained)


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_model_gives_the_logits_of_the_trained_one(tied: bool, data: Path, tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run.yaml", data, max_steps=3, output_dir=str(tmp_path / "out"), export=True)
    checkpoint, expected = train_one(run, f"model.config.tie_word_embeddings={tied}")
    out = export_checkpoint(checkpoint, tmp_path / "model")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "out" / "export" / "model.safetensors").read_bytes()
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    loaded, info = loaded
    assert not any(info.values())
    assert torch.equal(logits_of(loaded), expected)
    assert loaded.config.tie_word_embeddings is tied
    half = export_checkpoint(checkpoint, tmp_path / "half", dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(half, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.allclose(logits_of(loaded).float(), expected, atol=0.02)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (out, half)]
    assert sizes[1] < 0.6 * sizes[0]


def test_an_export_has_the_tokenizer_and_comes_from_a_store_too(
    dataset_folder: Path, tokenizer: Path, s3_folder: str, tmp_path: Path
) -> None:
    run = write_small_run(tmp_path / "run.yaml", dataset_folder, max_steps=1, output_dir=str(tmp_path / "out"))
    chat = [f"dataset.processor={{tokenizer: {tokenizer}}}", "dataset.packing_length=1024", "dataset.overlong=drop"]
    trainer_of(run, *chat, "model.config.vocab_size=4096", f"train.checkpoint_dir={s3_folder}").train()
    assert not list(tmp_path.rglob("step-*"))
    result = run_cli("export", f"{s3_folder}/step-00000001", str(tmp_path / "model"))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{s3_folder}/step-00000001 -> {tmp_path / 'model'}\n"
    made, original = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "model", tokenizer))
    chat_text = [{"role": "user", "content": "What is a task?"}, {"role": "assistant", "content": "A future."}]
    assert made.apply_chat_template(chat_text) == original.apply_chat_template(chat_text)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.vocab_size == 4096
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


VISION = {
    "model_type": "qwen2_vl",
    "text_config": {**MODEL, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    "vision_config": {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2},
    **{f"{name}_token_id": 500 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))},
}
EXPERTS = {
    **MODEL, "model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip


@pytest.mark.parametrize("shard_size", ["40KB", pytest.param("5GB", marks=in_long_rounds)])
@pytest.mark.parametrize(
    "model",
    [
        {"config": MODEL},
        {"config": MODEL, "dtype": "bfloat16"},
        {"config": {**MODEL, "tie_word_embeddings": True}},
        {"config": {**MODEL, "model_type": "bert", "is_decoder": True}},  # its tied weights have several names
        {"config": VISION},  # its weights have other names in files
        {"config": EXPERTS},  # in which transformers 5 joins what files hold of each
    ],
)
def test_an_export_is_what_transformers_saves(
    model: Any, shard_size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files byte by byte: weights in as many files, config, generation config."""
    init_distributed(60)
    built = ModelConfig(**model).build()
    optimizer = torch.optim.AdamW(built.parameters())
    with Checkpointer(str(tmp_path / "saved"), staging=tmp_path / "staging") as checkpointer:
        checkpointer.save(built, optimizer, step=1, state={}, documents=model_files(built, None))
    monkeypatch.setattr(weight_files, "SHARD_SIZE", shard_size)
    monkeypatch.setattr(weight_files, "AT_ONCE_BYTES", 10_000)
    built.save_pretrained(tmp_path / "expected", max_shard_size=shard_size)
    out = export_checkpoint(tmp_path / "saved" / "step-00000001", tmp_path / "model")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "expected").iterdir()}
    assert ("model.safetensors.index.json" in expected) == (shard_size == "40KB")
    (out / "export.json").unlink()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected
    fully_shard(built)
    save_folder(built, tmp_path / "sharded", {})
    saved = {path.name: path.read_bytes() for path in (tmp_path / "sharded").glob("*.safetensors*")}
    assert saved == {name: expected[name] for name in saved}


def test_every_chat_template_is_saved_and_removed_with_its_checkpoint(tokenizer: Path, tmp_path: Path) -> None:
    init_distributed(60)
    original = AutoTokenizer.from_pretrained(tokenizer)
    original.chat_template = {"default": original.chat_template, "tool_use": "{{ tools }}"}
    original.save_pretrained(tmp_path / "tokenizer")
    built = ModelConfig(config=MODEL).build()
    optimizer, files = torch.optim.AdamW(built.parameters()), model_files(built, str(tmp_path / "tokenizer"))
    with Checkpointer(str(tmp_path / "saved"), staging=tmp_path / "staging", keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(built, optimizer, step=step, state={}, documents=files)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-00000002"]
    for _ in range(2):  # the second replaces the first
        out = export_checkpoint(tmp_path / "saved" / "step-00000002", tmp_path / "model")
        assert AutoTokenizer.from_pretrained(out).chat_template == original.chat_template
    fully_shard(built)
    save_folder(built, tmp_path / "now", {name.removeprefix("model/"): data for name, data in files.items()})
    assert AutoTokenizer.from_pretrained(tmp_path / "now").chat_template == original.chat_template


def test_an_export_holds_few_tensors_at_a_time(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_small_run(tmp_path / "run.yaml", data, max_steps=1, output_dir=str(tmp_path / "out"))
    checkpoint, _ = train_one(run)
    largest, at_once = 4 * VOCABULARY * 32, 20_000
    monkeypatch.setattr(weight_files, "AT_ONCE_BYTES", at_once)
    read: list[list[weakref.ref[torch.Tensor]]] = []

    def reading(folder: Path, values: Any, **options: Any) -> None:
        assert not [each for before in read for each in before if each() is not None]  # what was read is written
        given = values["model"].values()
        assert sum(each.nbytes for each in given) <= (at_once if len(given) > 1 else largest)
        read.append([weakref.ref(each) for each in given])
        read_tensors(folder, values, **options)

    monkeypatch.setattr(export, "read_tensors", reading)
    export_checkpoint(checkpoint, tmp_path / "model")
    assert len(read) > 5


def test_an_export_from_a_store_fetches_nothing_of_the_optimizer(
    data: Path, s3_folder: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    run = write_small_run(tmp_path / "run.yaml", data, max_steps=1, output_dir=str(tmp_path / "out"))
    trainer_of(run, f"train.checkpoint_dir={s3_folder}").train()
    stored = {each.key.partition("/")[2]: each for each in open_storage(s3_folder).list_objects("step-00000001/")}
    proxy.set_rules()  # counts anew
    out = export_checkpoint(f"{s3_folder}/step-00000001", tmp_path / "model")
    of_model, of_optimizer, counts = sorted(name for name in stored if name.endswith(".distcp"))
    assert proxy.traffic().num_requests("GET", of_model) == 1
    assert proxy.traffic().num_requests("GET", of_optimizer) == proxy.traffic().num_requests("GET", counts) == 0
    weights = (out / "model.safetensors").stat().st_size
    assert stored[of_optimizer].num_bytes > 1.9 * weights
    assert stored[of_model].num_bytes < 1.5 * weights


@pytest.mark.parametrize("fails", ["in the model", "alone"])
def test_a_layer_that_fails_in_the_proof_is_no_proof(fails: str, tmp_path: Path) -> None:
    model, written = (ModelConfig(config=MODEL).build().eval() for _ in range(2))
    model.save_pretrained(tmp_path)
    state, path = model.state_dict(), "model.layers.1.mlp.down_proj"
    others = {f"{path}.weight": state[f"{path}.weight"].T.contiguous()}
    if fails == "alone":
        model.forward = lambda **_: None  # reaches no layer
    with pytest.raises(CheckpointError, match=rf"is not the checkpoint's: {path} does not run \(mm: mat1"):
        weight_files.prove_written(tmp_path, model, state.__getitem__, written, {**state, **others}.__getitem__)


def written_pair(folder: Path, config: dict[str, Any], adapter: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Two equal models with an adapter, and drawn weights; the folder names float16 as the format."""
    model, written = (ModelConfig(config=config, adapter=adapter).build().eval() for _ in range(2))
    drawn = torch.Generator().manual_seed(0)
    state = {name: torch.rand(each.shape, generator=drawn) for name, each in model.state_dict().items()}
    model.config.save_pretrained(folder)
    save_file({"x": torch.zeros(1, dtype=torch.float16)}, folder / "model.safetensors")
    return model, written, state


def test_roundings_that_cancel_by_chance_are_no_other_model(tmp_path: Path) -> None:
    config = MODEL | {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model, written, state = written_pair(tmp_path, config, {"r": 1, "target_modules": "all-linear"})
    rounded = {name: each.half().float() for name, each in state.items()}
    weight_files.prove_written(tmp_path, model, state.__getitem__, written, rounded.__getitem__)


@pytest.mark.skipif(not IS_5, reason="experts are single layers until transformers 5")
def test_an_adapter_of_whole_experts_is_proved(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
    }  # fmt: skip
    adapter = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    model, written, state = written_pair(tmp_path, config, adapter)
    weight_files.prove_written(tmp_path, model, state.__getitem__, written, state.__getitem__)
    model, written, _ = written_pair(tmp_path, config, adapter)
    damaged = {name: each + ("experts.lora_A" in name) for name, each in state.items()}
    with pytest.raises(CheckpointError, match=r"experts.*differs by"):
        weight_files.prove_written(tmp_path, model, state.__getitem__, written, damaged.__getitem__)


def test_the_proof_runs_media_of_a_real_processor(tmp_path: Path) -> None:
    save_processor(tmp_path, "qwen2_vl")
    model, written = (
        AutoModelForImageTextToText.from_config(tiny_config("qwen2_vl", tmp_path)).eval() for _ in range(2)
    )
    model.save_pretrained(tmp_path)
    ran: list[str] = []
    for name, each in model.named_modules():
        each.register_forward_hook(lambda *_, name=name: ran.append(name))
    state = model.state_dict()
    weight_files.prove_written(tmp_path, model, state.__getitem__, written, state.__getitem__)
    assert ran.count("model.visual.blocks.0") == 2  # an image, and a video
    damaged = {name: each + 0.1 * ("visual.merger.mlp.2.bias" in name) for name, each in state.items()}
    with pytest.raises(
        CheckpointError, match=r"the checkpoint's: \S*visual.merger.mlp.2 differs by \S+ on drawn inputs"
    ):
        weight_files.prove_written(tmp_path, model, state.__getitem__, written, damaged.__getitem__)


def test_an_export_replaces_an_earlier_one_and_nothing_else(data: Path, tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run.yaml", data, max_steps=2, save_steps=1, output_dir=str(tmp_path / "out"))
    trainer_of(run).train()
    first, second = checkpoints(tmp_path / "out" / "checkpoints")
    out = tmp_path / "model"
    out.mkdir()
    for checkpoint in (first, second):
        export_checkpoint(checkpoint, out)
        assert json.loads((out / "export.json").read_text())["checkpoint"] == str(checkpoint)
    before = (out / "model.safetensors").read_bytes()
    data_file = second / "__0_0.distcp"
    data_file.write_bytes(data_file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"step-00000002/__0_0\.distcp has \d+ of \d+ bytes"):
        export_checkpoint(second, out)
    (out / "notes.txt").touch()
    with pytest.raises(
        ConfigError, match=r"model holds notes\.txt, which no export wrote: name an empty or new folder"
    ):
        export_checkpoint(first, out)
    assert (out / "model.safetensors").read_bytes() == before
    named = f"name one of {re.escape(f'{first}, {second}')}$"
    for wrong, message in (
        (tmp_path / "out", f"out is not a checkpoint: {named}"),
        (first.parent, f"is not a checkpoint: {named}"),
        (first.with_name("step-00000007"), f"step-00000007 does not exist: {named}"),
        (tmp_path, "is not a checkpoint: .* holds no checkpoint; name a folder step-NNNNNNNN below"),
    ):
        with pytest.raises(CheckpointError, match=message):
            export_checkpoint(wrong, tmp_path / "other")
    with pytest.raises(ConfigError, match="is a file: name another folder"):
        export_checkpoint(first, tmp_path / "run.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "run.yaml"]
    assert open_storage(out).list_objects("notes")


def test_an_export_that_would_be_refused_at_the_end_is_refused_at_the_start(data: Path, tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run.yaml", data, max_steps=2, output_dir=str(tmp_path / "out"), export=True)
    (tmp_path / "out" / "export").mkdir(parents=True)
    (tmp_path / "out" / "export" / "notes.txt").touch()
    try:
        with pytest.raises(ConfigError, match=r"export holds notes\.txt, which no export wrote"):
            trainer_of(run).build()
    finally:
        dist.destroy_process_group()
