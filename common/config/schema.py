"""A configuration: YAML files merged in a fixed order, checked to the last key, frozen.

The order is `extends` (baseline) <- the named file <- the size's file <- `mini` of these files <- `--set`.
Mappings merge, everything else replaces. In a size's file an entry below `methods` adjusts a method that is
switched on and is ignored otherwise, so one file serves every configuration of that size. A configuration's
own values for size mini stand in its file, in the section `mini`. A file outside the benchmark's folder is
named by its path and has no `mini`; what it states is laid over all of these, as `--set` is.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from common.config.division import Rule
from common.config.validation import DURATION, validate
from common.errors import UserError
from common.evidence.recipes import count_steps, evaluation_steps
from common.repository import data_option, locate_data, name_data

Fraction = Annotated[float, Field(ge=0, le=1)]
Duration = Annotated[str, Field(pattern=DURATION)]
ValueT = TypeVar("ValueT")
LAMB = ("lamb", "fused_lamb")
TRUST_RATIO = ("lars", *LAMB)  # optimizers with a trust ratio for each parameter


def check_count(value: Any) -> Any:
    """Refuse, in one message, what is neither a positive whole number nor `auto`."""
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError("should be a positive whole number or auto")
    return value


CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(check_count)]


class Strict(BaseModel):
    """A checked mapping: no unknown key, no silent conversion, no change after loading."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_default=True
    )


def check_effect(
    kind: type[BaseModel], value: ValueT, info: ValidationInfo, names: tuple[str, ...]
) -> ValueT:
    """Refuse a value other than the default where only other optimizers or schedules, `names`, read it."""
    key = str(info.field_name)
    if value != kind.model_fields[key].default and info.data.get("name") not in names:
        raise ValueError(f"{key} is read by {' and '.join(names)} alone; remove it, or change name")
    return value


class OptimizerConfig(Strict):
    """`learning_rate` is the peak; the optimizers are in common/training/optim.py.

    `decoupled_sgd` takes `weight_decay` per step at the peak. `lars`, `lamb` and `fused_lamb` (NVIDIA's Apex)
    give biases and parameters of norms neither weight decay nor a trust ratio.
    """

    name: Literal["sgd", "decoupled_sgd", "adamw", "lars", "lamb", "fused_lamb"]
    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)  # beta1 of adamw, lamb and fused_lamb
    nesterov: bool = False  # of sgd, decoupled_sgd and lars
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, ge=0)  # lars alone may have 0
    trust_coefficient: float = Field(default=0.001, gt=0)  # of lars
    max_gradient_norm: float | None = Field(default=1.0, gt=0)  # of lamb, fused_lamb; null: any

    @field_validator("nesterov", "weight_decay", "epsilon")
    @classmethod
    def check_for_name(cls, value: float, info: ValidationInfo) -> float:
        key, name = info.field_name, info.data.get("name")
        has_momentum = name in ("sgd", "decoupled_sgd", "lars") and info.data.get("momentum")
        if key == "nesterov" and value and not has_momentum:
            raise ValueError("nesterov needs sgd, decoupled_sgd or lars with a momentum")
        if key == "weight_decay" and not value and name in TRUST_RATIO:
            raise ValueError(f"{name} takes no trust ratio where weight_decay is 0; set it above 0")
        if key == "epsilon" and not value and name != "lars":
            raise ValueError("only lars takes an epsilon of 0")
        return value

    @field_validator("trust_coefficient", "max_gradient_norm")
    @classmethod
    def check_reader(cls, value: float | None, info: ValidationInfo) -> float | None:
        names = ("lars",) if info.field_name == "trust_coefficient" else LAMB
        return check_effect(cls, value, info, names)


class ScheduleConfig(Strict):
    """Linear warm-up from 0, then a decay to 0 at the end of `max_duration`, or by `factor` at milestones.

    `polynomial` falls as (1 - progress) ** power to `end_learning_rate`, which it reaches after `decay` and
    keeps. MLPerf's LARS counts `decay` from the end of the warm-up, its LAMB from the first step.
    """

    name: Literal["cosine", "linear", "step", "polynomial"]
    warmup: Duration
    milestones: list[Duration] = []
    factor: float = Field(default=1.0, gt=0, le=1)
    power: float = Field(default=1.0, gt=0)  # this and the next three: of polynomial
    end_learning_rate: float = Field(default=0.0, ge=0)
    decay: Duration | None = None  # null: the rest of max_duration
    decay_from: Literal["warmup", "start"] = "warmup"  # start: the rate drops where the warm-up ends

    @field_validator("power", "end_learning_rate", "decay", "decay_from")
    @classmethod
    def check_reader(cls, value: float | str | None, info: ValidationInfo) -> float | str | None:
        return check_effect(cls, value, info, ("polynomial",))


class DataConfig(Strict):
    """Settings of every data set; sample counts are constants, so that no run reads data to learn them."""

    directory: str
    num_train_samples: int = Field(gt=0)
    num_evaluation_samples: int = Field(gt=0)


class SubmissionConfig(Strict):
    """The submitter in the log; `hardware` names the machine in results, auto: after its processors.

    A run of the `closed` division is refused where it breaks a rule of it, see division.py.
    """

    division: Literal["open", "closed"] = "open"
    org: str = Field(min_length=1)
    status: Literal["onprem", "cloud", "preview", "research"]
    hardware: str = Field(pattern=r"^[A-Za-z0-9._-]{1,40}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run in steps: their number, the steps after which it is evaluated, the length of the warm-up.

    `num_epochs` are those of the recipe; a smaller budget passes them in fewer steps.
    """

    num_steps: int
    steps_per_epoch: int  # of the data
    num_epochs: int
    warmup_steps: int
    decay_steps: int  # until the rate is constant; they count from ScheduleConfig.decay_from
    evaluation_steps: tuple[int, ...]
    milestones: tuple[int, ...] = ()  # where the learning rate steps down
    budget: float = 1.0

    def epoch(self, step: int) -> int:
        """Return the epoch of the recipe, from 0, that a step counted from 0 belongs to."""
        return int(round(step / self.budget, 6)) // self.steps_per_epoch  # 7 / 0.07 is just below 100


class RunConfig(Strict):
    """The settings of the loop; a benchmark extends them with its own `model` and `data` keys."""

    benchmark: str
    configuration: str
    size: Literal["full", "mini"]
    target: float = Field(gt=0, lt=1)
    stop_at_target: bool = True  # false: a study trains to the end of max_duration, and no score counts it
    max_duration: Duration
    budget: float = Field(default=1.0, gt=0, le=10)  # share of max_duration, and of all in its schedule
    evaluate_every: Duration
    evaluate_from: Duration = "0sp"
    evaluate_offset: Duration = "0sp"  # 3ep with evaluate_every 4ep: after epochs 3, 7, 11, ...
    checkpoint_every: Duration | None = None  # while the clock runs; null: never
    evaluate_untrained: bool = False  # before the first step, too: shows that starting weights were read
    global_batch_size: int = Field(gt=0)  # of all ranks together, however many there are
    # Samples at a time on a rank, at most; null: all; auto: as many as fit into memory by `training_bytes`.
    micro_batch_size: CountOrAuto | None = None
    gradient_compression: Literal["none", "bf16"] = "none"  # of the all-reduce between ranks
    evaluated_statistics: Literal["mean", "rank_0"] = "mean"  # of batch norm: of all ranks, or rank 0's
    evaluation_batch_size: int = Field(gt=0)
    # In files also auto: bf16 on a GPU or a processor with instructions for it, else fp32.
    precision: Literal["fp32", "bf16", "fp16"]
    evaluation_precision: Literal["fp32", "bf16", "fp16"]
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    submission: SubmissionConfig
    methods: dict[str, dict[str, Any]] = {}
    closed_rules: ClassVar[tuple[Rule, ...]] = ()  # of the closed division, for this benchmark

    def steps(self, duration: str) -> int:
        """Return a duration such as `90ep`, `55ba` or `24640sp` in steps of the whole budget, rounded up."""
        return count_steps(duration, self.global_batch_size, self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches per epoch; the incomplete last one is dropped."""
        return int(self.data.num_train_samples // self.global_batch_size)  # type: ignore[attr-defined]

    @property
    def num_epochs(self) -> int:
        """Epochs of the recipe, the last of which may not be whole."""
        return math.ceil(self.steps(self.max_duration) / self.steps_per_epoch)

    def prepared_with(self) -> dict[str, Any]:
        """Return the settings that shape the prepared data, by key; its manifest records them."""
        names = ("num_train_samples", "num_evaluation_samples")
        return {f"data.{name}": getattr(self.data, name) for name in names}  # type: ignore[attr-defined]

    def prepared_files(self) -> set[str]:
        """Return the names of files that the prepared data must contain."""
        return set()

    def check_origins(self, origins: Mapping[tuple[str, ...], str]) -> None:
        """Raise UserError for a key that a person set without effect; `origins` are the keys' places."""

    def training_bytes(self, num_samples: int) -> int:
        """Return the most bytes that training takes with `num_samples` at a time, for `auto`.

        Raises UserError for a benchmark without such an estimate.
        """
        hint = "--set micro_batch_size=N"
        raise UserError("auto: not known for this benchmark", where="micro_batch_size", hint=hint)

    @property
    def data_directory(self) -> Path:
        """The folder of the prepared data."""
        return locate_data(self.data.directory)  # type: ignore[attr-defined]

    def stated(self, **options: Any) -> dict[str, Any]:
        """Return the values as logs and figures state them; `options` are those of model_dump."""
        values = self.model_dump(**options)
        values["data"]["directory"] = name_data(values["data"]["directory"])
        return values

    @property
    def prepared_hint(self) -> str:
        """The command that prepares the data."""
        directory = self.data.directory  # type: ignore[attr-defined]
        return prepare_hint(self.benchmark, self.size, self.configuration, directory)

    def plan(self) -> Plan:
        """Return the run in steps. The last step is always evaluated.

        A budget scales the run with its whole schedule. Unscaled, a warm-up of 8 epochs would fill the 7 that
        a quarter of 28 leaves, and budgets would differ in the shape of their schedule. The interval of
        evaluations, and steps that methods count, are not scaled.
        """

        def scaled(duration: str) -> int:
            return round(self.steps(duration) * self.budget)

        schedule = self.schedule
        num_steps, every = scaled(self.max_duration), self.steps(self.evaluate_every)
        warmup_steps = scaled(schedule.warmup)
        rest = num_steps - (warmup_steps if schedule.decay_from == "warmup" else 0)
        evaluated = evaluation_steps(
            num_steps,
            every,
            offset=self.steps(self.evaluate_offset),
            earliest=scaled(self.evaluate_from),
            is_untrained=self.evaluate_untrained,
        )
        return Plan(
            num_steps=num_steps,
            steps_per_epoch=self.steps_per_epoch,
            num_epochs=self.num_epochs,
            warmup_steps=warmup_steps,
            decay_steps=scaled(schedule.decay) if schedule.decay else rest,
            evaluation_steps=tuple(evaluated),
            milestones=tuple(scaled(milestone) for milestone in schedule.milestones),
            budget=self.budget,
        )

    def replaced(self, **changes: Any) -> "RunConfig":
        """Return a checked copy with top-level keys changed."""
        return validate(type(self), self.model_dump() | changes, {})


def usual_directory(benchmark: str, size: str) -> str:
    return f"data/{benchmark}/{size}"


def data_command(verb: str, benchmark: str, size: str, configuration: str, directory: str) -> str:
    """Return a `ttt data` command; it names the configuration where its data have a place of their own."""
    chosen = f" --configuration {configuration}" * (directory != usual_directory(benchmark, size))
    return f"ttt data {verb} {benchmark} --size {size}{data_option()}{chosen}"


def prepare_hint(benchmark: str, size: str, configuration: str, directory: str) -> str:
    """Tell a person to prepare the data of a configuration; size full is made from a source."""
    command = data_command("prepare", benchmark, size, configuration, directory)
    setting = shlex.quote(f"data.directory={directory}")
    place = f" --set {setting}" * (directory != usual_directory(benchmark, size))
    return f"run: {command}{place}{' --source DIR' * (size == 'full')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration with its history: `origins` per key path, `changes` made by its methods.

    `source` is the name or the path of its file.
    """

    config: RunConfig
    origins: dict[tuple[str, ...], str]
    changes: list[str]
    source: str
