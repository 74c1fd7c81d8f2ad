"""A program for each trainer: `python -m tests.trainers.programs KIND FOLDER STEPS OUTPUT HELD_AT`, a rank or alone.

FOLDER holds `data` (see write_tokens) and `model`. In FOLDER/OUTPUT (default: KIND) each rank writes the samples of
each step that it read (ids-RANK.jsonl), and the first rank the losses of steps (losses.jsonl). After the loss of step
HELD_AT, if any, the first rank stands still until it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lmms_stream import Batch, PackedLoader, PackedStreamingDataset, PackingConfig, TokensProcessor, World
from lmms_stream.loader.loader import GlobalStep, LoaderSteps
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

GLOBAL_BATCH = 4
PACKING_LENGTH = 256
LR = 1e-2


class RecordedLoader(PackedLoader):
    """A loader that writes what it hands out."""

    record: Path

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            step = self.step - (batch.micro_batch == self.micro_batches - 1)
            with self.record.open("a") as file:
                file.write(json.dumps([step, batch.sample_ids.tolist()]) + "\n")
            yield batch


def open_loader(folder: Path, output: Path, **options: Any) -> RecordedLoader:
    dataset = PackedStreamingDataset(
        folder / "data", processor=TokensProcessor(), packing=PackingConfig(packing_length=PACKING_LENGTH)
    )
    loader = RecordedLoader(dataset, **{"global_batch": GLOBAL_BATCH} | options)
    loader.record = output / f"ids-{loader.world.rank}.jsonl"
    return loader


def make_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa").train()


def note(output: Path, step: int, loss: float) -> None:
    """Write the loss of a finished step, counted from 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        with (output / "losses.jsonl").open("a") as file:
            file.write(json.dumps([step, loss]) + "\n")
        if str(step) == os.environ.get("HELD_AT"):
            signal.pause()


def loss_of(model: Any, batch: Batch, step: GlobalStep, *, layout: Any = "packed") -> torch.Tensor:
    """The part of a pack in the mean over the tokens of the step."""
    loss: torch.Tensor = model(**batch.for_model(model, layout=layout, labels=True), num_items_in_batch=1).loss
    return loss / step.num_loss_tokens


def train_step(model: Any, optimizer: Any, step: GlobalStep, *, layout: Any = "packed") -> float:
    """Update a model whose gradients are averaged over ranks; return the loss of the step."""
    total = torch.zeros(())
    for batch in step.batches:
        loss = loss_of(model, batch, step, layout=layout)
        (loss * dist.get_world_size()).backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item()


def plain(folder: Path, output: Path, num_steps: int, *, layout: Any = "packed") -> None:
    """FSDP2 with a DCP checkpoint."""
    dist.init_process_group()
    model = make_model(folder)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = open_loader(folder, output)

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "data": loader.stateful()}

    if saved := sorted(output.glob("step-*/.metadata")):
        loaded = state()
        load(loaded, checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for step in loader.steps(until=num_steps):
        note(output, loader.step - 1, train_step(model, optimizer, step, layout=layout))
        save(state(), checkpoint_id=output / f"step-{loader.step:06d}")
    dist.destroy_process_group()


def padded(folder: Path, output: Path, num_steps: int) -> None:
    plain(folder, output, num_steps, layout="padded")


def trainer(folder: Path, output: Path, num_steps: int) -> None:
    """transformers.Trainer, whose accelerator wraps the model in DDP."""
    from lmms_stream.doors.huggingface.packs import TrainerWithPacks
    from transformers import TrainerCallback, TrainingArguments

    class Noted(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                note(output, state.global_step - 1, logs["loss"])

    args = TrainingArguments(
        str(output / "checkpoints"),
        max_steps=num_steps,
        gradient_accumulation_steps=GLOBAL_BATCH // World.detect().world_size,
        learning_rate=LR,
        weight_decay=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    made = TrainerWithPacks(make_model(folder), args, packs=open_loader(folder, output), callbacks=[Noted()])
    whole = [path for path in sorted(Path(args.output_dir).glob("*/trainer_state.json")) if is_json(path)]
    made.train(resume_from_checkpoint=str(whole[-1].parent) if whole else None)


def is_json(path: Path) -> bool:
    """Whether a file was written to its end. transformers writes the state last, and not atomically."""
    with suppress(json.JSONDecodeError):
        json.loads(path.read_text())
        return True
    return False


def accelerate(folder: Path, output: Path, num_steps: int) -> None:
    """A loop with accelerate, which prepares the model and the optimizer, and saves and loads the loader's state."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    loader = open_loader(folder, output)
    whole = make_model(folder)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LR)
    model, optimizer = accelerator.prepare(whole, optimizer)
    assert accelerator.prepare(loader) is loader
    accelerator.register_for_checkpointing(loader)
    if saved := sorted(output.glob("step-*/whole")):
        accelerator.load_state(str(saved[-1].parent))
    for step in loader.steps(until=num_steps):
        total = torch.zeros(())
        for batch in step.batches:
            is_last = batch is step.batches[-1]
            with nullcontext() if is_last else accelerator.no_sync(model):
                loss = loss_of(model, batch, step)
                accelerator.backward(loss * accelerator.num_processes)
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        note(output, loader.step - 1, accelerator.reduce(total).item())
        saved_at = output / f"step-{loader.step:06d}"
        accelerator.save_state(str(saved_at))
        accelerator.wait_for_everyone()
        (saved_at / "whole").touch()


def lightning(folder: Path, output: Path, num_steps: int) -> None:
    """PyTorch Lightning with DDP."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(folder)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

        def training_step(self, step: GlobalStep, number: int) -> None:
            optimizer: Any = self.optimizers()
            total = torch.zeros(())
            for batch in step.batches:
                loss = loss_of(self.model, batch, step)
                self.manual_backward(loss * self.trainer.world_size)
                total += loss.detach()
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            optimizer.zero_grad()
            note(output, number, self.trainer.strategy.reduce(total, reduce_op="sum").item())

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> LoaderSteps:
            return open_loader(folder, output).steps(until=num_steps)

    made = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(output / "checkpoints", save_top_k=-1, every_n_train_steps=1)],
    )
    saved = sorted((output / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    made.fit(Module(), datamodule=Data(), ckpt_path=saved[-1] if saved else None, weights_only=True)


def in_ray(folder: Path, output: Path, num_steps: int) -> None:
    """Ray Train, with NPROC workers of its own."""
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer, prepare_model

    def train() -> None:
        whole = make_model(folder)
        model = prepare_model(whole)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        loader = open_loader(folder, output)
        if (checkpoint := ray.train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as saved:
                state = torch.load(Path(saved, "state.pt"))
            whole.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["data"])
        for step in loader.steps(until=num_steps):
            note(output, loader.step - 1, train_step(model, optimizer, step))
            state = {"model": whole.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}
            with tempfile.TemporaryDirectory() as made:
                torch.save(state, Path(made, "state.pt"))
                is_first = ray.train.get_context().get_world_rank() == 0
                ray.train.report({"step": loader.step}, ray.train.Checkpoint.from_directory(made) if is_first else None)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    workers = ray.train.ScalingConfig(num_workers=int(os.environ["NPROC"]))
    run = ray.train.RunConfig(name="run", storage_path=str(output / "checkpoints"))
    TorchTrainer(train, scaling_config=workers, run_config=run).fit()


def torchtitan(folder: Path, output: Path, num_steps: int) -> None:
    """torchtitan's loop and checkpoints, see titan.py."""
    from . import titan

    titan.train(
        output,
        make_model(folder),
        lambda **options: open_loader(folder, output, **options),
        lambda step, loss: note(output, step, loss),
        seq_len=PACKING_LENGTH,
        global_batch=GLOBAL_BATCH,
        num_steps=num_steps,
        lr=LR,
    )


PROGRAMS: dict[str, Callable[[Path, Path, int], None]] = {
    "plain": plain,
    "padded": padded,
    "trainer": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "ray": in_ray,
    "torchtitan": torchtitan,
}


def main() -> None:
    kind, folder, num_steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    output = folder / (sys.argv[4] if len(sys.argv) > 4 else kind)
    if len(sys.argv) > 5:
        os.environ["HELD_AT"] = sys.argv[5]  # Ray's workers get it, too
    output.mkdir(exist_ok=True)
    PROGRAMS[kind](folder, output, num_steps)


if __name__ == "__main__":
    main()
