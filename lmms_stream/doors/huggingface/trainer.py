"""FSDP2SFTTrainer: the arguments and members of transformers' Trainer and TRL's SFTTrainer, over PackedTrainer."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, get_args

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from ...errors import ConfigError
from ...extras import need
from ...loader.loader import PackedLoader
from ...mds.core import gives_packs
from ...mds.dataset_config import DatasetConfig
from ...processors.base import Compared
from ...train.checkpoint.store import CHECKPOINTS_NAME
from ...train.evaluate import mean_losses
from ...train.inputs import Functions, RunInputs
from ...train.model.build import ModelConfig
from ...train.model.model import PackedModel
from ...train.run.distributed import end_distributed, init_distributed
from ...train.run.flow import Control
from ...train.run.settings import Datasets, TrainConfig
from ...train.tasks.task import Task
from ...train.trainer import PackedTrainer
from ...types import Batch
from .arguments import TrainerInputs, arguments_of
from .collators import adapted

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainerCallback, TrainerState, TrainingArguments

logger = logging.getLogger("lmms_stream")

_REFUSED = {
    "autocast_smart_context_manager": "the model computes as args.bf16 says",
    "call_model_init": "override create_model",
    "compute_loss_context_manager": "the model computes as args.bf16 says",
    "create_accelerator_and_postprocess": "accelerate does not run the loop",
    "evaluation_loop": "call evaluate or predict, or override evaluation_step",
    "floating_point_ops": "records have perf/tflops_per_device",
    "get_batch_samples": "training_step is given the packs of a step",
    "get_decay_parameter_names": "weight_decay is of matrices alone: override create_optimizer for others",
    "get_optimizer_cls_and_kwargs": "override create_optimizer",
    "set_initial_training_values": "max_steps is the length of the run",
    "store_flos": "records have perf/tflops_per_device",
}


_NOT_CALLED = {
    **_REFUSED,
    "compute_ref_log_probs": "the task computes its reference: set precompute_ref_log_probs",
    "create_optimizer_and_scheduler": "override create_optimizer and create_scheduler",
    "get_eval_dataloader": "give another eval_dataset or data_collator",
    "get_test_dataloader": "give predict another dataset",
    "get_train_dataloader": "give another train_dataset or data_collator",
    "prediction_step": "override evaluation_step",
}
_RENAMED = {
    "compute_loss": ("model, batch, packs, units", "give compute_loss_func(outputs, labels, num_items_in_batch)"),
    "training_step": ("packs, units", "give callbacks, or compute_loss_func(outputs, labels, num_items_in_batch)"),
}  # parameters here, and what serves most users of transformers
_THEIRS = {"inputs", "return_outputs", "num_items_in_batch"}  # parameters of these methods in transformers


def check_overrides(kind: type) -> None:
    """Raise ConfigError if a user's class overrides a method of transformers' or TRL's trainer without effect.

    Our trainer does not call the method, or calls it with other parameters.
    """
    own = [each for each in kind.__mro__ if each is not object and not each.__module__.startswith("lmms_stream.")]
    changed = {name: value for each in reversed(own) for name, value in vars(each).items() if not name.startswith("__")}
    if not changed:
        return
    from transformers import Trainer

    trl = sys.modules.get("trl")
    names = {"SFTTrainer", *({"DPOTrainer", "KTOTrainer"} & {each.__name__ for each in kind.__mro__})}
    theirs = [Trainer, *(getattr(trl, name, None) for name in sorted(names))]
    for name, value in changed.items():
        remedy = _NOT_CALLED.get(name)
        if remedy is None and name.startswith("_") and any(callable(getattr(each, name, None)) for each in theirs):
            remedy = "override a method of docs/trainer.md"
        if remedy is not None:
            raise ConfigError(f"{kind.__name__} overrides {name}, which this trainer does not call: {remedy}")
        if name in _RENAMED and _THEIRS & {*inspect.signature(value).parameters}:
            parameters, remedy = _RENAMED[name]
            raise ConfigError(
                f"{kind.__name__}.{name} has the parameters of transformers', and this trainer calls it with "
                f"{parameters}: {remedy}, or override it with these (docs/trainer.md)"
            )
    if "save_model" in changed:
        logger.warning(
            "%s overrides save_model: this trainer's checkpoints do not call it, only your script and push_to_hub do",
            kind.__name__,
        )


class FSDP2SFTTrainer(PackedTrainer):
    """PackedTrainer with the arguments and members of transformers' Trainer and TRL's SFTTrainer.

    Arguments mean the same as in transformers and TRL. args: transformers', TRL's, or a TrainConfig. config: the
    TrainConfig of the run, for every type of args.
    Raises ConfigError for contradictory or unsupported arguments, and the errors of PackedTrainer.
    """

    is_fsdp_enabled: ClassVar[bool] = True
    is_deepspeed_enabled: ClassVar[bool] = False
    loss_is_scaled_for_ga: ClassVar[bool] = True

    args: Any
    hub_model_id: str | None = None

    def __init__(
        self,
        model: str | Path | ModelConfig | torch.nn.Module | None = None,
        args: TrainConfig | TrainingArguments | None = None,
        train_dataset: Datasets | DatasetConfig | Any = None,
        eval_dataset: Datasets | DatasetConfig | Any = None,
        data_collator: Callable[..., Any] | None = None,
        task: Task | None = None,
        processing_class: Any = None,
        model_init: Callable[..., torch.nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        peft_config: Any = None,
        formatting_func: Callable[..., Any] | None = None,
        quantization_config: Any = None,
    ):
        check_overrides(type(self))
        functions = Functions(
            model_init=model_init, compute_loss_func=compute_loss_func, compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )  # fmt: skip
        functions.check(model=model, task=task, eval_dataset=eval_dataset)
        strategy = "no" if args is None or isinstance(args, TrainConfig) else getattr(args, "eval_strategy", "no")
        name = getattr(strategy, "value", strategy)
        if eval_dataset is None and name != "no":
            raise ConfigError(f"args.eval_strategy is {name}, and there is no eval_dataset: pass one, or set it to no")
        of_task = getattr(task, "name", None)
        given = TrainerInputs(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=data_collator,
            processing_class=processing_class, formatting_func=formatting_func, peft_config=peft_config,
            quantization_config=quantization_config, objective=of_task if of_task in get_args(Compared) else None,
        )  # fmt: skip
        inputs = _run_inputs(given)
        self.args: Any = args if args is not None else inputs.arguments
        super().__init__(inputs, task=task, functions=functions, callbacks=callbacks or ())

    def callback_arguments(self) -> TrainingArguments:
        """Return transformers' arguments, unchanged or with the values of a TrainConfig."""
        made: TrainingArguments = self.inputs.arguments or arguments_of(self.config)
        return made

    # Members of transformers' Trainer, with the same names

    @cached_property
    def accelerator(self) -> Accelerator:
        """accelerate's own object, for scripts: print, wait_for_everyone, is_main_process, gather, …

        It prepares nothing: the trainer owns model, optimizer and data.
        """
        accelerate = need("accelerate", by="trainer.accelerator")

        class RunAccelerator(accelerate.Accelerator):  # type: ignore[name-defined]
            def unwrap_model(self, model: Any, *args: Any, **options: Any) -> Any:
                """Return transformers' model; each rank holds its part."""
                return model.model if isinstance(model, PackedModel) else super().unwrap_model(model, *args, **options)

        made: Accelerator = RunAccelerator(cpu=self.device.type == "cpu")
        return made

    @property
    def model_wrapped(self) -> PackedModel:
        return self.model

    @property
    def train_dataset(self) -> Datasets:
        return self.data.train_dataset

    @property
    def eval_dataset(self) -> Datasets | None:
        """The evaluation dataset, or several by name."""
        found = self.data.evaluations
        return (found.get("") or found) if found else None

    # Callbacks

    @property
    def state(self) -> TrainerState:
        return self.callbacks.state

    @property
    def control(self) -> Control:
        return self.callbacks.control

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.callbacks.add(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        return self.callbacks.pop(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.callbacks.pop(callback)

    # Data

    def get_train_dataloader(self) -> PackedLoader:
        """Return batches to train on from the beginning, read in this process; all ranks call this."""
        return self.data.train_loader(num_workers=0)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> PackedLoader:
        """Return batches of the eval_dataset, of one by its name, or of another dataset; all ranks call this."""
        return self.data.eval_loader(*self.data.one_to_evaluate(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> PackedLoader:
        """Return batches of a dataset; all ranks call this."""
        return self.get_eval_dataloader(test_dataset)

    def num_examples(self, dataloader: PackedLoader) -> int:
        """Return the number of samples of a loader's datasets."""
        return sum(plan.num_samples for plan in dataloader.mixture.plans.values())

    def prediction_step(
        self, model: PackedModel, inputs: Batch, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the mean loss of one pack per rank; logits float[1, T, V] and labels int64[1, T] of this rank's pack.

        All ranks call this. prediction_loss_only: None instead of logits and labels.
        """
        was_training = self.model.training
        self.model.eval()
        figures = mean_losses([inputs], self.steps, self.evaluation_step, device=self.device, world=self.world)
        logits = None
        if not prediction_loss_only:
            with torch.no_grad():
                logits = self.model.logits(inputs.to(self.device))
        self.model.train(was_training)
        return torch.tensor(figures["loss"]), logits, None if prediction_loss_only else inputs.labels

    # Records

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print figures on rank 0, like transformers."""
        from transformers.trainer_pt_utils import log_metrics

        log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write figures to SPLIT_results.json in output_dir, and with `combined` add them to all_results.json."""
        from transformers.trainer_pt_utils import save_metrics

        save_metrics(self, split, metrics, combined)

    def metrics_format(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return figures formatted for people."""
        from transformers.trainer_pt_utils import metrics_format

        made: dict[str, Any] = metrics_format(dict(metrics))
        return made

    def save_state(self) -> None:
        """Write the state to trainer_state.json in output_dir, on rank 0."""
        if self.is_world_process_zero():
            self.state.save_to_json(str(self.output_dir / "trainer_state.json"))

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ConfigError: a run has one set of arguments."""
        raise ConfigError(
            "hyperparameter_search is not here: start a run for each set of arguments, in a process of its own, from "
            "Optuna or Ray Tune, and return evaluate()'s figure to them"
        )

    # Numbers

    def get_num_trainable_parameters(self) -> int:
        return sum(each.numel() for each in self.model.parameters() if each.requires_grad)

    def get_learning_rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_optimizer_group(self, param: torch.nn.Parameter | None = None) -> Any:
        """Return the optimizer's group of a parameter; without a parameter, the parameters of all groups."""
        groups = self.optimizer.param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(each is param for each in group["params"])), None)

    def get_total_train_batch_size(self, args: Any = None) -> int:
        """Return the packs of a step over all ranks."""
        return self.config.global_batch

    def get_tp_size(self) -> int:
        return self.config.tensor_parallel

    def get_sp_size(self) -> int:
        return self.config.sequence_parallel

    def get_cp_size(self) -> int:
        return 1

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Build the model, the optimizer and the schedule of the run before train does; all ranks call this."""
        self.build()

    # The hub

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **details: Any,
    ) -> None:
        """Write README.md into output_dir: base model, dataset, trainer. details: fields of ModelCardData."""
        if not self.is_world_process_zero():
            return
        from huggingface_hub import ModelCard, ModelCardData

        name = getattr(self.model.config, "_name_or_path", "") or None
        base = None if name is None or Path(name).is_dir() else name
        every = {"lmms_stream", *([tags] if isinstance(tags, str) else tags or [])}
        card = ModelCardData(
            base_model=base, datasets=dataset_name, library_name="transformers", model_name=model_name,
            tags=sorted(every), **details,
        )  # fmt: skip
        title = model_name or self.output_dir.name
        begun = "" if base is None else f" from [{base}](https://huggingface.co/{base})"
        data = "" if dataset_name is None else f" on [{dataset_name}](https://huggingface.co/datasets/{dataset_name})"
        text = f"---\n{card.to_yaml()}\n---\n\n# {title}\n\nTrained{begun}{data} with lmms_stream.\n"
        self.output_dir.mkdir(parents=True, exist_ok=True)
        ModelCard(text).save(self.output_dir / "README.md")

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create args.hub_model_id on the hub (default: the name of output_dir), if it does not exist; on rank 0."""
        if not self.is_world_process_zero():
            return
        from huggingface_hub import create_repo

        name = getattr(self.args, "hub_model_id", None) or self.output_dir.resolve().name
        private = getattr(self.args, "hub_private_repo", None) if private is None else private
        self.hub_model_id = create_repo(name, token=self._token(token), private=private, exist_ok=True).repo_id

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Save the model, write its card, and upload output_dir without checkpoints; all ranks call this.

        card: arguments of create_model_card. Returns the result of huggingface_hub.upload_folder on rank 0, and raises
        its errors.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model()
        if not self.is_world_process_zero():
            return None
        from huggingface_hub import upload_folder

        self.create_model_card(**card)
        options: dict[str, Any] = {"run_as_future": not blocking}
        return upload_folder(
            repo_id=str(self.hub_model_id), folder_path=self.output_dir, commit_message=commit_message,
            token=self._token(token), revision=revision or getattr(self.args, "hub_revision", None),
            ignore_patterns=["_*", f"{CHECKPOINTS_NAME}*/*", "datasets/*"], **options,
        )  # fmt: skip

    def _token(self, token: str | None) -> str | None:
        return token or getattr(self.args, "hub_token", None)

    def end(self) -> None:
        """End the process group, as the last line of a script; collective operations fail afterwards."""
        end_distributed()
        if dist.is_initialized():
            dist.destroy_process_group()


def _refused(name: str, remedy: str) -> Callable[..., NoReturn]:
    def refused(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"{name} is a part of transformers' own loop, which is not here: {remedy}")

    refused.__name__, refused.__doc__ = name, f"Not here: {remedy}."
    return refused


for _name, _remedy in _REFUSED.items():
    setattr(FSDP2SFTTrainer, _name, _refused(_name, _remedy))


def _run_inputs(given: TrainerInputs) -> RunInputs:
    """Return the inputs of a run. transformers' arguments are not imported if all inputs are our own types."""
    theirs = (given.processing_class, given.formatting_func, given.peft_config, given.quantization_config)
    if (
        isinstance(given.args, TrainConfig)
        and (given.model is None or isinstance(given.model, ModelConfig | torch.nn.Module))
        and all(map(_is_ours, (given.train_dataset, given.eval_dataset)))
        and all(each is None for each in theirs)
    ):
        return RunInputs(
            config=given.args,
            arguments=None,
            model=given.model,
            train_dataset=given.train_dataset,
            eval_dataset=given.eval_dataset,
            data_collator=None if given.data_collator is None else adapted(given.data_collator),
        )
    from .resolve import resolve

    return resolve(given, lambda timeout_s, *, replication=1: init_distributed(timeout_s, replication=replication)[0])


def _is_ours(given: Any) -> bool:
    """Whether an object is a dataset of packs, or several by name."""
    if isinstance(given, Mapping):
        return all(map(_is_ours, given.values()))
    return given is None or (not getattr(given, "lacks_processor", False) and gives_packs(given))
