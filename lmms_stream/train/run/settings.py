"""How a run trains, checked: the section `train` of its YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...errors import ConfigError
from ...mds.core import HasCore, PackedDataset

Packed = PackedDataset | HasCore
Datasets = Packed | Mapping[str, Packed]
Reporter = Literal["tensorboard", "wandb"]
_AT_LEAST_1 = (
    "global_batch", "per_device_batch", "replication", "shard_ranks", "max_steps", "num_train_epochs", "max_tokens",
    "save_total_limit", "logging_steps", "pad_to",
)  # fmt: skip
_AT_LEAST_0 = (
    "save_steps", "eval_steps", "num_workers", "warmup_steps", "warmup_tokens", "max_skipped_steps", "z_loss", "seed",
    "learning_rate", "weight_decay", "adam_epsilon", "eval_delay",
)  # fmt: skip
_ABOVE_0 = ("max_grad_norm", "timeout_s", "peak_tflops")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Steps [first, stop) of this run, counted from its start, that torch's profiler traces, and where to."""

    first: int
    stop: int
    folder: str | None = None  # default: profile/ in the output_dir

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop:
            raise ConfigError(f"train.profile must be a range [first, stop), got [{self.first}, {self.stop}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How to train. global_batch counts packs per optimizer step, over all ranks.

    Exactly one of max_steps, num_train_epochs (exact, from the plan) and max_tokens (of samples, padding not counted).

    per_device_batch: packs in one forward of a rank; the rest of its share of global_batch is accumulated.
    replication: consecutive ranks that read the same packs. shard_ranks: consecutive ranks that share one copy of the
    model (default: all; fewer make HSDP). wrap: classes of the blocks that are sharded one by one (default: what the
    model says). weights and max_epochs mix several datasets (see Mixture); weights are shares
    of the tokens by dataset, or a schedule of them by first step. skip_steps: steps [first, stop) whose packs are
    passed over, around a spike of the loss.
    lr_scheduler_type: "cosine", "linear", "constant" or "wsd" (warm up, stay, and go to 0 over the last decay_ratio).
    Warm-up is at most one of warmup_steps, warmup_ratio (of the whole run) and warmup_tokens (with max_tokens).
    weight_decay is on matrices alone unless decay_all. frozen: patterns (fnmatch) of the names of parameters that are
    not trained. learning_rates: instead of learning_rate, of parameters by patterns of their names, on the same
    schedule. max_skipped_steps: steps without an update, because a gradient was not finite, that a run may have.
    z_loss: weight of the mean squared log of the softmax's sum. seed: of what a model draws, as for dropout.
    save_steps: steps between checkpoints, 0 for one at the end only. save_total_limit: how many of the latest stay.
    async_save: written while training goes on.
    checkpoint_dir: a folder that all nodes see, or a URL (default: checkpoints/ in the output_dir). resume: "auto" goes
    on from the latest checkpoint there that is whole; "never" refuses to start where there are any; or the path or URL
    of one, to start from it each time. export: write a transformers folder at the end, export/ in the output_dir.
    eval_steps: steps between evaluations, 0 for one at the end only; they need an eval_dataset. log_sample_ids: write
    the sample ids of each global batch to the log, of every step, to compare runs. logging_steps: steps of a record,
    see Meter. report_to: where records go besides train_log.jsonl. peak_tflops: of a device, for MFU where its name is
    not known (see flops.py). profile: steps to trace. timeout_s: of every collective, and of every wait for data or
    for a checkpoint.
    """

    output_dir: str
    global_batch: int
    per_device_batch: int = 1
    replication: int = 1
    shard_ranks: int | None = None
    wrap: list[str] = field(default_factory=list)
    weights: dict[int, dict[str, float]] | dict[str, float] | None = None
    max_epochs: dict[str, int] | None = None
    skip_steps: list[tuple[int, int]] = field(default_factory=list)
    max_steps: int | None = None
    num_train_epochs: int | None = None
    max_tokens: int | None = None
    learning_rate: float = 2e-5
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    warmup_tokens: int = 0
    decay_ratio: float = 0.1
    weight_decay: float = 0.0
    decay_all: bool = False
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    max_skipped_steps: int = 10
    z_loss: float = 0.0
    bf16: bool = False
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    frozen: list[str] = field(default_factory=list)
    learning_rates: dict[str, float] | None = None
    seed: int = 0
    save_steps: int = 0
    save_total_limit: int | None = None
    async_save: bool = True
    checkpoint_dir: str | None = None
    resume: str = "auto"
    export: bool = False
    eval_steps: int = 0
    num_workers: int = 1
    pad_to: int | None = None
    timeout_s: float = 600.0
    logging_steps: int = 1
    report_to: list[Reporter] = field(default_factory=list)
    peak_tflops: float | None = None
    profile: ProfileConfig | None = None
    log_sample_ids: bool = False
    logging_strategy: Literal["no", "steps", "epoch"] = "steps"  # when records are written; by logging_steps
    logging_first_step: bool = False  # a record of the first step, whatever logging_steps is
    eval_strategy: Literal["no", "steps", "epoch"] = "steps"  # when the eval_dataset is evaluated; by eval_steps
    eval_on_start: bool = False  # an evaluation before the first step
    eval_delay: float = 0  # no evaluation before as many steps, or epochs with eval_strategy epoch
    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"  # when checkpoints are saved; by save_steps
    load_best_model_at_end: bool = False  # end with the model of the best evaluation, whose checkpoint is kept
    metric_for_best_model: str | None = None  # the figure of an evaluation that tells which is best (default: loss)
    greater_is_better: bool | None = None  # of that figure (default: unless its name ends in loss)

    @property
    def tracks_best(self) -> bool:
        """Whether the best evaluation is asked for."""
        wanted = self.load_best_model_at_end or self.save_strategy == "best"
        return wanted or self.metric_for_best_model is not None

    def __post_init__(self) -> None:
        lengths = [name for name in ("max_steps", "num_train_epochs", "max_tokens") if getattr(self, name) is not None]
        if len(lengths) != 1:
            given = f", got {' and '.join(lengths)}" if lengths else ""
            raise ConfigError(f"train needs exactly one of max_steps, num_train_epochs and max_tokens{given}")
        if self.weights is not None and self.num_train_epochs is not None:
            raise ConfigError("with train.weights each dataset has epochs of its own: set train.max_steps")
        for first, stop in self.skip_steps:
            if not 0 <= first < stop:
                raise ConfigError(f"train.skip_steps must be ranges [first, stop), got [{first}, {stop}]")
        for name in _AT_LEAST_1:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"train.{name} must be at least 1, got {value}")
        for name in _AT_LEAST_0:
            if not getattr(self, name) >= 0:  # NaN is refused too
                raise ConfigError(f"train.{name} must be 0 or more, got {getattr(self, name)}")
        for name in _ABOVE_0:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"train.{name} must be above 0, got {value}")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"train.{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for pattern, rate in (self.learning_rates or {}).items():
            if not rate >= 0:
                raise ConfigError(f"train.learning_rates {pattern!r} must be 0 or more, got {rate}")
        self._check_schedule()
        self._check_best()

    def _check_best(self) -> None:
        if not (self.load_best_model_at_end or self.save_strategy == "best"):
            return
        asked = "load_best_model_at_end" if self.load_best_model_at_end else "save_strategy best"
        for name in ("eval_strategy", "save_strategy"):
            if getattr(self, name) == "no":
                raise ConfigError(f"train.{asked} needs checkpoints of evaluations, and train.{name} is no: set steps")

    def _check_schedule(self) -> None:
        warmups = [name for name in ("warmup_steps", "warmup_ratio", "warmup_tokens") if getattr(self, name)]
        if len(warmups) > 1:
            raise ConfigError(f"train has {' and '.join(warmups)}: warm up by one of them")
        if self.max_tokens is None and self.warmup_tokens:
            raise ConfigError("train.warmup_tokens needs train.max_tokens: warm up by steps or by a ratio")
        if self.max_tokens is not None and self.warmup_steps:
            raise ConfigError("train.max_tokens counts tokens: warm up by train.warmup_tokens or train.warmup_ratio")
        for name in ("warmup_ratio", "decay_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"train.{name} must be a share of the run, 0 to 1, got {getattr(self, name)}")
