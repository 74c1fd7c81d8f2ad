"""A job: two steps by a loss function, then predictions and figures of them, with packs whole and on several ranks.

Its argument is a run's config. Beside it comes `<sequence_parallel>-<rank>.npz` for each degree: 1 and 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmms_stream.train.report.train_log import history, read_log
from lmms_stream.train.run.distributed import end_distributed

from tests.train.runs import trainer_of


def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """That of the tokens, with a penalty on logits of all of them."""
    logits, targets = outputs.logits[0, :-1], labels[0, 1:]
    entropy = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    penalty: torch.Tensor = 0.01 * outputs.logits.square().sum()
    return (entropy + penalty) / num_items_in_batch


def largest(made: Any) -> dict[str, float]:
    return {"largest": float(made.predictions.max())}


def main() -> None:
    config = Path(sys.argv[1])
    for degree in (1, 2):
        output = config.parent / f"run-{degree}"
        settings = (f"train.output_dir={output}", f"train.sequence_parallel={degree}")
        trainer = trainer_of(config, *settings, compute_loss_func=loss, compute_metrics=largest)
        trainer.train()
        made: Any = trainer.predict(trainer.data.evaluations[""])
        steps = history(read_log(output)).steps
        np.savez(
            config.parent / f"{degree}-{trainer.world.rank}",
            predictions=made.predictions,
            labels=made.label_ids,
            losses=[step["loss"] for step in steps],
            norms=[step["grad_norm"] for step in steps],
            figures=[made.metrics["test_loss"], made.metrics["test_largest"]],
        )


if __name__ == "__main__":
    main()
    end_distributed()
