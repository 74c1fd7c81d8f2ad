"""Adapters of peft in a run: what is trained, saved, exported and merged. On several ranks: tests/jobs/test_lora.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import peft
import pytest
import torch
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.errors import CheckpointError, ConfigError
from lmms_stream.train.checkpoint import export, export_adapter
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.checkpoint.export import export_checkpoint, model_files, save_folder
from lmms_stream.train.checkpoint.tensors import read_metadata, stored_tensors
from lmms_stream.train.model.adapters import adapter_of, add_adapter, take_adapter
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.run.distributed import init_distributed
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from ..conftest import run_cli, write_tokens
from ..rounds import in_long_rounds
from .runs import MODEL, VOCABULARY, trainer_of, write_small_run
from .test_override_points import parts_of

LORA = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_tokens(folder, num_samples=300)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model."""
    folder = tmp_path_factory.mktemp("base")
    ModelConfig(config=MODEL, seed=7).build().save_pretrained(folder)
    return folder


def lora_run(tmp_path: Path, data: Path, base: Path, adapter: Any = LORA, **train: Any) -> tuple[Path, list[str]]:
    run = write_small_run(tmp_path / "run.yaml", data, **{"max_steps": 3, "output_dir": str(tmp_path / "out"), **train})
    return run, [f"model={json.dumps({'pretrained': str(base), 'adapter': adapter})}"]


def train_lora(tmp_path: Path, data: Path, base: Path, adapter: Any = LORA) -> None:
    run, overrides = lora_run(tmp_path, data, base, adapter)
    trainer_of(run, *overrides).train()


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids).logits
    return logits


def trained_logits(trainer: Any, config: ModelConfig) -> torch.Tensor:
    built = config.build()
    built.load_state_dict({name: each.to_local() for name, each in trainer.model.model.state_dict().items()})
    return logits_of(built)


@pytest.mark.parametrize(
    ("adapter", "why_whole"),
    [
        (LORA, ""),
        ({**LORA, "use_dora": True, "lora_dropout": 0.0}, ""),
        ({"r": 4, "target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"], "bias": "all"}, ""),
        (
            {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
            "its adapter is of peft_type IA3",
        ),
        (
            {"peft_type": "OFT", "oft_block_size": 8, "r": 0, "target_modules": ["v_proj"]},
            "its adapter is of peft_type OFT",
        ),
    ],
    ids=["lora", "dora", "modules", "ia3", "oft"],
)
def test_an_adapter_is_trained_alone_saved_alone_loaded_by_peft_and_merged(
    adapter: dict[str, Any], why_whole: str, data: Path, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, overrides = lora_run(tmp_path, data, base, adapter, export=True, learning_rate=0.03)
    trainer = trainer_of(run, *overrides)
    before = {name: each.to_local().clone() for name, each in trainer.model.model.state_dict().items()}
    trainer.train()
    saved = adapter_of(trainer.model.model)
    assert saved is not None
    after = {name: each.to_local() for name, each in trainer.model.model.state_dict().items()}
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed
    assert changed <= saved.tensors.keys()
    (checkpoint,) = checkpoints(tmp_path / "out" / "checkpoints")
    metadata = read_metadata(checkpoint)
    assert stored_tensors(metadata, "model.").keys() == saved.tensors.keys()
    assert {name.rpartition(".")[0] for name in stored_tensors(metadata, "optimizer.")} <= saved.tensors.keys()

    expected = trained_logits(trainer, ModelConfig(pretrained=str(base), adapter=adapter))
    plain: Any = AutoModelForCausalLM.from_pretrained(base)
    assert float((logits_of(plain) - expected).abs().max()) > 1e-3
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "out" / "export")
    assert torch.allclose(logits_of(loaded), expected, atol=1e-5)
    trainer.save_model(tmp_path / "saved")
    again = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    exported = load_file(tmp_path / "out" / "export" / "adapter_model.safetensors")
    assert again.keys() == exported.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in exported.items())
    names = {path.name for path in (tmp_path / "out" / "export").iterdir()} - {"export.json"}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == names
    merged = export_checkpoint(checkpoint, tmp_path / "merged", merge=True)
    told = [f"{base} is loaded whole to merge an adapter into it: {why_whole}"] if why_whole else []
    assert [each.getMessage() for each in caplog.records if "loaded whole" in each.getMessage()] == told
    reread: Any = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    whole, info = reread
    assert not any(info.values())
    assert torch.allclose(logits_of(whole), expected, atol=1e-5)
    theirs = loaded.merge_and_unload().state_dict()
    assert theirs.keys() == whole.state_dict().keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in whole.state_dict().items())


def test_a_model_saved_over_another_has_its_own_adapter_config_and_tokenizer(tmp_path: Path) -> None:
    """The config of the first adapter would scale the weights of the second by another lora_alpha."""
    init_distributed(60)
    for alpha in (8, 64):
        model = ModelConfig(config=MODEL, adapter={**LORA, "lora_alpha": alpha}).build()
        files = {name.removeprefix("model/"): data for name, data in model_files(model, None).items()}
        fully_shard(model)
        save_folder(model, tmp_path, files | {"tokenizer.json": b"of %d" % alpha})
        assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == alpha
        assert (tmp_path / "tokenizer.json").read_bytes() == b"of %d" % alpha
    assert not (tmp_path / "config.json").exists()


@in_long_rounds
def test_an_adapter_goes_on_bit_by_bit_on_its_own_base_alone(data: Path, base: Path, tmp_path: Path) -> None:
    run, overrides = lora_run(tmp_path, data, base, max_steps=6, save_steps=3, lr_scheduler_type="constant")
    trainer_of(run, *overrides, f"train.output_dir={tmp_path / 'whole'}").train()
    trainer_of(run, *overrides, "train.max_steps=3").train()
    resumed = trainer_of(run, *overrides)
    resumed.train()
    folders = [
        export_checkpoint(tmp_path / name / "checkpoints" / "step-00000006", tmp_path / f"{name}-adapter")
        for name in ("whole", "out")
    ]
    whole, again = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert sorted(path.name for path in folders[0].iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "export.json",
    ]  # fmt: skip

    other = tmp_path / "other"
    ModelConfig(config=MODEL, seed=8).build().save_pretrained(other)
    with pytest.raises(CheckpointError, match=r"another model \(weights under its adapter with digest \w+, now \w+\)"):
        train_lora(tmp_path, data, other)
    with pytest.raises(CheckpointError, match=r"another model \(r 4, now 8\): restore"):
        train_lora(tmp_path, data, base, {**LORA, "r": 8})
    with pytest.raises(CheckpointError, match=r"another model \(an adapter, now all of it\): restore"):
        train_lora(tmp_path, data, base, None)


def test_an_adapter_is_merged_by_the_command_with_its_own_base_alone(data: Path, base: Path, tmp_path: Path) -> None:
    moved = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(moved, max_shard_size="40KB")
    assert len([*moved.glob("*.safetensors")]) > 2
    run, overrides = lora_run(tmp_path, data, moved, max_steps=1)
    trainer_of(run, *overrides).train()
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000001"
    done = run_cli("export", str(checkpoint), str(tmp_path / "merged"), "--merge", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == torch.bfloat16
    ModelConfig(config=MODEL, seed=8).build().save_pretrained(moved)
    with pytest.raises(CheckpointError, match=rf"{moved} is not the base model of the adapter at .* \(digest \w+"):
        export_checkpoint(checkpoint, tmp_path / "none", merge=True)
    shutil.rmtree(moved)
    with pytest.raises(CheckpointError, match=f"{moved}, the model under the adapter of .*, cannot be loaded"):
        export_checkpoint(checkpoint, tmp_path / "none", merge=True)


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")  # peft advises against it
@pytest.mark.parametrize("case", ["tied", "gaussian", "made of the base", "in half"])
def test_what_cannot_be_merged_by_parts_is_merged_whole_and_says_why(
    case: str, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To the last bit as peft merges it, either way."""
    adapter: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": ["embed_tokens", "v_proj"],
    }
    adapter |= {"init_lora_weights": {"gaussian": "gaussian", "made of the base": "pissa"}.get(case, True)}
    base = tmp_path / "base"
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if case == "in half" else "float32"
    ModelConfig(config={**MODEL, "tie_word_embeddings": case == "tied"}, seed=7, dtype=dtype).build().save_pretrained(
        base
    )
    run, overrides = lora_run(tmp_path, data, base, adapter, max_steps=2, learning_rate=0.03)
    if case == "made of the base":
        overrides.append("model.adapter.target_modules=[v_proj]")  # peft makes none of embeddings
    trainer = trainer_of(run, *overrides, f"model.dtype={dtype}")
    trainer.train()
    (checkpoint,) = checkpoints(tmp_path / "out" / "checkpoints")
    merged = export_checkpoint(checkpoint, tmp_path / "merged", merge=True)
    reasons = {"made of the base": "init_lora_weights pissa changes the weights under the adapter"}
    told = [f"{base} is loaded whole to merge an adapter into it: {reasons[case]}"] if case in reasons else []
    assert [each.getMessage() for each in caplog.records if "loaded whole" in each.getMessage()] == told
    if case == "tied":  # the trained model has two matrices; peft's merge_and_unload merges into both
        loaded = AutoModelForCausalLM.from_pretrained(merged)
        assert not loaded.config.tie_word_embeddings
        expected = trained_logits(trainer, ModelConfig(pretrained=str(base), adapter=adapter))
        assert torch.allclose(logits_of(loaded), expected, atol=1e-5)
        return
    if case == "made of the base":
        export_checkpoint(checkpoint, tmp_path / "half", merge=True, dtype="bfloat16")  # loads the base as trained
        export_checkpoint(checkpoint, tmp_path / "adapter")
        return  # peft's own file is of the changed base, which it does not keep
    folder = export_checkpoint(checkpoint, tmp_path / "adapter")
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    theirs = peft.PeftModel.from_pretrained(plain, folder).merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(merged, dtype="auto").state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("fault", ["scaled", "transposed", "dropped"])
def test_an_export_with_a_planted_fault_is_refused(
    fault: str, data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(each for each in weights if "layers.1.self_attn.v_proj" in each)
        made = {
            "scaled": 1.01 * weights[name],
            "transposed": weights[name].flatten().view(weights[name].shape[::-1]).mT.contiguous(),
        }
        return {each: made.get(fault, tensor) if each == name else tensor for each, tensor in weights.items()}

    def damage(folder: Path, *_: Any, **__: Any) -> None:
        for path in folder.glob("*.safetensors"):
            weights = faulty(load_file(path))
            if fault == "dropped":
                weights = {name: each for name, each in weights.items() if "layers.1.self_attn.v_proj" not in name}
            save_file(weights, path, metadata={"format": "pt"})

    for module, name in (
        (export, "write_weights"),
        (export_adapter, "write_weights"),
        (export_adapter, "save_adapter"),
    ):
        write = getattr(module, name)

        def write_damaged(*args: Any, write: Any = write, **options: Any) -> None:
            write(*args, **options)
            damage(*[each for each in args if isinstance(each, Path)])

        monkeypatch.setattr(module, name, write_damaged)
    run, overrides = lora_run(tmp_path, data, base, {**LORA, "target_modules": ["v_proj"]}, max_steps=2)
    trainer_of(run, *overrides, "train.learning_rate=0.1").train()
    (of_adapter,) = checkpoints(tmp_path / "out" / "checkpoints")
    plain = write_small_run(tmp_path / "plain.yaml", data, max_steps=1, output_dir=str(tmp_path / "plain"))
    trainer_of(plain).train()
    (of_model,) = checkpoints(tmp_path / "plain" / "checkpoints")
    for checkpoint, merge in ((of_model, False), (of_adapter, False), (of_adapter, True)):
        with pytest.raises(CheckpointError, match=r"layers.1.self_attn.v_proj.* (differs|was not written)"):
            export_checkpoint(checkpoint, tmp_path / "none", merge=merge)
        assert not (tmp_path / "none").exists()


def test_what_has_no_adapter_or_no_base_cannot_be_merged(data: Path, tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run.yaml", data, max_steps=1)
    out = f"train.output_dir={tmp_path / 'plain'}"
    trainer_of(run, out).train()
    with pytest.raises(ConfigError, match="has a whole model and no adapter to merge: export it without --merge"):
        export_checkpoint(tmp_path / "plain" / "checkpoints" / "step-00000001", tmp_path / "none", merge=True)
    out = f"train.output_dir={tmp_path / 'out'}"
    trainer_of(run, out, "model.adapter={target_modules: [q_proj]}").train()
    with pytest.raises(CheckpointError, match="was made from a config, and is in no folder: save it, and train"):
        export_checkpoint(tmp_path / "out" / "checkpoints" / "step-00000001", tmp_path / "none", merge=True)


def test_a_model_of_pefts_is_trained_as_its_adapter(data: Path, base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    inner = take_adapter(wrapped)
    assert inner is wrapped.get_base_model()
    given = adapter_of(inner)
    named = adapter_of(add_adapter(AutoModelForCausalLM.from_pretrained(base), config))
    assert given is not None
    assert given == named
    assert sorted(given.tensors.values())[0] == "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert take_adapter(inner) is inner
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert take_adapter(plain) is plain
    assert adapter_of(plain) is None

    # Given with its wrapper, and as a name beside a config of peft's: both train.
    run = write_small_run(tmp_path / "run.yaml", data, max_steps=2)
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, options in {"given": {"model": wrapped}, "named": {"model": str(base), "peft_config": config}}.items():
        parts = parts_of(run, f"train.output_dir={tmp_path / name}")
        trainer = FSDP2SFTTrainer(**{**parts, **options})
        trainer.train()
        trainer.save_model(tmp_path / name / "saved")
        saved = load_file(tmp_path / name / "saved" / "adapter_model.safetensors")
        assert {each.removeprefix("base_model.model.") for each in saved} == {*given.tensors.values()}
        assert all(tensor.any() for each, tensor in saved.items() if "lora_B" in each)


Q_PROJ: dict[str, Any] = {"target_modules": ["q_proj"]}


@pytest.mark.filterwarnings("ignore:`init_lora_weights` is 'eva'", "ignore::UserWarning:peft")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 4, "ranks": 2}, "model.adapter has 'ranks', which no LoraConfig has: the nearest is 'rank"),
        ({"r": 4, "lora_alfa": 2}, "model.adapter has 'lora_alfa', .*: the nearest is 'lora_alpha'"),
        ({"target_modules": ["q_proj", "k_projj"]}, "target_modules has 'k_projj', .*: did you mean 'k_proj'"),
        ({**Q_PROJ, "modules_to_save": ["lm_heads"]}, "modules_to_save has 'lm_heads', .*: did you mean 'lm_head'"),
        ({**Q_PROJ, "modules_to_save": "lm_head"}, r"modules_to_save is 'lm_head': write a list, \[lm_head\]"),
        ({**Q_PROJ, "exclude_modules": ["v_pro"]}, "exclude_modules has 'v_pro', .*: did you mean 'v_proj'"),
        ({**Q_PROJ, "layers_to_transform": [0, 9]}, "layers_to_transform has 9, .*: choose one of 0, 1"),
        ({**Q_PROJ, "rank_pattern": {"v_proj": 2}}, "an option of the adapter: .*rank_pattern .* were ignored"),
        ({**Q_PROJ, "alpha_pattern": {"x.q_proj": 2}}, "alpha_pattern has 'x.q_proj', which matches nothing"),
        ({**Q_PROJ, "rank_pattern": {"q_proj[": 2}}, r"model.adapter has no regular expression in '.*q_proj\[.*unterm"),
        ({"target_modules": "q_proj["}, "the adapter cannot be added: unterminated character set"),
        ({**Q_PROJ, "eva_config": {"rho": 2.0}}, "peft ignores an option of the adapter: `eva_config` .* not 'eva'"),
        ({**Q_PROJ, "init_lora_weights": "eva"}, "eva of an adapter reads data in a call before training"),
        ({**Q_PROJ, "init_lora_weights": "lora_ga"}, "lora_ga of an adapter reads data in a call before training"),
        ({**Q_PROJ, "task_type": "SEQ_CLS"}, "task_type SEQ_CLS trains a head that the model does not have"),
        ({**Q_PROJ, "layer_replication": [[0, 1], [0, 1]]}, "layer_replication shares weights between layers"),
        ({**Q_PROJ, "alora_invocation_tokens": [3]}, "alora_invocation_tokens finds tokens .* by peft's own forward"),
        ({**Q_PROJ, "trainable_token_indices": [3]}, "reads the embedding's weight from outside .*: leave it out"),
        ({"peft_type": "VERA", "r": 4, **Q_PROJ}, "an adapter of type VERA .* Set `config.save_projection` to `False`"),
        ({"peft_type": "POLY", "n_tasks": 2, **Q_PROJ}, "POLY takes the number of a task with each batch"),
        ({"peft_type": "LORAS"}, "the adapter cannot be added: 'LORAS'"),
        (
            {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4},
            "PREFIX_TUNING puts tokens of its own .*",
        ),
        ({"peft_type": "ADALORA", "total_step": 9}, "ADALORA has other ranks as it trains, .*: choose LORA"),
    ],
)
def test_adapters_that_cannot_be_trained_on_packs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(config=MODEL, adapter=config).build()


def test_an_adapter_for_inference_and_several_are_refused(base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    wrapped.save_pretrained(str(tmp_path / "adapter"))
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"not to be trained: load it with PeftModel.from_pretrained\(…, is_t"):
        take_adapter(loaded)
    wrapped.add_adapter("second", config)
    with pytest.raises(ConfigError, match="the model has adapters default and second: only one can be trained"):
        take_adapter(wrapped)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
def test_a_model_of_quantised_weights_is_refused(method: str, tmp_path: Path) -> None:
    built = ModelConfig(config=MODEL).build()
    built.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "load_in_4bit": method == "bitsandbytes"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = rf"weights are quantised \({method}\): FSDP2 cannot shard .*\. Use the original model"
    with pytest.raises(ConfigError, match=message):
        ModelConfig(pretrained=str(tmp_path)).build()
    built.config.quantization_config = config["quantization_config"]
    with pytest.raises(ConfigError, match=message):
        PackedModel(built)
