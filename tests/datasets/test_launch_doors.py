"""The launch files that LMMS Engine ships, by their keys and values, train with only paths and sizes changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from examples.bagel.model import BagelConfig, BagelModel
from lmms_stream.config import load_mapping
from lmms_stream.doors.lmms_engine.launch.run import read_launch
from lmms_stream.errors import ConfigError
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.report.train_log import read_log
from transformers import CONFIG_MAPPING

from ..conftest import run_cli
from ..processors.tile_vlm import save_tile_processor, tile_config
from ..processors.tiny_sound import save_sound_processor, sound_config
from ..processors.tiny_vlm import MARKED, film, picture, qwen3_5_fields, save_processor, save_tokenizer, tiny_config
from ..rounds import in_long_rounds
from ..train import bagel
from .chats import rows, write_pictures
from .launch_files import ALL, MODEL, launch_files

TEXT = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
NAMES = tuple(launch_files(Path()))


@pytest.mark.parametrize("name", NAMES)
def test_each_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(yaml.safe_dump(launch_files(tmp_path)[name]))
    data = load_mapping(path, [f"trainer_args.output_dir={tmp_path}/run", "trainer_args.max_steps=2"])
    launch, arguments = read_launch(data, source=str(path))
    attention = "sdpa_varlen" if name == "masked diffusion" else "auto"
    assert (arguments.max_steps, launch.model.attention, launch.model.use_liger_kernel) == (2, attention, False)
    assert launch.dataset.dataset_type == ("sit" if name == "sit" else launch.dataset.dataset_type)
    assert launch.model.slow_every == (10 if name == "llava, slow and fast frames" else None)
    if name == "qwen3_vl without a processor":
        assert launch.dataset.processor_config == {"processor_name": f"{tmp_path}/qwen3_vl", "processor_type": "nit"}


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("dataset_config", {"dataset_type": "aero_realtime_iterable"}, "'aero_realtime_iterable' is not supported"),
        ("dataset_config", {"processor_config": {"processor_type": "wanvideo", "processor_name": "x"}}, "wanvideo"),
        (
            "model_config",
            {"monkey_patch_kwargs": {"patch_type": ["video"], "mm_spatial_pool_mode": "max"}},
            "mm_spatial_pool_mode 'max' is not supported, only 'bilinear', LLaVA-OneVision",
        ),
        ("model_config", {"monkey_patch_kwargs": {"faster_token_stride": 5}}, "has no 'faster_token_stride'"),
        (None, {"trainer_type": "wan_trainer"}, "not of lmms_stream: train it with LMMS Engine, or a"),
        (None, {"trainer_type": "grpo_trainer"}, "trainer_type has no 'grpo_trainer': choose one of fsdp2_trainer"),
        (
            "dataset_config",
            {"dataset_type": "bagel_iterable", "processor_config": {"processor_type": "bagel", "processor_name": "x"}},
            "BAGEL's model is a class of .* set model_config.extra_kwargs.trust_remote_code to true",
        ),
    ],
)
def test_what_is_not_here_is_refused_by_name(
    section: str | None, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from lmms_stream.doors.lmms_engine.datasets.names import processor_config_of

    data = launch_files(tmp_path)["llava"]
    data = data | change if section is None else data | {section: data[section] | change}
    with pytest.raises(ConfigError, match=message):
        processor_config_of(read_launch(data, source="f")[0].dataset)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("build")
    write_pictures(build)
    texts = [{"messages": json.dumps(row["messages"])} for row in rows(24)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts), build / "texts.parquet")
    listed = pyarrow.parquet.read_table(build / "pictures.parquet").to_pylist()
    chats = [{"messages": json.loads(row["messages"])} for row in listed]
    (build / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    for name, source in (("list.yaml", "pictures"), ("texts.yaml", "texts")):
        entry = {"path": f"{build}/{source}.parquet", "data_folder": str(build), "data_type": "parquet"}
        (build / name).write_text(yaml.safe_dump({"datasets": [entry]}))
    (build / "0.mp4").write_bytes(film(64, 64, num_frames=20, fps=5))
    film_url, asked = {"type": "video_url", "video_url": {"url": "0.mp4"}}, {"type": "text", "text": "What?"}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A film."}]}
    films = [{"messages": [{"role": "user", "content": [film_url, asked]}, answer]}] * 6
    (build / "films.json").write_text(json.dumps(films))
    documents = [{"text": " ".join(f"word {number} {at}" for at in range(4 + number % 9))} for number in range(40)]
    datasets.Dataset.from_list(documents).save_to_disk(build / "documents")
    images = [{"image": {"bytes": picture(40, 40, seed=number), "path": None}, "label": number} for number in range(9)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(images), build / "images.parquet")
    return build


def save_model(build: Path, name: str) -> None:
    """The folder that a launch file names."""
    folder = build / name
    if folder.exists():
        return
    if name in ("text", "moe"):
        tokenizer = save_tokenizer(folder)
        tokenizer.chat_template = MARKED
        tokenizer.save_pretrained(folder)
        experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config: Any = TEXT | (experts if name == "moe" else {"model_type": "qwen3"})
    elif name == "omni":
        save_sound_processor(folder, "qwen2_5_omni")
        config = sound_config("qwen2_5_omni", folder)
    elif name == "qwen3_5":
        save_processor(folder, "qwen3_vl")
        config = qwen3_5_fields(folder)
    elif name == "llava":
        save_tile_processor(folder, "llava_onevision")
        config = tile_config("llava_onevision", folder).to_dict()
    else:
        save_processor(folder, name)
        config = tiny_config(name, folder).to_dict()
    ModelConfig(config=config).build().save_pretrained(folder)


def save_autoencoder(build: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    blocks = {"block_out_channels": (4,) * 4, "norm_num_groups": 2, "latent_channels": 4, "sample_size": 32}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    diffusers.AutoencoderKL(**blocks, **kinds).save_pretrained(build / "vae")


@in_long_rounds
@pytest.mark.timeout(700)  # one of them is compiled
@pytest.mark.parametrize("name", NAMES)
def test_each_trains(name: str, build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    if name == "qwen3_5" and "qwen3_5" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no Qwen3.5")
    data = launch_files(build)[name]
    model = (data[0]["config"] if isinstance(data, list) else data)["model_config"].get("load_from_pretrained_path")
    save_autoencoder(build) if name == "sit" else save_model(build, Path(model or "text").name)
    path = tmp_path / "launch.yaml"
    path.write_text(yaml.safe_dump(data))
    changes = {"output_dir": tmp_path / "run", "max_steps": 2, "warmup_steps": 0}
    cache = f"dataset_config.cache_dir={tmp_path}/cache"
    done = run_cli(
        "train", str(path), cache, *(f"trainer_args.{key}={value}" for key, value in changes.items()), timeout_s=600
    )
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in read_log(tmp_path / "run") if "loss" in record] == [1, 2]
    if name != "masked diffusion":  # which asks for nothing that needs one
        assert "there is no GPU, so the run does without" in done.stderr


@in_long_rounds
@pytest.mark.parametrize("trainer", ["fsdp2_trainer", "bagel_fsdp2_trainer"])
def test_bagels_file_trains_a_model_of_ones_own_python_files(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BagelConfig, "_auto_class", "AutoConfig")
    monkeypatch.setattr(BagelModel, "_auto_class", "AutoModelForCausalLM")
    bagel.build_model().save_pretrained(tmp_path / "model")
    bagel.save_words(tmp_path / "words")
    bagel.write_rows(tmp_path / "rows", 40)
    # The example's model cannot run its blocks again, so gradient_checkpointing is off, unlike in theirs.
    own = {"visual_und": False, "trust_remote_code": True}
    data = {
        "trainer_type": trainer,
        "dataset_config": bagel.dataset_of(tmp_path, "bagel_iterable"),
        "model_config": MODEL | {"load_from_pretrained_path": f"{tmp_path}/model", "extra_kwargs": own},
        "trainer_args": ALL
        | {"max_steps": 2, "output_dir": f"{tmp_path}/run", "use_liger_kernel": False, "gradient_checkpointing": False},
        "extra_kwargs": None,
    }
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(data))
    done = run_cli("train", str(tmp_path / "launch.yaml"))
    assert done.returncode == 0, done.stderr
    assert [record["loss/mse"] > 0 for record in read_log(tmp_path / "run")] == [True, True]
