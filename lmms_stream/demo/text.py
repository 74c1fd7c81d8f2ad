"""The text demo: a chat corpus of the standard library, a tokenizer trained on it, a small Llama."""

from __future__ import annotations

from pathlib import Path

from .corpus import VOCABULARY, build_corpus, train_tokenizer
from .material import Material

PACKING_LENGTH = 2048


def text_material(output: Path) -> Material:
    """Made below `output`, in the folders corpus/ and tokenizer/."""
    corpus = build_corpus(output / "corpus")
    tokenizer = train_tokenizer(corpus.texts, output / "tokenizer")
    model = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": PACKING_LENGTH,
        "tie_word_embeddings": False,
    }
    return Material(
        sources=[corpus.functions, corpus.classes],
        processor={"type": "chat", "tokenizer": str(tokenizer)},
        model=model,
        packing_length=PACKING_LENGTH,
        about=f"corpus: {corpus.num_functions:,} functions, {corpus.num_classes:,} classes, as chats",
    )
