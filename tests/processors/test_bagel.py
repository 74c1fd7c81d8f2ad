"""A conversation with images to see and to make becomes the blocks that BAGEL's sequences have."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.bagel import BagelProcessor, BlockKind
from lmms_stream.processors.bagel_images import BagelSettings, Grid, VaeInput, VitInput
from lmms_stream.processors.base import FactsMissingError, Measured, processor_fingerprint
from lmms_stream.processors.lengths import with_not_shown
from lmms_stream.processors.not_shown import kinds_of
from PIL import Image

from .tiny_vlm import picture, save_tokenizer, stored

SMALL = BagelSettings(
    vae=VaeInput(stride=4, min_side=8, max_side=32, positions=8),
    vit=VitInput(stride=6, min_side=12, max_side=24, positions=4),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(made).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def processor(folder: Path) -> BagelProcessor:
    return BagelProcessor.from_pretrained(str(folder), SMALL)


def random_sample(seed: int) -> dict[str, Any]:
    """A conversation of up to five turns of texts and images of random sizes."""
    rng = np.random.default_rng(seed)
    turns: list[tuple[str, Any]] = []
    for turn in range(int(rng.integers(1, 6))):
        parts: list[Any] = []
        for _ in range(int(rng.integers(1, 4))):
            if rng.random() < 0.5:
                width, height = (int(side) for side in rng.integers(5, 60, 2))
                parts.append(("image", picture(width, height, seed=seed)))
            else:
                parts.append("word, 42 é! " * int(rng.integers(0, 5)))
        turns.append(("assistant" if turn % 2 else "user", parts))
    return stored(*turns)


def blocks_of(made: Any) -> list[tuple[BlockKind, int]]:
    return [(BlockKind(kind), tokens) for kind, tokens in made["media"]["blocks"].tolist()]


def test_measured_is_processed_for_300_images_of_random_sizes(processor: BagelProcessor) -> None:
    samples = [random_sample(seed) for seed in range(110)]
    facts_alone = [{"messages": each["messages"]} for each in samples]
    kinds: set[BlockKind] = set()
    num_images = 0
    for sample, measured in zip(samples, processor.measure_media(facts_alone), strict=True):
        assert isinstance(measured, Measured)
        made = processor.process(sample)
        media, blocks = made["media"], blocks_of(made)
        assert measured.tokens == len(made["input_ids"]) == len(made["labels"]) == sum(count for _, count in blocks)
        cells = {name: len(media.get(f"{name}_patches", ())) for name in ("vit", "vae")}
        assert measured.image_tokens == sum(cells.values())
        assert measured.patches == max(1, sum(cells.values()))
        for name, of in (("vit", (BlockKind.SEEN,)), ("vae", (BlockKind.CONDITION, BlockKind.MADE))):
            assert cells[name] == sum(count - 2 for kind, count in blocks if kind in of)
            if cells[name]:
                assert cells[name] == len(media[f"{name}_positions"]) == int(media[f"{name}_grids"].prod(1).sum())
        kinds |= {kind for kind, _ in blocks}
        num_images += sum(kind != BlockKind.TEXT for kind, _ in blocks)
    assert num_images >= 300
    assert kinds == set(BlockKind)
    assert processor.measure(samples[0]) == len(processor.process(samples[0])["input_ids"])


def test_blocks_follow_the_conversation(processor: BagelProcessor) -> None:
    """24 x 12 pixels: 2 x 4 patches of 6, and 3 x 6 latents of 4; clean latents where an image to be made follows."""
    image = ("image", picture(24, 12))
    sample = stored(
        ("system", "yes"), ("user", [image, "see"]), ("assistant", ["What", image]), ("user", [image]),
        ("assistant", "A chart"),
    )  # fmt: skip
    made = processor.process(sample)
    texts = {text: len(processor.tokenizer.encode(text, add_special_tokens=False)) for text in ("yes", "see", "What")}
    assert blocks_of(made)[:-1] == [
        (BlockKind.TEXT, texts["yes"] + 2), (BlockKind.CONDITION, 20), (BlockKind.SEEN, 10),
        (BlockKind.TEXT, texts["see"] + 2),
        (BlockKind.TEXT, texts["What"] + 2), (BlockKind.MADE, 20), (BlockKind.SEEN, 10),
    ]  # fmt: skip
    text = processor.tokenizer.decode(made["input_ids"].tolist())
    pads = "<|image_pad|>"
    assert text == (
        f"<|im_start|>yes<|im_end|><|vision_start|>{pads * 18}<|vision_end|><|vision_start|>{pads * 8}<|vision_end|>"
        f"<|im_start|>see<|im_end|><|im_start|>What<|im_end|><|vision_start|>{pads * 18}<|vision_end|>"
        f"<|vision_start|>{pads * 8}<|vision_end|><|im_start|>A chart<|im_end|>"
    )
    learnt = made["labels"] != -100
    assert np.array_equal(made["labels"][learnt], made["input_ids"][learnt])
    assert processor.tokenizer.decode(made["labels"][learnt].tolist()) == "What<|im_end|>A chart<|im_end|>"
    assert made["media"]["vae_grids"].tolist() == [[3, 6], [3, 6]]
    assert made["media"]["vit_positions"][:8].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert made["media"]["vae_positions"][:8].tolist() == [0, 1, 2, 3, 4, 5, 8, 9]


def test_what_an_image_is_made_by_may_be_dropped_and_nothing_else(folder: Path) -> None:
    settings = BagelSettings(
        text_dropout=0.1, vit=VitInput(dropout=0.2, min_side=14), vae=VaeInput(dropout=0.3, min_side=16)
    )
    processor = BagelProcessor.from_pretrained(str(folder), settings)
    image = ("image", picture(24, 24))
    sample = stored(("user", [image, "see"]), ("assistant", ["What", image]), ("user", ["yes", image]))
    made = processor.process(sample)
    assert [kind for kind, _ in blocks_of(made)] == [
        BlockKind.CONDITION, BlockKind.SEEN, BlockKind.TEXT, BlockKind.TEXT, BlockKind.MADE, BlockKind.TEXT,
        BlockKind.SEEN,
    ]  # fmt: skip
    assert made["media"]["dropout"].tolist() == pytest.approx([0.3, 0.2, 0.1, 0, 0, 0, 0])
    same = BagelSettings(vae=VaeInput(min_side=16), vit=VitInput(min_side=14))
    other = BagelProcessor.from_pretrained(str(folder), same)
    assert processor_fingerprint(processor) == processor_fingerprint(other)  # no length depends on it
    assert processor.measure(sample) == other.measure(sample)


def test_an_image_in_a_message_that_is_not_learnt_is_seen(processor: BagelProcessor) -> None:
    sample = stored(("user", "see"), ("assistant", ["yes", ("image", picture(24, 12))]))
    messages = json.loads(sample["messages"])
    messages[1]["learn"] = False
    made = processor.process({**sample, "messages": json.dumps(messages)})
    assert [kind for kind, _ in blocks_of(made)] == [BlockKind.TEXT, BlockKind.TEXT, BlockKind.SEEN]
    assert (made["labels"] == -100).all()


def test_patches_are_those_of_bagel(folder: Path) -> None:
    """Bicubic, from -1 to 1, and each patch by row, column and channel."""
    processor = BagelProcessor.from_pretrained(str(folder))
    data = picture(700, 430)
    made = processor.process(stored(("user", [("image", data)]), ("assistant", [("image", data)])))["media"]
    image = Image.open(BytesIO(data))
    for name, side, grids in (("vit", 14, [(27, 37)]), ("vae", 16, [(32, 52), (32, 52)])):
        grids = [tuple(grid) for grid in made[f"{name}_grids"].tolist()]
        expected = []
        for rows, columns in grids:
            resized = image.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
            pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float().div(255).sub(0.5).div(0.5)
            cut = pixels.reshape(3, rows, side, columns, side)
            expected.append(torch.einsum("chpwq->hwpqc", cut).reshape(-1, 3 * side * side))
        found = torch.from_numpy(made[f"{name}_patches"])
        assert found.shape == (sum(rows * columns for rows, columns in grids), 3 * side * side)
        assert torch.allclose(found, torch.cat(expected), atol=1e-6)
        assert float(found.min()) >= -1
        assert float(found.max()) <= 1


def test_sides_are_multiples_of_the_stride_within_their_bounds() -> None:
    settings = BagelSettings()
    for side in (settings.vae, settings.vit, SMALL.vae, SMALL.vit):
        rng = np.random.default_rng(0)
        for width, height in rng.integers(1, 5000, (500, 2)).tolist():
            rows, columns = side.grid(width, height)
            sides = (rows * side.stride, columns * side.stride)
            assert min(sides) >= side.stride
            assert max(sides) <= side.max_side
            if max(width, height) / min(width, height) <= side.max_side / side.min_side:
                assert min(sides) >= side.min_side - side.stride
    assert settings.vae.grid(512, 512) == Grid(32, 32)
    assert settings.vae.grid(4000, 3000) == Grid(48, 64)
    assert settings.vae.grid(100, 100) == Grid(32, 32)
    assert settings.vit.grid(1000, 1000) == Grid(36, 36)  # 512 is rounded to 518, which is above it
    assert settings.vit.grid(378, 378) == Grid(27, 27)
    assert settings.vae.position_ids(Grid(2, 3)).tolist() == [0, 1, 2, 64, 65, 66]
    assert settings.vit.position_ids(Grid(2, 2)).tolist() == [0, 1, 70, 71]


def test_people_see_what_the_encoders_see(processor: BagelProcessor) -> None:
    image = ("image", picture(24, 12))
    sample = stored(("user", [image]), ("assistant", [image]))
    seen = processor.see_media(sample)
    assert [each.pixels.shape for each in seen] == [(1, 12, 24, 3)] * 3
    ids = processor.process(sample)["input_ids"]
    pad = processor.tokenizer.token_id("<|image_pad|>")
    for each in seen:
        ((start, stop),) = each.spans
        assert (ids[start:stop] == pad).all()
        assert ids[start - 1] != pad
        assert ids[stop] != pad


def test_what_is_no_conversation_of_texts_and_images_is_refused(processor: BagelProcessor) -> None:
    with pytest.raises(DataError, match="a message holds video, and BAGEL reads texts and images: leave it out"):
        processor.measure(stored(("user", [("video", b"x")]), with_facts=False))
    with pytest.raises(DataError, match="it has tools or calls of tools"):
        processor.measure(stored(("user", "see"), tools=[{"name": "look"}]))
    with pytest.raises(DataError, match="its messages hold no text and no image: leave it out"):
        processor.measure({"messages": json.dumps([{"role": "user", "content": None}])})
    without = stored(("user", [("image", picture(24, 12))]), with_facts=False)
    with pytest.raises(FactsMissingError, match="an image is stored without its size"):
        processor.measure({"messages": without["messages"]})
    assert processor.measure(without) == 10
    whole = stored(("user", [("image", picture(24, 12))]))
    with pytest.raises(DataError, match="the image cannot be decoded"):
        processor.process({**whole, "media": whole["media"][:200] + b"x" * (len(whole["media"]) - 200)})


def test_thoughts_beside_the_content_are_counted_as_not_shown(processor: BagelProcessor) -> None:
    messages = [{"role": "user", "content": "see"}, {"role": "assistant", "content": "yes"}]
    thoughts = [messages[0], messages[1] | {"reasoning_content": "word"}]
    samples = [{"messages": json.dumps(each), "media": b""} for each in (messages, thoughts)]
    found = [
        each
        for each in with_not_shown(processor, samples, processor.measure_media(samples))
        if isinstance(each, Measured)
    ]
    assert [kinds_of(each.not_shown) for each in found] == [[], ["reasoning"]]


def test_settings_that_cannot_be_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"processor\.bagel\.vit\.dropout must be a probability from 0 to 1, got 2"):
        VitInput(dropout=2)
    with pytest.raises(ConfigError, match=r"bagel\.text_dropout must be a probability from 0 to 1, got -0\.5"):
        BagelSettings(text_dropout=-0.5)
    with pytest.raises(ConfigError, match=r"bagel\.vae\.stride must be a whole number of at least 1, got 0"):
        VaeInput(stride=0)
    with pytest.raises(ConfigError, match=r"vit: stride 14, min_side 600 and max_side 512 must ascend: correct them"):
        VitInput(min_side=600)
    with pytest.raises(ConfigError, match=r"vae: max_side 2048 has 128 strides of 16, and positions is 64: raise"):
        VaeInput(max_side=2048)
    made = ProcessorConfig(type="bagel", tokenizer=str(folder), bagel=SMALL).build()
    assert isinstance(made, BagelProcessor)
    assert made.settings == SMALL
    with pytest.raises(ConfigError, match=r"processor\.bagel is for processor\.type bagel, and that is chat: leave"):
        ProcessorConfig(bagel=SMALL)


def test_a_tokenizer_without_the_tokens_of_images_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.add_tokens(["<|vision_start|>"])
    plain = type(tokenizer)(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    with pytest.raises(ConfigError, match=r"does not have <\|im_start\|> as one token.*add .* as special tokens"):
        BagelProcessor(plain)
