"""Claim: exports, resumes and starts need no more memory for a model of 6 GB than for one of 2 GB.

What is measured: an export; an export that merges an adapter into the model under it; a resume; a start from pretrained
weights on two ranks, by the peak of the rank that reads them. A resume and a start have to hold a rank's part of model
and optimizer, however large; claimed is what they need besides. Of a resume the weights lie in a file that is mapped
into memory: its pages are the kernel's, and the private ones of the process (RssAnon) are what reading a checkpoint
takes. Of a start it is the private pages without the bytes of the rank's part. Of exports all resident pages are
counted. Peaks are those of fresh processes; equal means within 10 %. The weights are zeros, one layer less or more; one
vector of them is trained, so that a checkpoint has as many bytes as its model.

    python benchmarks/checkpoint_memory.py
    python benchmarks/checkpoint_memory.py --gigabytes 0.5 1.5 --folder /scratch

It needs three times the larger size on disk, and that size of memory.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from lmms_stream.train.checkpoint.checkpoint import Checkpointer
from lmms_stream.train.checkpoint.export import export_checkpoint, model_files
from lmms_stream.train.checkpoint.weight_files import save_config, write_weights
from lmms_stream.train.model.adapters import adapter_of, add_adapter, base_digest
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.pretrained import unread_weights
from lmms_stream.train.model.sharding import shard_model
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.mesh import build_meshes, join_world
from lmms_stream.train.run.settings import TrainConfig
from measure import MIB, in_fresh_process, print_table, verdict
from transformers import LlamaConfig, LlamaForCausalLM

GB = 10**9
MAX_GROWTH, MAX_BYTES = 0.1, 3 * GB
RANKS = 2
IMPORTED = ("lmms_stream.train.trainer", "transformers.models.llama.modeling_llama", "peft")
WIDTH = 2048
LAYER_BYTES = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH + 2 * WIDTH)
ADAPTER = {"r": 4, "target_modules": "all-linear"}
EXPORT, MERGE, RESUME, START = (
    "export, all pages",
    "export that merges an adapter, all pages",
    "resume, private pages besides model and optimizer",
    f"start on {RANKS} ranks, private pages of rank 0 besides its part",
)


def empty_model(num_bytes: int) -> LlamaForCausalLM:
    """A model of float32 without weights."""
    layers = max(1, num_bytes // LAYER_BYTES)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=layers,
        num_attention_heads=16,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def mapped_model(path: Path, num_bytes: int) -> LlamaForCausalLM:
    """A model of float32 zeros whose weights are pages of a file."""
    model = empty_model(num_bytes)
    named = list(model.named_parameters())
    pages = np.memmap(path, dtype=np.float32, mode="w+", shape=(sum(each.numel() for _, each in named),))
    start = 0
    for name, each in named:
        owner, _, leaf = name.rpartition(".")
        values = torch.from_numpy(pages[start : start + each.numel()]).view(each.shape)
        is_trained = name == "model.norm.weight"
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(values, requires_grad=is_trained))
        start += each.numel()
    return model


def parts(folder: Path, num_bytes: int) -> tuple[LlamaForCausalLM, torch.optim.Optimizer, Checkpointer]:
    init_distributed(3600)
    model = mapped_model(folder / "weights", num_bytes)
    optimizer = torch.optim.AdamW([model.model.norm.weight])
    return model, optimizer, checkpointer(folder)


def checkpointer(folder: Path) -> Checkpointer:
    return Checkpointer(str(folder), staging=folder / "staging", asynchronous=False, timeout_s=3600)


def save(folder: Path, num_bytes: int) -> None:
    model, optimizer, made = parts(folder, num_bytes)
    made.save(model, optimizer, step=1, state={}, documents=model_files(model, None))
    dist.destroy_process_group()


def resume(folder: Path, num_bytes: int) -> None:
    model, optimizer, made = parts(folder, num_bytes)
    found = made.find("auto")
    assert found is not None
    made.resume(model, optimizer, found)
    dist.destroy_process_group()


def export(folder: Path) -> None:
    export_checkpoint(folder / "step-00000001", folder / "export")


def write_pretrained(folder: Path, num_bytes: int) -> None:
    """A folder of a model of zeros that from_pretrained loads."""

    def zeros(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor.zero_()

    folder.mkdir()
    model = empty_model(num_bytes)
    saved = save_config(model, folder, model.state_dict())
    write_weights(folder, saved.empty, saved.filled_by(zeros))


def save_adapter(folder: Path, num_bytes: int) -> None:
    """A checkpoint of an adapter on the model in folder/pretrained."""
    init_distributed(3600)
    base = empty_model(num_bytes)
    base.name_or_path = str(folder / "pretrained")
    unread = unread_weights(ModelConfig(pretrained=base.name_or_path).build_unread())
    model = add_adapter(base, ADAPTER)
    adapter = adapter_of(model)
    assert adapter is not None
    state = model.state_dict()
    zeros = {name: torch.zeros(state[name].shape) for name in adapter.tensors}
    model.load_state_dict(zeros, strict=False, assign=True)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if not each.is_meta])
    said = {"fingerprint": {"adapter": {"base": base_digest(model, adapter, unread=unread)}}}
    checkpointer(folder).save(model, optimizer, step=1, state=said, documents=model_files(model, None))
    dist.destroy_process_group()


def merge(folder: Path) -> None:
    export_checkpoint(folder / "step-00000001", folder / "export", merge=True)


def start(folder: Path, rank: int) -> int:
    """Begin with pretrained weights as one of RANKS ranks; the bytes of its part."""
    torch.set_num_threads(1)
    config = TrainConfig(output_dir=str(folder / "run"), global_batch=RANKS, max_steps=1)
    store = dist.FileStore(str(folder / "ranks"), RANKS)
    timeout = datetime.timedelta(seconds=config.timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    _, device = join_world(config)
    model = PackedModel(ModelConfig(pretrained=str(folder / "pretrained")).build_unread())
    shard_model(model, build_meshes(device, world_size=RANKS, config=config), config=config, device=device)
    size = sum(each.to_local().nbytes for each in model.parameters())
    dist.destroy_process_group()
    return size


def peaks_of_a_run(num_bytes: int, folder: Path) -> dict[str, int]:
    """Of what is done with a checkpoint of a model."""
    in_fresh_process(save, folder, num_bytes, imported=IMPORTED)
    (folder / "weights").unlink()
    _, of_resume = in_fresh_process(resume, folder, num_bytes, imported=IMPORTED)
    (folder / "weights").unlink()
    _, of_export = in_fresh_process(export, folder, imported=IMPORTED)
    return {EXPORT: of_export.resident, RESUME: of_resume.anonymous}


def peaks_of_pretrained(num_bytes: int, folder: Path) -> dict[str, int]:
    """Of what is done with a folder of a pretrained model."""
    in_fresh_process(write_pretrained, folder / "pretrained", num_bytes, imported=IMPORTED)
    with ThreadPoolExecutor(RANKS) as pool:
        ranks = pool.map(lambda rank: in_fresh_process(start, folder, rank, imported=IMPORTED), range(RANKS))
        (part, of_start), *_ = [*ranks]
    in_fresh_process(save_adapter, folder, num_bytes, imported=IMPORTED)
    _, of_merge = in_fresh_process(merge, folder, imported=IMPORTED)
    return {MERGE: of_merge.resident, START: of_start.anonymous - part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs=2, default=(2.0, 6.0), help="sizes of the models")
    parser.add_argument("--folder", type=Path, help="where they are written; default: the temporary folder")
    args = parser.parse_args()
    rows: dict[str, list[int]] = {}
    for gigabytes in args.gigabytes:
        for peaks_of in (peaks_of_a_run, peaks_of_pretrained):
            folder = Path(tempfile.mkdtemp(dir=args.folder))
            try:
                for name, peak in peaks_of(int(gigabytes * GB), folder).items():
                    rows.setdefault(name, []).append(peak)
            finally:
                shutil.rmtree(folder)
    print_table(
        "peak of a process, MiB",
        ["", *(f"{gigabytes:g} GB" for gigabytes in args.gigabytes), "ratio"],
        [
            [name, *(f"{peak / MIB:,.0f}" for peak in peaks), f"{peaks[1] / peaks[0]:.3f}"]
            for name, peaks in rows.items()
        ],
    )
    holds = all(abs(few / many - 1) <= MAX_GROWTH and many < MAX_BYTES for few, many in rows.values())
    print(f"peaks are equal within {MAX_GROWTH:.0%} and below {MAX_BYTES / GB:.0f} GB: {verdict(holds)}")


if __name__ == "__main__":
    main()
