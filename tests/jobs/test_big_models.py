"""Jobs on the CPU: what no rank holds whole is saved, resumed and written all the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from lmms_stream.storage.storage import open_storage
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import read_log
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.conftest import last_words, write_tokens
from tests.proxy import FaultProxy
from tests.rounds import in_long_rounds
from tests.train.runs import MODEL, write_run

from .launcher import run_job
from .runs import train

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run from pretrained weights, whose embedding is tied and whose generation config is its own."""
    write_tokens(tmp_path / "data", num_samples=300)
    path = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=4, save_steps=2, global_batch=2)
    fields = {name: value for name, value in MODEL.items() if name != "model_type"}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**fields, tie_word_embeddings=True))
    model.generation_config = GenerationConfig(temperature=0.25, do_sample=True)
    model.save_pretrained(tmp_path / "pretrained")
    return path


def pretrained(config: Path) -> list[str]:
    return ["model.config=null", f"model.pretrained={config.parent / 'pretrained'}"]


def test_a_run_resumes_on_two_ranks_and_on_one_where_the_pretrained_weights_are_gone(
    config: Path, tmp_path: Path
) -> None:
    constant = "train.lr_scheduler_type=constant"
    train(config, tmp_path / "whole", *pretrained(config), constant)
    (tmp_path / "pretrained" / "model.safetensors").unlink()
    whole = read_log(tmp_path / "whole")[2:]
    for nproc in (2, 1):
        output = tmp_path / f"out-{nproc}"
        shutil.copytree(tmp_path / "whole/checkpoints/step-00000002", output / "checkpoints/step-00000002")
        train(config, output, *pretrained(config), constant, "train.export=true", nproc=nproc)
        log = read_log(output)
        assert [record["step"] for record in log] == [3, 4]
        assert [record["sample_ids"] for record in log] == [record["sample_ids"] for record in whole]
        tolerance = 0 if nproc == 2 else 1e-5
        assert [each["loss"] for each in log] == pytest.approx([each["loss"] for each in whole], rel=tolerance, abs=0)
        exported = AutoModelForCausalLM.from_pretrained(output / "export")
        assert exported.generation_config is not None
        assert exported.generation_config.temperature == 0.25
        assert exported.lm_head.weight is exported.model.embed_tokens.weight


@in_long_rounds
def test_a_resume_from_a_store_downloads_to_each_rank_the_files_with_its_part_alone(
    config: Path, tmp_path: Path, s3_folder: str, proxy: FaultProxy
) -> None:
    """Each of four ranks holds half of what one of two held: its files go to two of the four, all go to one rank."""
    saved = (f"train.checkpoint_dir={s3_folder}", "train.lr_scheduler_type=constant")
    train(config, tmp_path / "out", *saved, "train.max_steps=2")
    files = {each.key.rpartition("/")[2]: each for each in open_storage(s3_folder).list_objects("step-00000002/")}
    tensors = {name: each.num_bytes for name, each in files.items() if name.endswith(".distcp")}
    alike = tensors.pop("__0_20.distcp")  # what all ranks have: counts of steps
    assert alike < 50_000
    assert sorted(tensors) == ["__0_0.distcp", "__0_10.distcp", "__1_0.distcp", "__1_10.distcp"]  # model, optimizer
    assert min(tensors.values()) > 100_000
    for nproc, num_downloads in ((4, 2), (1, 1), (2, 1)):
        proxy.set_rules()  # counts anew
        train(config, tmp_path / "out", *saved, "train.max_steps=3", "train.save_steps=no", nproc=nproc)
        traffic = proxy.traffic()
        downloaded = {name: traffic.num_bytes("GET", f"step-00000002/{name}") for name in tensors}
        assert downloaded == {name: num_downloads * size for name, size in tensors.items()}
        assert traffic.num_bytes("GET", "step-00000002/") < sum(downloaded.values()) + nproc * (alike + 100_000)
        (tmp_path / "out" / "train_log.jsonl").unlink()


@in_long_rounds
@pytest.mark.parametrize("degree", [1, 2], ids=["shards", "matrices"])
def test_ranks_that_get_weights_one_by_one_train_as_those_that_get_them_from_one_with_all(
    degree: int, config: Path, tmp_path: Path
) -> None:
    """To the last bit, also where ranks share matrices; the way is told where it is the latter."""
    cut = f"train.tensor_parallel={degree}"
    told = train(config, tmp_path / "out", *pretrained(config), cut)
    assert "rank 0 loads all of" not in told
    folder = tmp_path / "pretrained"
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    told = train(config, tmp_path / "whole", *pretrained(config), cut)
    assert f"rank 0 loads all of {folder} before ranks get their parts: it has no files of safetensors" in told
    losses = [[each["loss"] for each in read_log(tmp_path / name)] for name in ("out", "whole")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_a_model_is_written_by_two_ranks_that_hold_a_part_each(config: Path, tmp_path: Path) -> None:
    done = run_job(
        2, "tests.jobs.saved_model_job", str(config), str(tmp_path / "out"), str(tmp_path / "saved"), timeout_s=120
    )
    assert done.returncode == 0, last_words(done.stderr)
    expected = torch.load(tmp_path / "saved.pt")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_run_saves_by_the_clock_besides_its_steps(config: Path, tmp_path: Path) -> None:
    train(config, tmp_path / "out", "train.save_steps=0", "train.save_minutes=1e-6")
    saved = [path.name for path in checkpoints(tmp_path / "out" / "checkpoints")]
    assert saved == [f"step-{step:08d}" for step in range(1, 5)]
