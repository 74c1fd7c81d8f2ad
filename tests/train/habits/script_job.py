"""A script as users of TRL write it, but for the import of the trainer: it trains, and rank 0 writes what came out.

Its arguments are a model's folder, a folder for the run, and SFTConfig's options as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lmms_stream import FSDP2SFTTrainer as SFTTrainer
from lmms_stream.train.run.distributed import end_distributed
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig

from tests.train.habits.rows import chats


class Logs(TrainerCallback):
    """Logs a figure of its own on rank 0, as scripts do."""

    trainer: SFTTrainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.trainer.log({"by_hand": float(state.global_step)})


def right(found: Any) -> dict[str, float]:
    is_learnt = found.label_ids[:, 1:] != -100
    return {"right": float((found.predictions[:, :-1] == found.label_ids[:, 1:])[is_learnt].mean())}


def main() -> None:
    name, folder, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    args = SFTConfig(folder, packing=True, max_length=64, use_cpu=True, bf16=False, report_to="none", **options)
    had_group = dist.is_initialized()
    callback = Logs()
    trainer = callback.trainer = SFTTrainer(
        model=name,
        args=args,
        train_dataset=chats(60),
        eval_dataset={"a": chats(6), "b": chats(9)},
        processing_class=AutoTokenizer.from_pretrained(name),
        callbacks=[callback],
        compute_metrics=right,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    output = trainer.train()
    one, rows, made = trainer.evaluate("a"), trainer.evaluate(chats(6)), trainer.predict(chats(6))
    assert one == rows
    assert (made.label_ids.shape[0], made.metrics["test_loss"]) == (6, one["eval_loss"])
    trainer.log({"afterwards": 1.0})
    history = [sorted(each) for each in trainer.state.log_history]
    assert ["by_hand", "epoch", "step"] in history or trainer.world.rank
    assert ["afterwards", "epoch", "step"] in history
    trainer.save_model()
    told = {"had_group": had_group, "ranks": trainer.world.world_size, "loss": output.training_loss, "eval": one}
    (Path(folder) / f"rank-{trainer.world.rank}.json").write_text(json.dumps(told))
    end_distributed()
    assert dist.is_initialized() is had_group  # a group that was there is left alone
    if had_group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
