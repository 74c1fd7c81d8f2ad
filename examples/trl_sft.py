"""Fine-tuning as it is written for TRL, with another import of the trainer.

python examples/trl_sft.py MODEL CHATS.jsonl FOLDER trains the model of a folder or hub id on rows of `messages`.
"""

import sys

import torch
from datasets import load_dataset
from lmms_stream.trl import SFTConfig, SFTTrainer  # instead of: from trl import SFTConfig, SFTTrainer

if __name__ == "__main__":
    model, chats, folder = sys.argv[1:]
    has_gpu = torch.cuda.is_available()
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=folder,
            packing=True,
            max_length=1024,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            logging_steps=1,
            report_to="none",
            bf16=has_gpu,
            use_cpu=not has_gpu,
        ),
        train_dataset=load_dataset("json", data_files=chats, split="train"),
    )
    trainer.train()
    trainer.save_model()
