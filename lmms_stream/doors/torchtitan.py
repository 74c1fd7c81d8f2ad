"""torchtitan's dataloader on the packs of a PackedLoader; the position is in torchtitan's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch

from ..errors import ConfigError
from ..extras import need
from ..loader.delivery import refuse_lanes
from ..loader.loader import PackedLoader, by_step
from ..processors.base import IGNORED_LABEL
from ..types import Batch, World

need("torchtitan", by="the classes of lmms_stream.doors.torchtitan")

import tyro  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402

Item = tuple[dict[str, torch.Tensor], torch.Tensor]
PASSED = ("tokenizer", "snapshot_every_n_steps")  # by trainers, besides arguments by name; docs/other_trainers.md


class PackedDataLoader(BaseDataLoader):
    """Packs of this rank, local_batch_size at a time, epoch after epoch: training.steps ends the run.

    An item is ({"input", "positions"}, labels), each int64[local_batch_size, seq_len]. positions restart at 0 where a
    sample or padding begins: torchtitan's masks separate samples there. labels are those of the next token, and -100 at
    the end of a sample and in padding. All ranks have the same state, and any number of ranks can load the state.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """open_loader: returns PackedLoader(dataset, **options); options: world, global_batch and pad_to.

        global_batch_size: training.global_batch_size. build raises ConfigError if torchtitan has other settings.
        """

        open_loader: Annotated[Callable[..., PackedLoader] | None, tyro.conf.Suppress] = None
        global_batch_size: int = -1

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **others: Any
    ):
        of_data = {name for name in ("dataset", "dataset_path") if getattr(config, name)}
        for name in sorted({*others, *of_data} - {*PASSED}):
            raise ConfigError(f"PackedDataLoader does not read {name}: leave it out, and name data in open_loader")
        per_pass = local_batch_size * dp_world_size
        global_batch = per_pass if config.global_batch_size < 0 else config.global_batch_size
        if global_batch % per_pass:
            raise ConfigError(
                f"global_batch_size {global_batch} is not a multiple of local_batch_size {local_batch_size} times "
                f"{dp_world_size} data-parallel ranks: choose a multiple of {per_pass}, or another local_batch_size"
            )
        if config.open_loader is None:
            raise ConfigError("PackedDataLoader.Config has no function that opens a PackedLoader: set open_loader")
        options = {"world": _world(dp_rank, dp_world_size), "global_batch": global_batch, "pad_to": seq_len}
        self.loader = config.open_loader(**options)
        self._local_batch, self._seq_len, self._num_passes = local_batch_size, seq_len, 0
        refuse_lanes(self.loader)
        for source, plan in self.loader.mixture.plans.items():
            for length in plan.packing.lengths:
                if length != seq_len:
                    raise ConfigError(
                        f"packing_length {length} of source {source!r} is not training.seq_len {seq_len}: set both "
                        "alike"
                    )
        used = (self.loader.world, self.loader.global_batch, self.loader.settings.pad_to)
        for (name, value), other in zip(options.items(), used, strict=True):
            if other != value:
                raise ConfigError(
                    f"the loader of open_loader has {name} {other}, and torchtitan's settings need {value}: return "
                    "PackedLoader(dataset, **options) from open_loader(**options)"
                )
        self._refuse_within_step(others.get("snapshot_every_n_steps") or 0)

    def __iter__(self) -> Iterator[Item]:
        while True:
            first, self._num_passes = self.loader.step, 0
            for packs in by_step(self.loader, self._local_batch):
                self._num_passes += 1
                yield _item(packs, self._seq_len)
            if self.loader.step == first:  # the end of weights with max_epochs
                return

    def state_dict(self) -> dict[str, Any]:
        """Return {"cursor": JSON}, the position after the last step; ConfigError within a step."""
        self._refuse_within_step(self._num_passes)
        return self.loader.stateful().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved position; CursorError for a position in other packs."""
        self.loader.stateful().load_state_dict(state_dict)

    def _refuse_within_step(self, num_passes: int) -> None:
        if num_passes * self._local_batch % self.loader.micro_batches:
            raise ConfigError(
                f"torchtitan saves after {num_passes} passes, within a step of {self.loader.global_batch} packs, the "
                "dataloader's global_batch_size: set it to the value of training.global_batch_size"
            )


def _world(dp_rank: int, dp_world_size: int) -> World:
    """Return the data-parallel ranks: consecutive ranks with their nodes or, in a pipeline, without."""
    world = World.detect()
    replication, rest = divmod(world.world_size, dp_world_size)
    is_consecutive = not rest and world.rank // replication == dp_rank
    return replace(world, replication=replication) if is_consecutive else World(rank=dp_rank, world_size=dp_world_size)


def _item(packs: Sequence[Batch], seq_len: int) -> Item:
    for pack in packs:
        if pack.inputs or pack.token_inputs or pack.position_ids.shape[0] > 1 or pack.num_tokens != seq_len:
            raise ConfigError(
                f"a pack of source {pack.source!r} has {pack.num_tokens} tokens and media {sorted(pack.inputs)}, and "
                f"torchtitan takes {seq_len} tokens without media: set overlong to drop, truncate or split, or train "
                "on media with FSDP2SFTTrainer"
            )
    input_ids, positions, labels = (
        torch.cat([getattr(pack, name) for pack in packs]) for name in ("input_ids", "position_ids", "labels")
    )
    next_labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    return {"input": input_ids, "positions": positions}, next_labels
