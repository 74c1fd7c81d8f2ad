"""Claim: an export needs no more memory for a checkpoint of 6 GB than for one of 2 GB, and neither does a resume.

A resume has to hold a rank's part of model and optimizer, however large; claimed is what it needs besides. So the
weights lie in a file that is mapped into memory: its pages are the kernel's, and the private ones of the process
(RssAnon) are what reading a checkpoint takes. Of an export all resident pages are counted. Peaks are those of fresh
processes; equal means within 10 %. The weights are zeros, one layer less or more; one vector of them is trained, so
that a checkpoint has as many bytes as its model.

    python benchmarks/checkpoint_memory.py
    python benchmarks/checkpoint_memory.py --gigabytes 0.5 1.5 --folder /scratch

It needs three times the larger size on disk.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from lmms_stream.train.checkpoint.checkpoint import Checkpointer
from lmms_stream.train.checkpoint.export import export_checkpoint, model_files
from lmms_stream.train.run.distributed import init_distributed
from measure import MIB, PeakMemory, in_fresh_process, print_table, verdict
from transformers import LlamaConfig, LlamaForCausalLM

GB = 10**9
MAX_GROWTH, MAX_BYTES = 0.1, 3 * GB
IMPORTED = ("lmms_stream.train.checkpoint.checkpoint", "transformers.models.llama.modeling_llama")
WIDTH = 2048
LAYER_BYTES = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH + 2 * WIDTH)


def mapped_model(path: Path, num_bytes: int) -> LlamaForCausalLM:
    """A model of float32 zeros whose weights are pages of a file."""
    layers = max(1, num_bytes // LAYER_BYTES)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=layers,
        num_attention_heads=16,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
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
    made = Checkpointer(str(folder), staging=folder / "staging", asynchronous=False, timeout_s=3600)
    return model, optimizer, made


def save(folder: Path, num_bytes: int) -> None:
    model, optimizer, made = parts(folder, num_bytes)
    made.save(model, optimizer, step=1, state={}, documents=model_files(model, None))
    dist.destroy_process_group()


def resume(folder: Path, num_bytes: int) -> None:
    model, optimizer, made = parts(folder, num_bytes)
    assert made.resume(model, optimizer) is not None
    dist.destroy_process_group()


def export(folder: Path) -> None:
    export_checkpoint(folder / "step-00000001", folder / "export")


def peaks_of(num_bytes: int, folder: Path) -> tuple[int, PeakMemory, PeakMemory]:
    """The bytes of a checkpoint, and the peaks of resuming from it and of its export."""
    in_fresh_process(save, folder, num_bytes, imported=IMPORTED)
    size = sum(path.stat().st_size for path in (folder / "step-00000001").rglob("*"))
    (folder / "weights").unlink()
    _, of_resume = in_fresh_process(resume, folder, num_bytes, imported=IMPORTED)
    (folder / "weights").unlink()
    _, of_export = in_fresh_process(export, folder, imported=IMPORTED)
    return size, of_resume, of_export


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs=2, default=(2.0, 6.0), help="sizes of the checkpoints")
    parser.add_argument("--folder", type=Path, help="where they are written; default: the temporary folder")
    args = parser.parse_args()
    found = []
    for gigabytes in args.gigabytes:
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            found.append(peaks_of(int(gigabytes * GB), folder))
        finally:
            shutil.rmtree(folder)
    sizes = [size for size, *_ in found]
    rows = {
        "export, all pages": [each.resident for *_, each in found],
        "resume, private pages besides model and optimizer": [each.anonymous for _, each, _ in found],
    }
    print_table(
        "peak of a process, MiB",
        ["", *(f"{size / GB:.1f} GB" for size in sizes), "ratio"],
        [
            [name, *(f"{peak / MIB:,.0f}" for peak in peaks), f"{peaks[1] / peaks[0]:.3f}"]
            for name, peaks in rows.items()
        ],
    )
    holds = all(abs(few / many - 1) <= MAX_GROWTH and many < MAX_BYTES for few, many in rows.values())
    print(f"peaks are equal within {MAX_GROWTH:.0%} and below {MAX_BYTES / GB:.0f} GB: {verdict(holds)}")


if __name__ == "__main__":
    main()
