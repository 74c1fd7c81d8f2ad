"""A processor and a model of Qwen2.5-VL's, tiny, made without a download."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...versions.transformers import by_torchvision

VOCABULARY = 1024
INITIALIZER_RANGE = 0.05  # transformers' 0.02 is for wide models: one of 64 hardly sees its images with it
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] if message['content'] is string else message['content'][0]['text'] }}"
    "<|im_end|>{% endgeneration %}\n"
    "{% else %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_processor(folder: Path, *, texts: Sequence[str]) -> Path:
    """A processor of the family's classes, its tokenizer trained on texts, as save_pretrained writes it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2_5_VLProcessor, Qwen2TokenizerFast
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    folder.mkdir(parents=True, exist_ok=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.model.save(str(folder))
    tokenizer = Qwen2TokenizerFast(
        str(folder / "vocab.json"), str(folder / "merges.txt"), additional_special_tokens=list(SPECIAL[1:])
    )
    processor = Qwen2_5_VLProcessor(
        by_torchvision("Qwen2VLImageProcessor")(), tokenizer, Qwen2VLVideoProcessor(), chat_template=CHAT_TEMPLATE
    )
    processor.save_pretrained(folder)
    return folder


def model_fields(processor: Path, *, positions: int, hidden_size: int = 64, num_layers: int = 2) -> dict[str, Any]:
    """The fields of a config for the processor in a folder. positions: tokens that a sequence may have."""
    tokenizer = json.loads((processor / "tokenizer.json").read_text(encoding="utf-8"))
    added = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    heads = 4
    eighth = hidden_size // heads // 8
    text = {
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": positions,
        "initializer_range": INITIALIZER_RANGE,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2 * eighth, eighth, eighth]},
    }
    tower = {
        "depth": 2,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_heads": heads,
        "out_hidden_size": hidden_size,
        "window_size": 112,
        "initializer_range": INITIALIZER_RANGE,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,  # as published models have it
    }
    return {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": tower,
        "tie_word_embeddings": False,
        "image_token_id": added["<|image_pad|>"],
        "video_token_id": added["<|video_pad|>"],
        "vision_start_token_id": added["<|vision_start|>"],
        "vision_end_token_id": added["<|vision_end|>"],
    }
