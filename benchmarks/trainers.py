"""CPU seconds of a step in other projects' trainers on the packs of a PackedLoader, beside a plain PyTorch loop.

python benchmarks/trainers.py [--rounds 7] [--steps 6]

Each round runs every trainer once, in turn, in one process, on the same packs: a step is the median of a run, a trainer
the median of its ratios to the plain loop of the same round. No checkpoints and no logs are written.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmms_stream import Batch, PackedLoader, PackedStreamingDataset, PackingConfig, TokensProcessor, convert
from lmms_stream.loader.loader import GlobalStep, LoaderSteps
from transformers import AutoConfig, AutoModelForCausalLM

GLOBAL_BATCH, PACKING_LENGTH, VOCABULARY, LR = 4, 1024, 1024, 1e-3
FIELDS = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}


class TimedLoader(PackedLoader):
    """Notes the CPU seconds of the process whenever it hands out the first batch of a step."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            if batch.micro_batch == 0:
                self.times.append(time.process_time())
            yield batch


def open_loader(folder: Path) -> TimedLoader:
    packing = PackingConfig(packing_length=PACKING_LENGTH)
    dataset = PackedStreamingDataset(folder / "data", processor=TokensProcessor(), packing=packing)
    loader = TimedLoader(dataset, global_batch=GLOBAL_BATCH)
    loader.times: list[float] = []  # type: ignore[misc]
    return loader


def make_model() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, **FIELDS)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def loss_of(model: Any, batch: Batch, step: GlobalStep) -> torch.Tensor:
    loss: torch.Tensor = model(**batch.for_model(model, labels=True), num_items_in_batch=step.num_loss_tokens).loss
    return loss


def plain(loader: PackedLoader, num_steps: int, folder: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in loader.steps(until=num_steps):
        for batch in step.batches:
            loss_of(model, batch, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def trainer(loader: PackedLoader, num_steps: int, folder: Path) -> None:
    from lmms_stream.doors.huggingface.packs import TrainerWithPacks
    from transformers import TrainingArguments

    args = TrainingArguments(
        str(folder / "out"), max_steps=num_steps, gradient_accumulation_steps=GLOBAL_BATCH, learning_rate=LR,
        save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    TrainerWithPacks(make_model(), args, packs=loader).train()


def accelerate(loader: PackedLoader, num_steps: int, folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    whole = make_model()
    model, optimizer = accelerator.prepare(whole, torch.optim.AdamW(whole.parameters(), lr=LR))
    for step in loader.steps(until=num_steps):
        for batch in step.batches:
            accelerator.backward(loss_of(model, batch, step))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def lightning(loader: PackedLoader, num_steps: int, folder: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

        def training_step(self, step: GlobalStep, number: int) -> None:
            optimizer: Any = self.optimizers()
            for batch in step.batches:
                self.manual_backward(loss_of(self.model, batch, step))
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            optimizer.zero_grad()

        def train_dataloader(self) -> LoaderSteps:
            return loader.steps(until=num_steps)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet).fit(Module())


KINDS: dict[str, Callable[[PackedLoader, int, Path], None]] = {
    "plain loop": plain,
    "transformers.Trainer": trainer,
    "accelerate": accelerate,
    "Lightning": lightning,
}


def seconds_of_a_step(kind: str, num_steps: int, folder: Path) -> float:
    loader = open_loader(folder)
    KINDS[kind](loader, num_steps, folder)
    return statistics.median(np.diff(loader.times)[1:])  # without the first, which proves the model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = rng.integers(50, 700, 40 * options.steps * GLOBAL_BATCH // 10 + 200)
        rows = [{"input_ids": rng.integers(5, VOCABULARY, length).tolist()} for length in lengths]
        convert(rows, folder / "data", processor=TokensProcessor())
        ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(options.rounds):
            for kind in KINDS:
                seconds[kind].append(seconds_of_a_step(kind, options.steps, folder))
                ratios[kind].append(seconds[kind][-1] / seconds["plain loop"][-1])
    for kind in KINDS:
        ratio, cpu_s = statistics.median(ratios[kind]), statistics.median(seconds[kind])
        sys.stdout.write(f"{kind:22} {ratio:.3f} ({min(ratios[kind]):.3f} to {max(ratios[kind]):.3f}), {cpu_s:.2f} s\n")


if __name__ == "__main__":
    main()
