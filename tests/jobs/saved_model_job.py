"""A job: a run of some steps whose model is written as it is then. Its arguments are a config, an output_dir, a folder.

Beside the folder comes `<folder>.pt` with the model's tensors, gathered by torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.train.runs import trainer_of


def main() -> None:
    config, output, folder = sys.argv[1:]
    trainer = trainer_of(Path(config), f"train.output_dir={output}")
    trainer.train()
    trainer.save_model(folder)
    whole = get_model_state_dict(trainer.model.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}.pt")


if __name__ == "__main__":
    main()
