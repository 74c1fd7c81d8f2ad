"""Rows with images are trained on as they are: tokens of a row are those that TRL's collators make, but for labels of
tokens that stand for images.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from lmms_stream.doors.trl import SFTTrainer
from lmms_stream.errors import ConfigError
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerFast
from trl import SFTConfig
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..processors import tiny_vlm
from ..versions import IS_5
from . import rows

OPTIONS = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "max_length": None}


@pytest.fixture(scope="session")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of Qwen2.5-VL's with its processor."""
    folder = tmp_path_factory.mktemp("vlm")
    tiny_vlm.save_processor(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(tiny_vlm.tiny_config("qwen2_5_vl", folder)).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")  # of TRL and transformers
@pytest.mark.parametrize(
    ("make", "assistant_only"),
    [
        (rows.seen, False), (rows.seen_before_text, False), (rows.seen_in_messages, False), (rows.seen_prompts, False),
        # transformers 4 marks other tokens than the assistant's where images are
        *([(rows.seen, True), (rows.seen_before_text, True)] if IS_5 else []),
    ],
)  # fmt: skip
def test_rows_with_images_become_the_tokens_that_trl_makes(
    make: Callable[[], Dataset], assistant_only: bool, vlm: Path, tmp_path: Path
) -> None:
    dataset = make()
    args = SFTConfig(str(tmp_path), assistant_only_loss=assistant_only, **OPTIONS)
    ours: Any = SFTTrainer(str(vlm), args, train_dataset=dataset).train_dataset
    made = [ours.processor.process(sample) for sample in ours.read(np.arange(ours.num_samples))]
    processor = AutoProcessor.from_pretrained(vlm)
    collator = DataCollatorForVisionLanguageModeling(
        processor, assistant_only_loss=assistant_only, completion_only_loss="completion" in dataset.column_names
    )
    shown = processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
    for row, sample in zip(dataset, made, strict=True):
        expected = collator([{"images": [], **as_trl_has_it(row)}])
        assert sample["input_ids"].tolist() == expected["input_ids"][0].tolist()
        labels = expected["labels"][0]
        labels[torch.isin(expected["input_ids"][0], torch.tensor(shown))] = -100
        if "completion" in row:
            labels[-1] = -100  # the template's line end behind the answer, which ours does not train on
        assert sample["labels"].tolist() == labels.tolist()
        assert (sample["labels"] != -100).any()


def as_trl_has_it(value: Any) -> Any:
    """Values without null keys, which a column of parts has of other kinds of parts, and TRL takes away before."""
    if isinstance(value, dict):
        return {key: as_trl_has_it(each) for key, each in value.items() if each is not None}
    return [as_trl_has_it(each) for each in value] if isinstance(value, list) else value


def test_images_for_a_tokenizer_are_refused(tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path) -> None:
    given = {"args": SFTConfig(str(tmp_path), **OPTIONS), "train_dataset": rows.seen_before_text()}
    with pytest.raises(
        ConfigError, match=r"the rows have images, and processing_class is a .*, which reads none: give"
    ):
        SFTTrainer(str(model_folder), processing_class=tok, **given)
    with pytest.raises(ConfigError, match="the rows have images, and a formatting_func returns only text: leave"):
        SFTTrainer(str(model_folder), processing_class=tok, formatting_func=str, **given)
