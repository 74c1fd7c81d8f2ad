"""transformers.Trainer, or a subclass, on the packs of a PackedLoader; the position is in its trainer_state.json.

from lmms_stream.doors.huggingface.packs import TrainerWithPacks

trainer = TrainerWithPacks(model, TrainingArguments("out", max_steps=1000), packs=loader)
trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from ...errors import CheckpointError, ConfigError
from ...loader.delivery import refuse_lanes

if TYPE_CHECKING:
    from ...loader.loader import PackedLoader
    from ...processors.base import Processor

Layout = Literal["packed", "padded"]


class PacksMixin:
    """Mixin before a class of Trainer: class MyTrainer(PacksMixin, Trainer).

    packs: the loader, which shares packs among ranks; gradient_accumulation_steps must be its micro_batches, and
    max_steps is needed (loader.steps_to_epoch(n) for n epochs). Trainer's loss of a step is the sum of the token losses
    over the loss tokens of the global batch. layout: see Batch.for_model. processor: of packs with media. Raises
    ConfigError for arguments that would train on other losses or packs.
    """

    def __init__(
        self,
        *args: Any,
        packs: PackedLoader,
        processor: Processor | None = None,
        layout: Layout = "packed",
        **options: Any,
    ):
        super().__init__(*args, **options)
        trainer: Any = self
        trainer.args.ignore_data_skip = True  # the loader itself begins at its position
        trainer.add_callback(PackPosition())
        self._batches = _Batches(trainer, packs, processor, layout)

    def get_train_dataloader(self) -> Any:
        """Return the batches of this rank, without an end: max_steps ends the run."""
        self._batches.check()
        return self._batches


class TrainerWithPacks(PacksMixin, Trainer):
    """transformers.Trainer with the argument `packs` in place of train_dataset, see PacksMixin."""


class PackPosition(TrainerCallback, ExportableState):
    """The position of a trainer's loader, in its checkpoints."""

    def __init__(self, cursor: dict[str, Any] | None = None):
        self.cursor = cursor
        self._loader: PackedLoader | None = None

    def state(self) -> dict[str, Any]:
        cursor = self.cursor if self._loader is None else self._loader.state_dict()
        return {"args": {"cursor": cursor}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Load the position of the checkpoint from which the trainer continues."""
        loader: PackedLoader = others["train_dataloader"].loader
        if state.global_step:
            saved = state.stateful_callbacks.get(type(self).__name__)
            if not saved or saved["args"]["cursor"] is None:
                raise CheckpointError(
                    f"the checkpoint of step {state.global_step} holds no position of packs in trainer_state.json, so "
                    "its run did not train on packs: begin a new run from its weights"
                )
            loader.load_state_dict(saved["args"]["cursor"])
            if loader.step != state.global_step:
                raise CheckpointError(
                    f"the checkpoint of step {state.global_step} holds the position of step {loader.step}: use another "
                    "checkpoint"
                )
        self._loader = loader

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Set the epoch of the packs. Trainer's own is a share of max_steps, and 0 after a resume."""
        assert self._loader is not None
        state.epoch = min(self._loader.epochs.values())


class _Batches:
    """The dataloader of a trainer."""

    def __init__(self, trainer: Any, loader: PackedLoader, processor: Processor | None, layout: Layout):
        self.loader = loader
        self._trainer, self._processor, self._layout = trainer, processor, layout

    def __iter__(self) -> Iterator[dict[str, Any]]:
        trainer = self._trainer
        for step in self.loader.steps(until=trainer.args.max_steps):
            for batch in step.batches:
                on_device = batch.to(trainer.args.device)
                yield on_device.for_model(trainer.model, self._processor, layout=self._layout, labels=True)

    def check(self) -> None:
        """Raise ConfigError for a trainer that would not train on the packs of each step."""
        args, loader, world = self._trainer.args, self.loader, self.loader.world
        if world.world_size != args.world_size:
            raise ConfigError(
                f"the loader shares packs among {world.world_size} ranks, and the trainer has {args.world_size}: open "
                "the dataset in each rank, after TrainingArguments"
            )
        if args.n_gpu > 1:
            raise ConfigError(f"one process drives {args.n_gpu} GPUs: start a process for each, with torchrun")
        if args.gradient_accumulation_steps != loader.micro_batches:
            raise ConfigError(
                f"gradient_accumulation_steps {args.gradient_accumulation_steps} is not the number of packs of a rank "
                f"in a step: set it to {loader.micro_batches}, global_batch {loader.global_batch} over "
                f"{world.num_groups} ranks"
            )
        if args.max_steps <= 0:
            raise ConfigError("a run on packs needs max_steps: for n epochs set it to loader.steps_to_epoch(n)")
        refuse_lanes(loader)
        counts_tokens = self._trainer.model_accepts_loss_kwargs or self._trainer.compute_loss_func is not None
        if not counts_tokens:
            raise ConfigError(
                f"the loss of {type(self._trainer.model).__name__} takes no num_items_in_batch, so each pack would "
                "count alike whatever its tokens: pass a compute_loss_func(outputs, labels, num_items_in_batch)"
            )
        if world.world_size > 1 and not args.average_tokens_across_devices:
            raise ConfigError(
                "average_tokens_across_devices is off, so each rank would count alike whatever its tokens: turn it on"
            )
