"""Texts and images are learnt in one sequence, each sample as if it were alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples.bagel import model as example
from examples.bagel.latents import KLLatents
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate, join
from lmms_stream.plugins.tasks.bagel import Bagel
from lmms_stream.plugins.tasks.bagel_model import BlockInputs, BlockLayout, BlockOutput, attend, draw_blocks
from lmms_stream.processors.bagel import LATENTS, BagelProcessor, BlockKind, visible
from lmms_stream.processors.bagel_images import Grid, VaeInput
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.train.tasks.registry import build_task
from lmms_stream.train.tasks.task import Draw
from lmms_stream.types import Batch, Processed

from ...processors.test_blocks import random_blocks
from ..bagel import build_model, build_processor, conversation, save_words

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def processor(folder: Path) -> BagelProcessor:
    return build_processor(folder, text_dropout=0.3, vit={"dropout": 0.3}, vae={"dropout": 0.3})


@pytest.fixture(scope="module")
def samples(processor: BagelProcessor) -> list[Processed]:
    return [processor.process(conversation(number)) for number in range(10)]


def pack_of(samples: Sequence[Processed], ids: Sequence[int], *, pad_to: int | None = None) -> Batch:
    return collate([samples[number] for number in ids], ids, pad_to=pad_to, source="data")


def sums_of(packs: Sequence[Batch], model: Any, *, step: int = 3) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Of each objective, with the gradients of both."""
    task = Bagel()
    wrapped = task.wrap(model)
    made = task.losses(wrapped, join(packs), packs, draw=Draw(seed=1, step=step))
    model.zero_grad()
    sum((each.total for each in made.values()), torch.zeros(())).backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    for each in made.values():
        assert float(each.of_packs.sum()) == pytest.approx(float(each.total.detach()), rel=1e-5)
    return {name: float(each.total.detach()) for name, each in made.items()}, gradients


def added(results: Sequence[tuple[Mapping[str, float], Mapping[str, torch.Tensor]]]) -> Any:
    sums = {name: sum(losses[name] for losses, _ in results) for name in results[0][0]}
    names = {name for _, gradients in results for name in gradients}
    total = {name: sum(gradients[name] for _, gradients in results if name in gradients) for name in names}
    return sums, total


def assert_same(one: Any, two: Any) -> None:
    assert one[0] == pytest.approx(two[0], rel=1e-5)
    assert one[1].keys() == two[1].keys()
    wrong = [name for name, each in one[1].items() if (each - two[1][name]).norm() > 1e-5 * each.norm() + 1e-9]
    assert wrong == []


def test_a_pack_gives_the_losses_and_gradients_of_its_samples_one_by_one(samples: list[Processed]) -> None:
    model = build_model()
    alone = added([sums_of([pack_of(samples, [number])], model) for number in range(10)])
    assert_same(sums_of([pack_of(samples, range(10))], model), alone)
    assert_same(sums_of([pack_of(samples, range(9, -1, -1), pad_to=1500)], model), alone)
    apart = [pack_of(samples, [4, 0, 7], pad_to=400), pack_of(samples, []), pack_of(samples, [1, 2, 3, 5, 6, 8, 9])]
    assert_same(sums_of(apart, model), alone)
    assert all(value > 0 for value in alone[0].values())


def test_a_pack_gives_the_logits_and_velocities_of_its_samples_one_by_one(samples: list[Processed]) -> None:
    model: Any = build_model()
    model.eval()
    seen: list[BlockOutput] = []
    model.register_forward_hook(lambda *hooked: seen.append(hooked[2]))
    task = Bagel()
    wrapped = task.wrap(model)
    with torch.no_grad():
        for ids in (range(10), *([number] for number in range(10))):
            pack = pack_of(samples, ids)
            task.losses(wrapped, pack, [pack], draw=Draw(seed=1, step=3))
    packed, *alone = seen
    for number, found in enumerate(packed):
        one_by_one = torch.cat([each[number] for each in alone])
        assert found.shape == one_by_one.shape
        assert torch.allclose(found, one_by_one, rtol=1e-5, atol=1e-5 * float(found.std()))


def test_a_pack_without_samples_can_be_learnt_from() -> None:
    sums, gradients = sums_of([collate([], [], source="data")], build_model())
    assert sums == {"ce": 0, "mse": 0}
    assert not any(each.any() for each in gradients.values())
    assert dict(Bagel().units(collate([], []))) == {"ce": 0, "mse": 0}


def test_the_head_of_the_example_is_its_own_with_any_version_of_transformers() -> None:
    model: Any = build_model()
    assert model.lm_head.weight is not model.embed_tokens.weight


def test_units_are_loss_tokens_and_latents_to_be_made(samples: list[Processed]) -> None:
    for number in range(10):
        pack = pack_of(samples, [number], pad_to=700)
        made = draw_blocks([pack], Draw(seed=0, step=0), latent_size=48)
        expected = {"ce": int((pack.labels != -100).sum()), "mse": len(made.blocks.inside([BlockKind.MADE]))}
        assert dict(Bagel().units(pack)) == expected
        assert int(made.is_made.sum()) == expected["mse"]


class Records(torch.nn.Module):
    """Says nothing, and keeps what it is given."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.given: list[BlockInputs] = []

    def forward(self, inputs: BlockInputs) -> BlockOutput:
        self.given.append(inputs)
        zero = 0 * self.weight
        num_tokens, num_made = len(inputs.predicting), len(inputs.made)
        return BlockOutput(zero.expand(num_tokens, 512).clone(), zero.expand(num_made, 48).clone())


def test_latents_get_noise_by_the_time_of_their_image(samples: list[Processed]) -> None:
    """x = (1 - t) z + t e, the model says e - z, t is the shifted sigmoid of N(0, 1), conditions stay clean."""
    model = Records(build_model().config)
    task = Bagel(timestep_shift=3.0)
    pack, draw = pack_of(samples, range(10)), Draw(seed=1, step=3)
    sums = task.losses(task.wrap(model), pack, [pack], draw=draw)
    (given,) = model.given
    clean = pack.inputs["vae_patches"]
    drawn = draw_blocks([pack], draw, latent_size=48, timestep_shift=3.0)
    is_made, noise = torch.from_numpy(drawn.is_made), torch.from_numpy(drawn.noise)
    times = given.times
    assert torch.equal(given.latents[~is_made], clean[~is_made])
    assert not times[~is_made].any()
    assert torch.allclose(given.latents, (1 - times)[:, None] * clean + times[:, None] * noise)
    expected = float((noise - clean)[is_made].square().mean(1).sum())
    assert float(sums["mse"].of_packs.sum()) == pytest.approx(expected, rel=1e-5)
    blocks = drawn.blocks
    of_latents = blocks.of_tokens[blocks.inside(LATENTS)]
    for block in np.flatnonzero(blocks.kinds == BlockKind.MADE):
        assert len(set(times[of_latents == block].tolist())) == 1  # one for an image
    assert len({float(each) for each in times[is_made]}) == int((blocks.kinds == BlockKind.MADE).sum())
    normal = draw.generator("data", 2, "time").standard_normal(1)[0]
    share = 1 / (1 + np.exp(-normal))
    first = float(times[of_latents == np.flatnonzero(blocks.samples == 2)[-1]][0])
    assert first == pytest.approx(3 * share / (1 + 2 * share), rel=1e-6)


def test_noise_is_never_the_same_twice(samples: list[Processed]) -> None:
    """Another for each sample and step, and the same for a sample in a step whatever lies beside it."""
    pack = pack_of(samples, [2, 7, 4])
    seen: set[float] = set()
    for step in range(4):
        drawn = draw_blocks([pack], Draw(seed=1, step=step), latent_size=48)
        values = drawn.noise[drawn.is_made]
        assert not seen & set(values.ravel().tolist())
        seen |= set(values.ravel().tolist())
        again = draw_blocks([pack_of(samples, [4])], Draw(seed=1, step=step), latent_size=48)
        assert np.array_equal(drawn.noise[-len(again.noise) :], again.noise)
        assert np.array_equal(drawn.times[-len(again.times) :], again.times)
    assert abs(np.mean([*seen])) < 0.02
    assert abs(np.std([*seen]) - 1) < 0.02


def test_what_an_image_is_made_by_is_dropped_by_its_probability(folder: Path) -> None:
    processor = build_processor(folder, text_dropout=0.2, vae={"dropout": 0.5})
    made = processor.process(conversation(3))
    pack = collate([made] * 400, range(400), source="data")
    blocks = draw_blocks([pack], Draw(seed=1, step=0), latent_size=48).blocks
    shares = [float(blocks.dropped[number :: len(made["media"]["blocks"])].mean()) for number in range(5)]
    assert [round(share, 1) for share in shares] == [0.2, 0.5, 0, 0, 0]
    assert not draw_blocks([pack], Draw(seed=1, step=None), latent_size=48).blocks.dropped.any()  # in an evaluation
    other = draw_blocks([pack], Draw(seed=1, step=1), latent_size=48).blocks
    assert (other.dropped != blocks.dropped).any()


def test_what_is_dropped_counts_as_if_it_were_not_there(folder: Path) -> None:
    """Its tokens stay, so that the pack is as long as it was planned; losses are those without them."""
    dropping = build_processor(folder, text_dropout=1.0, vit={"dropout": 1.0}, vae={"dropout": 1.0})
    made = dropping.process(conversation(3))
    table = made["media"]["blocks"]
    (image,) = np.flatnonzero(table[:, 0] == BlockKind.MADE)
    kept = np.flatnonzero(made["media"]["dropout"] == 0)
    tokens = np.flatnonzero(np.isin(np.repeat(np.arange(len(table)), table[:, 1]), kept))
    latents = int(table[image, 1]) - 2
    media = {
        "blocks": table[kept], "dropout": np.zeros(len(kept), np.float32),
        "vae_patches": made["media"]["vae_patches"][-latents:], "vae_grids": made["media"]["vae_grids"][-1:],
        "vae_positions": made["media"]["vae_positions"][-latents:],
    }  # fmt: skip
    left = {"input_ids": made["input_ids"][tokens], "labels": made["labels"][tokens], "media": media}
    assert len(left["input_ids"]) < len(made["input_ids"])
    model = build_model()
    sums, gradients = sums_of([collate([made], [5], source="data")], model)
    expected_sums, expected = sums_of([collate([left], [5], source="data")], model)
    assert sums == pytest.approx(expected_sums, rel=1e-5)
    for name, each in expected.items():
        assert torch.allclose(gradients[name], each, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("seed", range(8))
def test_both_forms_of_the_mask_are_the_written_one(seed: int) -> None:
    blocks = random_blocks(seed)
    layout = BlockLayout(blocks, CPU)
    mask, tokens = visible(blocks), torch.arange(blocks.num_tokens)
    of_flex = layout.sees(None, None, tokens[:, None], tokens[None])
    assert np.array_equal(of_flex.numpy(), mask)
    query, key, value = torch.randn(3, 1, 2, blocks.num_tokens, 8, generator=torch.Generator().manual_seed(seed))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=torch.from_numpy(mask))
    assert torch.allclose(attend(query, key, value, layout), expected, atol=1e-5)


def test_flex_attention_takes_the_mask() -> None:
    """As it runs on a GPU, but for its compiling."""
    from torch.nn.attention.flex_attention import create_mask

    layout = BlockLayout(random_blocks(3), CPU)
    size = layout.blocks.num_tokens
    assert layout.block_mask.shape == (1, 1, size, size)
    made = create_mask(layout.sees, None, None, size, size, device="cpu")
    assert np.array_equal(made[0, 0].numpy(), visible(layout.blocks))


def broken(change: Any) -> Any:
    """A model with another attention: change makes the visible cells of visible cells and layout."""
    model = build_model()

    def attends(query: Any, key: Any, value: Any, layout: BlockLayout) -> torch.Tensor:
        mask = torch.from_numpy(change(visible(layout.blocks), layout.blocks))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return model, attends


def all_samples(mask: Any, blocks: Any) -> Any:
    return mask | np.tri(len(mask), dtype=bool)


def with_noise(mask: Any, blocks: Any) -> Any:
    block = blocks.of_tokens
    return mask | ((block[:, None] > block[None]) & (blocks.samples[block][:, None] == blocks.samples[block][None]))


def ahead(mask: Any, blocks: Any) -> Any:
    return mask | (blocks.of_tokens[:, None] == blocks.of_tokens[None])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (all_samples, "BagelModel gives other logits for a sample in a pack than for the sample alone"),
        (with_noise, "BagelModel lets text see an image that is to be made, which is noise when it is made"),
        (ahead, "BagelModel lets tokens see those that they are to predict: use block_attention"),
    ],
)
def test_a_model_that_does_not_keep_to_the_mask_is_refused(
    change: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, attends = broken(change)
    task = Bagel()
    task.check(task.wrap(model), device=CPU, bf16=False, is_compiled=False)
    monkeypatch.setattr(example, "attend", attends)
    with pytest.raises(ConfigError, match=says):
        task.check(task.wrap(model), device=CPU, bf16=False, is_compiled=False)


def test_an_autoencoder_makes_the_latents(samples: list[Processed]) -> None:
    pack, model = pack_of(samples, range(5)), Records(build_model().config)
    grids: list[torch.Tensor] = []

    def halves(pixels: torch.Tensor, of_images: torch.Tensor) -> torch.Tensor:
        grids.append(of_images)
        return pixels / 2

    task = Bagel(autoencoder=halves)
    task.losses(task.wrap(model), pack, [pack], draw=Draw(seed=1, step=None))
    (given,) = model.given
    is_clean = given.times == 0
    assert torch.equal(given.latents[is_clean], pack.inputs["vae_patches"][is_clean] / 2)
    assert int(grids[0].prod(1).sum()) == len(given.latents)
    small = Bagel(autoencoder=lambda pixels, _: pixels[:, :5])
    with pytest.raises(ConfigError, match="latents have 5 values, and the model's latent_size is 48: give task bagel"):
        small.losses(small.wrap(model), pack, [pack], draw=Draw(seed=1, step=0))


def test_an_autoencoder_of_diffusers_makes_a_latent_of_each_stride() -> None:
    diffusers: Any = import_module("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=3, norm_num_groups=2,
        up_block_types=("UpDecoderBlock2D",) * 2, scaling_factor=0.5, shift_factor=0.1,
    )  # fmt: skip
    encode = KLLatents(vae, stride=4)
    side, grids = VaeInput(stride=4, min_side=8, max_side=16, positions=4), [Grid(2, 3), Grid(4, 2)]
    images = [
        np.random.default_rng(0).integers(0, 256, (4 * rows, 4 * columns, 3), np.uint8) for rows, columns in grids
    ]
    patches = np.concatenate([side.patches(image, grid) for image, grid in zip(images, grids, strict=True)])
    found = encode(torch.from_numpy(patches), torch.tensor(grids))
    assert found.shape == (6 + 8, 2 * 2 * 3)
    whole = torch.from_numpy(images[1]).permute(2, 0, 1)[None].float() / 127.5 - 1
    latents = (vae.encode(whole).latent_dist.mean[0] - 0.1) * 0.5  # [3, 8, 4]
    for row in range(4):
        for column in range(2):
            expected = latents[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].permute(1, 2, 0).flatten()
            assert torch.allclose(found[6 + 2 * row + column], expected, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"stride 5 is no multiple of the autoencoder's 2: set vae\.stride to one that is"
    ):
        KLLatents(vae, stride=5)


def test_what_task_bagel_cannot_learn_from_is_refused(
    processor: BagelProcessor, chat_processor: ChatProcessor, samples: list[Processed]
) -> None:
    for name in ("ce_weight", "mse_weight"):
        with pytest.raises(ConfigError, match=f"{name} of task bagel must be at least 0, got -1"):
            build_task("bagel", {name: -1})
    with pytest.raises(ConfigError, match="timestep_shift of task bagel must be above 0, got 0"):
        Bagel(timestep_shift=0)
    wrapped: Any = Bagel().wrap(build_model())
    wrapped.check_processor(processor)
    with pytest.raises(ConfigError, match="learns from blocks, and ChatProcessor makes none: set"):
        wrapped.check_processor(chat_processor)
    wrapped.model.config.vocab_size = 9
    with pytest.raises(ConfigError, match="the model 9 tokens: take the model's own tokenizer, or raise"):
        wrapped.check_processor(processor)
    plain = collate([{name: samples[0][name] for name in ("input_ids", "labels")}], [0])
    with pytest.raises(ConfigError, match=r"blocks of 0 tokens, and samples of \d+: set processor.type to bagel"):
        draw_blocks([plain], Draw(seed=0, step=0), latent_size=48)
