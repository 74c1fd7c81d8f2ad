"""The parts of a pack's tokens that ranks run, and models that cannot run on parts."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.plugins.families.gemma3 import Gemma3
from lmms_stream.plugins.parallel.sequence import ATTENTIONS, SequenceParts, check_parts, leave_out, repeated
from lmms_stream.processors.families.probe import Described
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.loss import learnt_tokens
from lmms_stream.train.model.towers import check_shares

from ..train.test_model import TINY
from ..versions import declared


class Rank:
    """A rank of a group that is not there: what parts ask of it."""

    def __init__(self, rank: int, degree: int):
        self.rank, self.size = lambda: rank, lambda: degree


def parts_of(degree: int) -> list[SequenceParts]:
    return [SequenceParts(group=cast(dist.ProcessGroup, Rank(rank, degree))) for rank in range(degree)]


@given(lengths=st.lists(st.integers(1, 9), max_size=6), degree=st.integers(1, 9), num_axes=st.integers(0, 4))
def test_parts_one_after_another_are_the_pack_and_its_padding(lengths: list[int], degree: int, num_axes: int) -> None:
    samples = [{"input_ids": np.arange(1, n + 1), "labels": np.arange(1, n + 1)} for n in lengths]
    pack = collate(samples, range(len(samples)))
    positions = pack.position_ids.expand(num_axes, *pack.position_ids.shape) if num_axes else pack.position_ids
    inputs: dict[str, Any] = {
        "input_ids": pack.input_ids, "kinds": pack.input_ids + 7, "position_ids": positions,
        "cu_seq_lens_q": pack.cu_seqlens, "max_length_q": pack.max_seqlen, "use_cache": False,
    }  # fmt: skip
    of_ranks = [parts.own(inputs, of_tokens=("input_ids", "kinds")) for parts in parts_of(degree)]
    assert len({own["input_ids"].shape for own in of_ranks}) == 1
    num_padding = -pack.num_tokens % degree
    for name, filled in (("input_ids", [0] * num_padding), ("kinds", [0] * num_padding)):
        joined = torch.cat([own[name] for own in of_ranks], dim=1)
        assert joined[0].tolist() == [*inputs[name][0].tolist(), *filled]
    joined = torch.cat([own["position_ids"] for own in of_ranks], dim=-1)
    assert torch.equal(joined[..., : pack.num_tokens], positions)
    assert (joined[..., pack.num_tokens :] == torch.arange(num_padding)).all()
    padding = [pack.num_tokens + num_padding] if num_padding else []
    assert {tuple(own["cu_seq_lens_q"].tolist()) for own in of_ranks} == {(*pack.cu_seqlens.tolist(), *padding)}
    assert {own["max_length_q"] for own in of_ranks} == {max(pack.max_seqlen, num_padding)}
    assert not any(own["use_cache"] for own in of_ranks)


@given(lengths=st.lists(st.integers(1, 9), max_size=6), degree=st.integers(1, 9))
def test_each_target_is_predicted_on_the_rank_of_the_token_before_it(lengths: list[int], degree: int) -> None:
    samples = [{"input_ids": np.arange(n), "labels": np.arange(n)} for n in lengths]
    pack = collate(samples, range(len(samples)))
    expected, expected_targets = learnt_tokens(pack.labels)
    size = -(-pack.num_tokens // degree)
    found, targets = [], []
    for rank, parts in enumerate(parts_of(degree)):
        learnt, own = learnt_tokens(parts.labels(pack.labels))
        assert not len(learnt) or int(learnt.max()) < size
        found += (learnt + rank * size).tolist()
        targets += own.tolist()
    assert (found, targets) == (expected.tolist(), expected_targets.tolist())


@given(kinds=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=9), max_size=3), degree=st.integers(1, 5))
def test_each_piece_of_media_is_in_one_share_and_no_share_is_a_piece_too_large(
    kinds: list[list[int]], degree: int
) -> None:
    of_ranks = [parts.shares(kinds) for parts in parts_of(degree)]
    for kind, patches in enumerate(kinds):
        assert [each for shares in of_ranks for each in patches[shares[kind]]] == patches
    if kinds:
        work = [sum(kinds[0][shares[0]]) for shares in of_ranks]
        assert max(work) < sum(kinds[0]) / degree + max(kinds[0])


def test_features_and_losses_of_a_pack_are_in_the_order_of_its_tokens() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        parts, is_medium = SequenceParts(group=dist.group.WORLD), torch.tensor([[False, True, True]])
        features = torch.arange(6.0).view(2, 3)
        assert torch.equal(parts.of_part(features, is_medium), features)
        with pytest.raises(ValueError, match=r"^1 features of media for 2 tokens of media in a pack$"):
            parts.of_part(features[:1], is_medium)
        losses, every = torch.arange(3.0, requires_grad=True), torch.arange(3)
        of_pack = parts.whole_losses(losses, losses + 1, every, every, 3)
        assert [each.tolist() for each in of_pack] == [[0, 1, 2], [1, 2, 3]]
        assert not any(each._is_view() for each in of_pack)  # FSDP's hooks on views may be lost, and torch warns
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("groups", "degree", "times"), [(2, 4, 2), (6, 4, 2), (4, 2, 1), (3, 2, 2), (1, 8, 8)])
def test_heads_of_keys_are_repeated_until_the_degree_divides_them(groups: int, degree: int, times: int) -> None:
    heads = repeated(torch.arange(float(groups)).view(1, groups, 1, 1), degree)
    assert heads.flatten().tolist() == [group for group in range(groups) for _ in range(times)]


def model_of(model_type: str, **fields: Any) -> Any:
    return ModelConfig(config=declared({"model_type": model_type, **TINY, **fields})).build()


@pytest.mark.parametrize(
    ("model_type", "fields", "options", "message"),
    [
        (
            "llama", {}, {"degree": 3},
            "train.sequence_parallel 3 does not divide the 4 attention heads of LlamaForCausalLM: each rank attends "
            "with a share of them. Set it to 1 or 2 or 4",
        ),
        (
            "llama", {}, {"degree": 4, "matrix_parts": 2},
            "train.sequence_parallel 4 does not divide the 2 attention heads of LlamaForCausalLM on a rank with "
            "tensor_parallel 2: each rank attends with a share of them. Set it to 1 or 2",
        ),
        (
            "llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {},
            "gives each rank a part of the positions, and dynamic positions of LlamaForCausalLM change with the",
        ),
        (
            "bloom", {}, {},
            "is for models whose layers see all earlier tokens, or a window, and Bloom",
        ),
    ],
)  # fmt: skip
def test_models_that_cannot_run_on_parts_are_refused(
    model_type: str, fields: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_parts(model_of(model_type, **fields), **{"degree": 2, **options})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            Gemma3,
            "sequence_parallel 2 shares the tokens and media of a pack, and the family of gemma3 has no attention "
            "without a mask (flash_attention_2 and sdpa_varlen): set it to 1, and gradient_checkpointing to true where "
            "packs need too much memory",
        ),
        (Described(model_types=("a", "b")), "the family of a, b has no method `pieces`, which cuts media into shares:"),
    ],
)
def test_families_that_cannot_share_media_are_refused(family: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_shares(family, ATTENTIONS, "train.sequence_parallel 2")
    assert message in str(caught.value)


def test_attention_that_needs_a_mask_is_left_out() -> None:
    choices = ["flash_attention_2", "flex_attention", "sdpa_varlen", "sdpa", "eager"]
    reason = "makes its mask of one rank's part of the tokens"
    assert leave_out(choices, "sdpa", degree=2) == dict.fromkeys(("flex_attention", "sdpa", "eager"), reason)
    assert choices == ["flash_attention_2", "sdpa_varlen"]
    with pytest.raises(ConfigError, match="sequence_parallel 2 with attention eager, whose mask would cover only"):
        leave_out([], "eager", degree=2)
