"""Settings of training, checked: the section `train` of a run's YAML file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from ...checks import check_fields, check_limits, is_number, local_path, plain_path, whole_number
from ...config import OldKey, Settings, moved, old_keys, opened_section, put
from ...errors import ConfigError
from ...loader.drop_list import drop_lists, first_steps
from ...mds.core import HasCore, OpensLoader, PackedDataset
from ...mds.dataset_config import check_names

Packed = PackedDataset | HasCore | OpensLoader
Datasets = Packed | Mapping[str, Packed]
Reporter = Literal["tensorboard", "wandb", "prometheus", "otlp"]
# Interval: a number of steps, the end of each epoch, or never (False: a bare no of YAML).
When = int | Literal["no", "epoch", False]
_AT_LEAST_1 = (
    "global_batch", "per_device_batch", "tensor_parallel", "sequence_parallel", "expert_parallel",
    "shard_ranks", "max_steps", "num_train_epochs", "max_tokens",
    "save_total_limit", "pad_to",
)  # fmt: skip
_AT_LEAST_0 = (
    "num_workers", "warmup", "max_skipped_steps", "z_loss", "seed",
    "learning_rate", "weight_decay", "eval_delay", "max_grad_norm",
)  # fmt: skip
_LONGEST_PER_WARMUP = 10_000  # maximum length of a run with max_tokens, as a multiple of its warm-up
_ABOVE_0 = ("save_minutes", "peak_tflops")
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of AdamW, if optim_args has none
DECAY_RATIO = 0.1  # share of a run in which wsd decays, if lr_scheduler_kwargs has none


def _action(section: Settings, action: str) -> None:
    if action not in ("error", "quarantine"):
        raise ConfigError(f"action must be error or quarantine, got {action!r}: write quarantine, a number of samples")
    section["quarantine"] = 0 if action == "error" else section.get("quarantine") or _MOST_QUARANTINED


def _most(section: Settings, most: int) -> None:
    if section.get("quarantine"):
        section["quarantine"] = most


_MOST_QUARANTINED = 100  # for the old key `action` without `max`
_OF_BAD_SAMPLES = {
    "drop": OldKey("drop: {FILE: STEP}", moved("drop", first_steps).move, lambda value: isinstance(value, list)),
    "action": OldKey("quarantine: 0 for error, or a number of samples", _action),
    "max": OldKey("quarantine", _most),
}


@old_keys(_OF_BAD_SAMPLES)
@dataclass(frozen=True, kw_only=True, slots=True)
class BadSamplesConfig:
    """Samples to leave out of a run."""

    # maximum number of samples that cannot be processed, over all ranks and the whole run; each becomes padding without
    # loss, is listed in left_out/ of the output_dir, and is never tried again (docs/left_out.md). 0: the first bad
    # sample ends the run with its name
    quarantine: int = 0
    timeout_s: float | None = None  # maximum seconds per sample in a worker; a slower one ends the run with its name
    # samples to replace by padding: a file of SOURCE:ID or FILE:ROW, or several files, each with its first step
    drop: str | dict[str, int] | None = None

    def __post_init__(self) -> None:
        check_fields(self, prefix="train.bad_samples.")
        check_limits(self, "train.bad_samples.", at_least_0=("quarantine",), seconds=("timeout_s",))
        drop_lists(self.drop)

    @property
    def leaves_out(self) -> bool:
        """Return whether samples may be left out."""
        return self.quarantine > 0 or self.drop is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpConfig:
    """Sharding by FSDP2: units, gathering of blocks, sums of gradients."""

    # classes of the blocks to shard one by one (default: named by the model)
    wrap: list[str] = field(default_factory=list)
    # when ranks sum the gradients of a step's micro-batches; "sharded": after each micro-batch; "unsharded": once,
    # after the last, which takes the memory of the whole model in float32; "auto": unsharded on GPUs with four times
    # this memory free (docs/speed.md)
    accumulate: Literal["auto", "sharded", "unsharded"] = "auto"
    # true: gather blocks again for the backward pass; false: keep blocks gathered until the backward pass, and from a
    # micro-batch to the next, which takes the memory of the whole model; "auto": false on GPUs with four times this
    # memory free
    reshard_after_forward: bool | Literal["auto"] = "auto"
    prefetch_blocks: int = 0  # blocks to gather ahead of the running block (0: torch's order)

    def __post_init__(self) -> None:
        check_fields(self, prefix="train.fsdp.")
        check_limits(self, "train.fsdp.", at_least_0=("prefetch_blocks",))


@dataclass(frozen=True, kw_only=True, slots=True)
class BestConfig:
    """Choice of the best evaluation, and use of the checkpoint."""

    metric: str | None = None  # metric of the evaluations to compare (default: loss)
    mode: Literal["min", "max"] | None = None  # whether a lower or higher metric is better (default: min for losses)
    load: bool = False  # keep the checkpoint of the best evaluation, and load its model at the end

    def __post_init__(self) -> None:
        check_fields(self, prefix="train.best.")


_WINDOW = OldKey("nothing: a loss is compared with 100 records", lambda settings, value: None)


@old_keys({"window": _WINDOW})
@dataclass(frozen=True, kw_only=True, slots=True)
class AlertsConfig:
    """Warnings of the log."""

    # deviations above the median of the last 100 records from which a loss is a spike; the log names the packs and
    # samples of a spike; 0: no warning (see Spikes for the deviation)
    spike: float = 6.0
    wait_share: float = 0.5  # share of the records' time spent waiting for data from which the log warns

    def __post_init__(self) -> None:
        check_fields(self, prefix="train.alerts.")
        check_limits(self, "train.alerts.", at_least_0=("spike", "wait_share"))


def _warmup_steps(settings: Settings, steps: int) -> None:
    if steps and settings.get("max_tokens") is not None:
        raise ConfigError("max_tokens counts tokens: set warmup in tokens or as a share of the run")
    if steps:
        put(settings, "warmup", steps)


def _warmup_tokens(settings: Settings, tokens: int) -> None:
    if tokens and settings.get("max_tokens") is None:
        raise ConfigError("warmup_tokens needs max_tokens: set it, or set warmup in steps or as a share of the run")
    if tokens:
        put(settings, "warmup", tokens)


def _warmup_ratio(settings: Settings, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ConfigError(f"warmup_ratio must be a share of the run, 0 to 1, got {ratio}")
    if ratio:
        put(settings, "warmup", share_of_run(ratio))


def share_of_run(ratio: float) -> float:
    """Return a share for warmup; for the whole run, the largest number below 1."""
    return min(ratio, math.nextafter(1.0, 0.0))


def _learning_rates(settings: Settings, rates: Mapping[str, float] | None) -> None:
    for pattern, rate in (rates or {}).items():
        groups = settings["groups"] = dict(settings.get("groups") or {})
        if pattern in groups:
            raise ConfigError(f"groups and learning_rates both have {pattern!r}: write it in groups")
        groups[pattern] = {"lr": rate}


def _decay_all(settings: Settings, decays: bool) -> None:
    """Give each group the weight_decay of matrices: vectors decay only by a group."""
    if decays and (rate := _number(settings.get("weight_decay") or 0)):
        groups = {"*": {}, **(settings.get("groups") or {})}
        settings["groups"] = {pattern: {"weight_decay": rate, **values} for pattern, values in groups.items()}


def _replication(settings: Settings, ranks: int | None) -> None:
    own = (settings.get("tensor_parallel") or 1) * (settings.get("sequence_parallel") or 1)
    if ranks not in (None, 1, own):
        raise ConfigError(
            f"replication {ranks} has no effect alone: ranks read the same packs if they share tokens or matrices, "
            f"here {own} ranks. Leave it out, or set tensor_parallel or sequence_parallel"
        )


def _beta(index: int) -> Callable[[Settings, Any], None]:
    """Return a function to move the first or second beta of AdamW into optim_args."""

    def move(settings: Settings, beta: Any) -> None:
        beta, arguments = _number(beta), dict(settings.get("optim_args") or {})
        if beta == BETAS[index]:
            return
        betas = [*arguments.get("betas", BETAS)]
        if betas[index] not in (BETAS[index], beta):
            raise ConfigError(f"optim_args.betas is {betas}, and an old key of it {beta!r}: leave the old key out")
        betas[index] = beta
        settings["optim_args"] = arguments | {"betas": betas}

    return move


def _strategy(key: str) -> OldKey:
    """Return the old key of a transformers strategy. "steps" keeps the number of steps; "no" and "epoch" replace it."""

    def move(settings: Settings, strategy: Any) -> None:
        strategy, found = "no" if strategy is False else strategy, settings.get(key)
        if isinstance(found, str) and found != strategy:
            raise ConfigError(f"{key} is {found!r}, and an old key of it {strategy!r}: leave the old key out")
        if strategy != "steps":
            settings[key] = strategy

    return OldKey(f"{key}: no, epoch or a number of steps", move)


def _number(value: Any) -> Any:
    """Return the number in a text, allowed in old keys; other values unchanged."""
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def _in_bad_samples(move: Callable[[Settings, Any], None]) -> Callable[[Settings, Any], None]:
    """Move an old key into the section bad_samples."""

    return lambda settings, value: move(opened_section(settings, "bad_samples"), value)


def _profile(settings: Settings, section: Any) -> None:
    if isinstance(section, Mapping):
        check_names(section, ("first", "stop", "folder"), "profile")
        folder = [section["folder"]] if section.get("folder") is not None else []
        section = [section.get("first"), section.get("stop"), *folder]
    if section is not None:
        put(settings, "profile_steps", section)


OLD_KEYS = {
    "profile": OldKey("profile_steps: [first, stop], or [first, stop, folder]", _profile),
    **{f"{name}_strategy": _strategy(f"{name}_steps") for name in ("save", "eval", "logging")},
    "adam_beta1": OldKey("optim_args.betas, a list of both", _beta(0)),
    "adam_beta2": OldKey("optim_args.betas, a list of both", _beta(1)),
    "adam_epsilon": moved("optim_args.eps", _number, default=EPSILON),
    "decay_ratio": moved("lr_scheduler_kwargs.decay_ratio", _number, default=DECAY_RATIO),
    "min_learning_rate": moved("lr_scheduler_kwargs.min_lr", _number, default=0),
    "warmup_steps": OldKey("warmup", _warmup_steps),
    "warmup_tokens": OldKey("warmup", _warmup_tokens),
    "warmup_ratio": OldKey("warmup, below 1", _warmup_ratio),
    "learning_rates": OldKey("groups: {PATTERN: {lr: RATE}}", _learning_rates),
    "decay_all": OldKey("groups: {'*': {weight_decay: RATE}}", _decay_all),
    "replication": OldKey("nothing: it follows from tensor_parallel and sequence_parallel", _replication),
    "on_bad_sample": OldKey("bad_samples.quarantine, 0 for error", _in_bad_samples(_action)),
    "max_bad_samples": OldKey("bad_samples.quarantine", _in_bad_samples(_most)),
    "sample_timeout_s": moved("bad_samples.timeout_s"),
    "drop": moved("bad_samples.drop", first_steps),
    **{name: moved(f"fsdp.{name}") for name in ("wrap", "accumulate", "reshard_after_forward", "prefetch_blocks")},
    "load_best_model_at_end": moved("best.load"),
    "metric_for_best_model": moved("best.metric"),
    "greater_is_better": moved("best.mode", lambda is_greater: {True: "max", False: "min"}.get(is_greater)),
    **{f"alert_{name}": moved(f"alerts.{name}") for name in ("spike", "wait_share")},
    "alert_window": _WINDOW,
}


@old_keys(OLD_KEYS)
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of training, each explained next to the field.

    Exactly one of max_steps, num_train_epochs and max_tokens sets the end of the run. Patterns are fnmatch patterns of
    parameters' names. ConfigError for invalid values.
    """

    output_dir: str  # folder for the log, checkpoints and exports

    # Packs of a step
    global_batch: int  # packs per optimizer step, over all ranks
    per_device_batch: int = 1  # packs per forward pass of a rank; gradients accumulate up to global_batch
    pad_to: int | None = None  # tokens to pad the packs of a forward pass to (default: no padding)
    num_workers: int = 1  # loader workers per rank
    # shares of the tokens by dataset, or a schedule of shares by first step, for several datasets (see Mixture)
    weights: dict[int, dict[str, float]] | dict[str, float] | None = None
    max_epochs: dict[str, int] | None = None  # maximum epochs of each of several datasets
    mixing: Literal["packs", "samples"] = "packs"  # samples: a pack holds samples of all datasets, of equal settings
    # deal: no sorting; window: packs of similar work share a step, in windows of 64 to 256 steps, or of so many;
    # across_sources: window for the packs of all datasets together
    balance: str | int = "deal"
    # steps [first, stop) whose packs are skipped, around a spike of the loss
    skip_steps: list[tuple[int, int]] = field(default_factory=list)

    bad_samples: BadSamplesConfig = field(default_factory=BadSamplesConfig)  # samples to leave out

    # End of the run
    max_steps: int | None = None  # optimizer steps in all, with the steps before a resume
    num_train_epochs: int | None = None  # number of epochs; their steps are exact, from the plan
    max_tokens: int | None = None  # tokens of samples, without padding

    # Optimizer
    optim: str = "adamw"  # fused AdamW, or another name of optimizers.py; many are names of transformers' `optim`
    # other arguments of the optimizer, by torch's names: betas and eps of AdamW, momentum of sgd
    optim_args: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 2e-5  # highest learning rate, after the warm-up
    weight_decay: float = 0.0  # weight decay of matrices only
    # pattern -> values for its parameters: lr (on the same schedule), weight_decay (of vectors, such as biases and
    # norms, too), …; "*": parameters without another pattern
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)  # patterns of parameters that are not trained
    max_grad_norm: float = 1.0  # maximum norm to clip gradients to; 0: no clipping
    max_skipped_steps: int = 10  # maximum steps without an update because a gradient was not finite
    # share that a moving average of the weights, in float32, keeps of itself per step (default: no average)
    ema_decay: float | None = None
    z_loss: float = 0.0  # weight of the mean squared log of the softmax's sum

    # Schedule
    # "cosine", "linear", "constant", "wsd" (warm-up, constant, decay over the last decay_ratio), or another name of
    # transformers' SchedulerType
    lr_scheduler_type: str = "cosine"
    # other arguments of the schedule, such as num_cycles; min_lr: learning rate at the end of "cosine", "linear" and
    # "wsd" (groups keep its share of learning_rate); decay_ratio: share of the run in which "wsd" decays (0.1)
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    # length of the warm-up from a learning rate of 0 ("wsd": from min_lr): steps, or tokens with max_tokens; below 1:
    # a share of the run
    warmup: float = 0

    # The model on the ranks
    tensor_parallel: int = 1  # consecutive ranks, best of one node, with parts of each matrix; they read one pack
    sequence_parallel: int = 1  # ranks with parts of the tokens of a pack
    expert_parallel: int = 1  # consecutive ranks with some of the experts each; they read different packs
    # consecutive ranks that share a copy of the model; a tensor parallel group counts as one rank (default: all ranks;
    # fewer: HSDP)
    shard_ranks: int | None = None
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)  # sharding, gathering and sums of gradients
    bf16: bool | None = None  # compute in bfloat16, whatever the parameters are (default: on GPUs with bfloat16)
    # multiply float32 numbers in TF32, on GPUs with TF32 (default: yes with bf16, otherwise torch's setting)
    tf32: bool | None = None
    gradient_checkpointing: bool = False  # run blocks again in the backward pass, to keep less in memory
    torch_compile: bool = False  # compile each block
    seed: int = 0  # seed of the model's random numbers, such as dropout
    # kernels with equal results in each run, for a resume equal to the bit on GPUs, too; slower; an operation without
    # such a kernel ends the run with its name
    deterministic: bool = False

    # Checkpoints
    # steps between checkpoints, 0: only at the end; "epoch": at the end of each epoch; "best": after each evaluation
    # that is the best up to then; "no": none, unless a signal stops the run
    save_steps: When | Literal["best"] = 0
    save_minutes: float | None = None  # minutes between checkpoints, in addition, by the clock of rank 0
    save_total_limit: int | None = None  # latest checkpoints to keep, the best evaluation's among them; default: all
    async_save: bool = True  # write checkpoints during the next steps
    checkpoint_dir: str | None = None  # a folder that all nodes see, or a URL (default: checkpoints/ in the output_dir)
    # "auto": resume from the latest complete checkpoint; "never": refuse to start if there are checkpoints; or the path
    # or URL of a checkpoint to start from
    resume: str = "auto"
    # for a checkpoint of another optimizer: "error", or "reset": begin this optimizer without state
    on_other_optimizer: Literal["error", "reset"] = "error"
    # write a transformers folder at the end: export/ in the output_dir; export-ema/ for the average
    export: bool = False

    # Evaluations and records
    # steps between evaluations of the eval_dataset, 0: only at the end; "epoch": at the end of each epoch; "no": only
    # by calls of evaluate()
    eval_steps: When = 0
    eval_on_start: bool = False  # evaluate before the first step
    eval_delay: float = 0  # steps before the first evaluation; epochs with eval_steps epoch
    best: BestConfig = field(default_factory=BestConfig)  # choice of the best evaluation
    # steps per record, see Meter; "epoch": a record at the end of each epoch; "no": no records
    logging_steps: When = 1
    logging_first_step: bool = False  # write a record of the first step, whatever logging_steps is
    report_to: list[Reporter] = field(default_factory=list)  # more targets of records, and of figures of each rank
    log_sample_ids: bool = False  # log the sample ids of each step's global batch, to compare runs
    alerts: AlertsConfig = field(default_factory=AlertsConfig)  # warnings of the log
    peak_tflops: float | None = None  # peak TFLOP/s of a device, for MFU on devices outside the table (flops.py)
    # steps [first, stop) from this start that torch's profiler traces into profile/ of the output_dir; with
    # [first, stop, folder] into this folder
    profile_steps: tuple[int, int] | tuple[int, int, str] | None = None
    timeout_s: float = 600.0  # limit of each collective, and of each wait for data or a checkpoint

    @property
    def group_ranks(self) -> int:
        """Number of consecutive ranks with the same packs, and parts of the tokens or of each matrix."""
        return self.sequence_parallel * self.tensor_parallel

    @property
    def tracks_best(self) -> bool:
        """Whether the best evaluation is needed."""
        return self.best.load or self.save_steps == "best" or self.best.metric is not None

    def __post_init__(self) -> None:
        check_fields(self, prefix="train.", paths=("checkpoint_dir", "resume", "output_dir"))
        object.__setattr__(self, "output_dir", str(local_path("train.output_dir", self.output_dir)))
        self._check_steps()
        lengths = [name for name in ("max_steps", "num_train_epochs", "max_tokens") if getattr(self, name) is not None]
        if len(lengths) != 1:
            given = f", got {' and '.join(lengths)}" if lengths else ""
            raise ConfigError(f"train needs exactly one of max_steps, num_train_epochs and max_tokens{given}")
        if self.mixing == "packs" and self.weights is not None and self.num_train_epochs is not None:
            raise ConfigError("with train.weights each dataset has epochs of its own: set train.max_steps")
        for first, stop in self.skip_steps:
            if not 0 <= first < stop:
                raise ConfigError(f"train.skip_steps must be ranges [first, stop), got [{first}, {stop}]")
        check_limits(
            self, "train.", at_least_1=_AT_LEAST_1, at_least_0=_AT_LEAST_0, above_0=_ABOVE_0, seconds=("timeout_s",)
        )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"train.ema_decay must be above 0 and below 1, got {self.ema_decay}: 0.999 is usual")
        self._check_degrees()
        self._check_optimizer()
        self._check_schedule()
        self._check_best()

    def _check_degrees(self) -> None:
        if self.tensor_parallel > 1 and self.torch_compile:
            raise ConfigError(
                f"train.tensor_parallel {self.tensor_parallel} and torch_compile cannot be combined yet: compiled "
                "blocks would not send what ranks make: leave one out"
            )
        if self.expert_parallel > 1 and self.tensor_parallel > 1:
            raise ConfigError(
                f"train.expert_parallel {self.expert_parallel} and tensor_parallel {self.tensor_parallel} cannot be "
                "combined: ranks of a tensor parallel group read the same packs, and ranks with different experts "
                "read different packs. Set one of them to 1"
            )
        if self.expert_parallel > 1 and self.torch_compile:
            raise ConfigError(
                f"train.expert_parallel {self.expert_parallel} and torch_compile cannot be combined yet: a graph "
                "cannot hold the choice of experts. Leave one out"
            )

    def _check_steps(self) -> None:
        words: dict[str, tuple[str, ...]] = {
            "save_steps": ("no", "epoch", "best"), "eval_steps": ("no", "epoch"), "logging_steps": ("no", "epoch"),
        }  # fmt: skip
        for name, known in words.items():
            value = getattr(self, name)
            if isinstance(value, str) and value not in known:
                raise ConfigError(f"train.{name} must be a number of steps, {' or '.join(known)}, got {value!r}")
            if value is False:
                object.__setattr__(self, name, "no")
            elif not isinstance(value, str):
                least = 1 if name == "logging_steps" else 0
                object.__setattr__(self, name, whole_number(f"train.{name}", value, least=least))
        if self.profile_steps is None:
            return
        first, stop, *folder = self.profile_steps
        if not (isinstance(first, int) and isinstance(stop, int) and 0 <= first < stop):
            raise ConfigError(f"train.profile_steps must be a range [first, stop), got [{first}, {stop}]")
        paths = [plain_path("train.profile_steps", each) for each in folder]
        object.__setattr__(self, "profile_steps", (first, stop, *paths))

    def _check_best(self) -> None:
        if self.export and self.save_steps == "no":
            raise ConfigError(
                "train.export needs a checkpoint, and train.save_steps is no: set save_steps to 0 or more"
            )
        if self.save_minutes is not None and self.save_steps == "no":
            raise ConfigError(
                f"train.save_minutes is {self.save_minutes:g}, and train.save_steps no saves nothing: set it to 0 or "
                "more"
            )
        if not (self.best.load or self.save_steps == "best"):
            return
        asked = "best.load" if self.best.load else "save_steps best"
        for name in ("eval_steps", "save_steps"):
            if getattr(self, name) == "no":
                raise ConfigError(
                    f"train.{asked} needs checkpoints of evaluations, and train.{name} is no: set it to 0 or more"
                )

    def _check_optimizer(self) -> None:
        of_groups = {f"train.groups {pattern!r} ": values for pattern, values in self.groups.items()}
        for prefix, values in {"train.optim_args.": self.optim_args, **of_groups}.items():
            betas = values.get("betas", BETAS)
            if not isinstance(betas, list | tuple) or len(betas) != len(BETAS) or not all(map(is_number, betas)):
                raise ConfigError(f"{prefix}betas must be two numbers, such as [0.9, 0.95], got {betas!r}")
            for beta in betas:
                if not 0 <= beta < 1:
                    raise ConfigError(f"{prefix}betas must be at least 0 and below 1, got {beta}")
            for name in ("lr", "weight_decay", "eps"):
                if name in values and not (is_number(values[name]) and 0 <= values[name] < math.inf):
                    raise ConfigError(f"{prefix}{name} must be a number, 0 or more, got {values[name]!r}")

    def _check_schedule(self) -> None:
        if self.warmup > 1 and self.warmup != round(self.warmup):
            raise ConfigError(f"train.warmup must be a whole number, or a share below 1, got {self.warmup}")
        if self.max_tokens is not None and 1 <= self.warmup < self.max_tokens / _LONGEST_PER_WARMUP:
            raise ConfigError(
                f"train.warmup counts tokens in a run with max_tokens, and {self.warmup:,.0f} of {self.max_tokens:,} "
                "is a tiny part: set more tokens, or a share of the run, such as 0.01"
            )
        ratio, lowest = self.lr_scheduler_kwargs.get("decay_ratio"), self.lr_scheduler_kwargs.get("min_lr")
        if ratio is not None and not (is_number(ratio) and 0 <= ratio <= 1):
            raise ConfigError(
                f"train.lr_scheduler_kwargs.decay_ratio must be a share of the run, 0 to 1, got {ratio!r}"
            )
        if ratio is not None and self.lr_scheduler_type not in ("wsd", "warmup_stable_decay"):
            raise ConfigError(
                f"train.lr_scheduler_kwargs.decay_ratio needs lr_scheduler_type wsd, got {self.lr_scheduler_type}: "
                "leave it out, or choose wsd"
            )
        if lowest is not None and not (is_number(lowest) and lowest >= 0):
            raise ConfigError(f"train.lr_scheduler_kwargs.min_lr must be a number, 0 or more, got {lowest!r}")
        if lowest is not None and lowest > self.learning_rate:
            raise ConfigError(
                f"train.lr_scheduler_kwargs.min_lr {lowest:g} is above learning_rate {self.learning_rate:g}: lower it"
            )
