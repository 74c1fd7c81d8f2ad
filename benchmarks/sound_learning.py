"""Claim: a tiny model learns to tell tones apart by ear, of clips that it has not heard.

A Qwen2-Audio of two layers, tower and text, is asked which of four tones a clip holds, so that guessing gives 25 %. The
clips are WAV, FLAC and Ogg files of several rates and lengths, with noise and at random loudness; tones lie anywhere
within half a tone of the note's frequency. They are converted to shards with their processor's lengths, trained on in
packs by FSDP2 on two ranks, exported, and the exported model answers for held-out clips. Right is the answer that is
more probable than any other token.

    python benchmarks/sound_learning.py
    python benchmarks/sound_learning.py --clips 200 --steps 10 --seeds 1
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from answers import share_right
from measure import print_table, verdict

NOTES = {"low": 220.0, "middle": 440.0, "high": 880.0, "shrill": 1760.0}
FORMATS = ("WAV", "FLAC", "OGG")
RATES = (8000, 16000, 22050, 44100)
SECONDS = 2  # that the processor reads of a clip
NUM_BINS = 32
HELD_OUT = 200  # clips
PACKING_LENGTH = 256
PACKS_A_STEP = 4
RANKS = 2
MIN_RIGHT = 0.7
MAX_S = 900.0
VOCABULARY = 384
TOKENS = ("<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
)


def write_clips(folder: Path, num_clips: int, *, seed: int) -> Path:
    """Chats in which a clip is asked about, and the clips as files."""
    import soundfile

    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    path = folder / "clips.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_clips):
            note = list(NOTES)[int(rng.integers(len(NOTES)))]
            rate, format = int(rng.choice(RATES)), str(rng.choice(FORMATS))
            hertz = NOTES[note] * 2 ** rng.uniform(-1 / 24, 1 / 24)
            time_s = np.arange(int(rate * rng.uniform(0.3, SECONDS))) / rate
            wave = rng.uniform(0.1, 0.6) * np.sin(2 * np.pi * (hertz * time_s + rng.random()))
            name = f"{number}.{format.lower()}"
            soundfile.write(folder / name, wave + rng.normal(0, 0.02, len(wave)), rate, format=format)
            question = {"role": "user", "content": "<audio>Which tone is it?"}
            answer = {"role": "assistant", "content": note}
            file.write(json.dumps({"messages": [question, answer], "audios": [name]}) + "\n")
    return path


def save_processor(
    folder: Path, texts: list[str], *, num_bins: int = NUM_BINS, seconds: int = SECONDS, vocabulary: int = VOCABULARY
) -> Path:
    """A Qwen2-Audio processor whose tokenizer was trained on texts, as save_pretrained writes it."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    tokenizer = save_tokenizer(folder, texts, tokens=TOKENS, vocabulary=vocabulary)
    sounds = WhisperFeatureExtractor(feature_size=num_bins, chunk_length=seconds)
    Qwen2AudioProcessor(sounds, tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def save_tokenizer(
    folder: Path, texts: list[str], *, tokens: tuple[str, ...], vocabulary: int = VOCABULARY, **named: Any
) -> Any:
    """A tokenizer that was trained on texts, with further tokens. named: of Qwen2TokenizerFast."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2TokenizerFast

    folder.mkdir(parents=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = vocabulary - len(tokens) - 1
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    bpe.model.save(str(folder))
    files = (str(folder / name) for name in ("vocab.json", "merges.txt"))
    return Qwen2TokenizerFast(*files, additional_special_tokens=list(tokens), **named)


def model_fields(audio_token_id: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2_audio",
        "audio_token_index": audio_token_id,
        "audio_config": {
            "num_mel_bins": NUM_BINS, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128, "max_source_positions": SECONDS * 50, "initializer_range": 0.08,
        },
        "text_config": {
            "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
            "max_position_embeddings": PACKING_LENGTH, "initializer_range": 0.08, "tie_word_embeddings": False,
        },
    }  # fmt: skip


def train(folder: Path, data: Path, processor: Path, *, audio_token_id: int, steps: int, seed: int) -> Path:
    """The folder of the exported model."""
    from lmms_stream.tools.demo.jobs import run_job

    settings = {
        "dataset": {
            "remote": str(data),
            "processor": {"type": "audio", "path": str(processor)},
            "packing_length": PACKING_LENGTH,
            "seed": seed,
        },
        "model": {"config": model_fields(audio_token_id), "seed": seed},
        "train": {
            "output_dir": str(folder),
            "global_batch": PACKS_A_STEP,
            "max_steps": steps,
            "learning_rate": 2e-3,
            "warmup": 0.05,
            "logging_steps": 10,
            "export": True,
        },
    }
    folder.mkdir(parents=True)
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    run_job(config, folder, nproc=RANKS, on_step=lambda step: None, timeout_s=MAX_S)
    return folder / "export"


def right_of(model: Path, held_out: Path, processor: Path) -> float:
    """The share of held-out clips that a trained model tells right."""
    import torch
    import transformers
    from lmms_stream.processors.multimodal import MultimodalProcessor

    network: Any = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(model).eval()

    def masked(input_ids: torch.Tensor, **media: torch.Tensor) -> Any:
        return network(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **media)

    return share_right(masked, MultimodalProcessor.from_pretrained(str(processor)), held_out, HELD_OUT)


def run_all(folder: Path, *, num_clips: int, steps: int, seeds: int) -> list[float]:
    from lmms_stream.converters.convert import convert
    from lmms_stream.processors.multimodal import MultimodalProcessor

    numbers = {"train": num_clips, "held-out": HELD_OUT}
    sources = {
        name: write_clips(folder / f"{name}-clips", number, seed=seed)
        for seed, (name, number) in enumerate(numbers.items())
    }
    path = save_processor(folder / "processor", [source.read_text() for source in sources.values()])
    processor = MultimodalProcessor.from_pretrained(str(path))
    for name, source in sources.items():
        convert([source], str(folder / name), processor=processor)
    audio_token_id = processor.tokenizer.token_id("<|AUDIO|>")
    assert audio_token_id is not None
    shares = []
    for seed in range(seeds):
        run = folder / f"run-{seed}"
        model = train(run, folder / "train", path, audio_token_id=audio_token_id, steps=steps, seed=seed)
        shares.append(right_of(model, folder / "held-out", path))
        print(f"seed {seed}: {shares[-1]:.1%} right", flush=True)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=2000, help="to train on")
    parser.add_argument("--steps", type=int, default=150, help="of each run")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        shares = run_all(Path(name), num_clips=args.clips, steps=args.steps, seeds=args.seeds)
    seconds = time.perf_counter() - begun
    rows = [[f"seed {seed}", f"{share:.1%}"] for seed, share in enumerate(shares)]
    print_table(f"{HELD_OUT} clips that were not heard, after {args.steps} steps; guessing 25 %", ["", "right"], rows)
    print(f"at least {MIN_RIGHT:.0%} right for each seed: {verdict(min(shares) >= MIN_RIGHT)}")
    print(f"all of it within {MAX_S / 60:.0f} minutes: {verdict(seconds <= MAX_S)} ({seconds / 60:.1f})")


if __name__ == "__main__":
    main()
