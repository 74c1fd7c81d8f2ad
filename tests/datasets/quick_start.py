"""The quick start of LMMS Engine's guide with the package's name changed; rank 0 writes what came out.

Its arguments are a file, its format, a processor, its type, a model, a folder for the run and the packs of a rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lmms_stream.datasets import DatasetConfig, MultiModalDataset
from lmms_stream.train import FSDP2SFTTrainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, TrainingArguments


def tiny_model(folder: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return kind.from_config(config)


def main() -> None:
    path, format, processor, processor_type, model, folder, packs = sys.argv[1:]
    training_args = TrainingArguments(
        folder, per_device_train_batch_size=int(packs), num_train_epochs=2, learning_rate=1e-2, logging_steps=1,
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip

    dataset_config = DatasetConfig(
        dataset_type="vision",
        dataset_format=format,
        dataset_path=path,
        processor_config={"processor_name": processor, "processor_type": processor_type},
        shuffle=True,
        packing=True,
        packing_length=512,  # 32000 in the guide
        filter_overlong=True,
        packing_strategy="first_fit",
        cache_dir=str(Path(folder).parent / "cache"),
    )
    dataset = MultiModalDataset(dataset_config)
    dataset.build()
    trainer = FSDP2SFTTrainer(
        model=tiny_model(model), args=training_args, train_dataset=dataset, data_collator=dataset.get_collator()
    )
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
