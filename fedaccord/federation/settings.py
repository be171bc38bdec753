"""The settings of every federation: options of all strategies, also run-config keys."""

from dataclasses import Field, dataclass
from functools import cache
from typing import Any

from fedaccord.core.optimizer import FUNCTIONS, OPTIMIZERS, SCHEDULES, STATES, Schedule
from fedaccord.core.options import check_options, option, options
from fedaccord.core.request import BUFFER_POLICIES, ModelSettings
from fedaccord.federation.device_profiles import LOGNORMAL, NONE, PROFILES

SYNCHRONOUS, BUFFERED = "synchronous", "buffered"  # values of schedule
ROUND_TIMEOUT = 3600.0  # seconds, the default
CONSTANT_WEIGHT, POLYNOMIAL = "constant", "polynomial"  # of staleness


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sampling of clients, waiting times and local training; checked at construction."""

    fraction_train: float = option(0.5, "share of all clients drawn each round", low=1e-6, high=1)
    sampling: str = option(
        "fixed",
        "cohorts of fixed size without replacement, or each client with probability fraction-train",
        choices=("fixed", "bernoulli"),
    )
    seed: int = option(0, "seed of initial model, partition, cohorts, batches", low=0, managed=True)
    evaluation: str = option(
        "server",
        "who evaluates the output model: the server on its test samples, the clients on their own, "
        "or both; clients always evaluate their personal models",
        choices=("server", "clients", "both"),
        affects="records",
    )
    fraction_evaluate: float = option(
        1.0,
        "share of all clients drawn for each evaluation; 0: none",
        low=0,
        high=1,
        only={"evaluation": ["clients", "both"]},
        affects="records",
    )
    eval_every: int = option(
        1, "rounds between evaluations; the last is always evaluated", low=1, affects="records"
    )
    round_timeout: float = option(
        ROUND_TIMEOUT,
        "seconds to wait for the replies of a round; with schedule=buffered for each reply; in one "
        "process the default is no limit",
        above=0,
        affects="speed",
    )
    wait_timeout: float = option(
        600.0,
        "seconds to wait for all clients before round 1, later for as many as a round needs",
        above=0,
        affects="speed",
    )
    min_replies: int = option(
        1, "accepted replies that a round needs to count", low=1, affects="rounds"
    )
    device_profile: str = option(
        NONE,
        "simulated devices, in process: none, drawn speeds and links, or the absolute path of a "
        "file with a row for each client; adds the column clock",
        choices=(NONE, LOGNORMAL),
        also=PROFILES,
        path=True,
    )
    deadline: float = option(
        0.0,
        "simulated seconds after which a round accepts no further replies; 0: none",
        low=0,
        only={"device_profile": [LOGNORMAL, PROFILES], "schedule": [SYNCHRONOUS]},
    )
    over_selection: float = option(
        0.0,
        "additional clients of a round, as a share of its cohort; the first replies count, as "
        "many as the cohort has clients",
        low=0,
        high=10,
        only={"device_profile": [LOGNORMAL, PROFILES], "schedule": [SYNCHRONOUS]},
    )
    schedule: str = option(
        SYNCHRONOUS,
        "synchronous: the server steps with the replies of a cohort; buffered: with the first "
        "replies of the active clients, which may have started from earlier models, on SuperNodes "
        "or simulated devices, not in Flower's simulation",
        choices=(SYNCHRONOUS, BUFFERED),
    )
    buffer_size: int = option(
        0,
        "replies of a server step; 0: half of the active clients, rounded up",
        low=0,
        only={"schedule": [BUFFERED]},
    )
    concurrency: int = option(
        0,
        "active clients at a time; 0: given by fraction-train",
        low=0,
        only={"schedule": [BUFFERED]},
    )
    staleness: str = option(
        CONSTANT_WEIGHT,
        "weight of the step from a model tau steps old: 1, or FedBuff's (1 + tau)^(-1/2)",
        choices=(CONSTANT_WEIGHT, POLYNOMIAL),
        only={"schedule": [BUFFERED]},
    )
    max_failed_rounds: int = option(
        3, "failed rounds in a row after which the run stops", low=1, affects="rounds"
    )
    max_update_norm: float = option(
        0.0,
        "largest L2 norm of a round's model update; above it the replies that cause it, at most "
        "half of them, are dropped, or else the round fails; 0: off",
        low=0,
        affects="rounds",
    )
    max_client_norm: float = option(
        0.0,
        "largest L2 norm of a client's update and of each other vector that it uploads, such as "
        "a control variate or a dual; above it the reply is dropped; 0: off",
        low=0,
        affects="rounds",
    )
    max_examples: int = option(
        10**7,
        "most samples that a client may report; above it the reply is dropped: with "
        "weighting=examples they are its weight, with fednova they bound its steps",
        low=1,
        affects="rounds",
    )
    weighting: str = option(
        "uniform",
        "weights of the mean over active clients; the papers' methods use uniform",
        choices=("uniform", "examples"),
    )
    lr: float = option(0.1, "local rate in round 1", above=0)
    lr_decay: float = option(0.998, "factor on the local rate per round", above=0, high=1)
    weight_decay: float = option(0.001, "local weight decay, outside clip and corrections", low=0)
    clip_norm: float = option(10.0, "bound on the norm of the data gradient; 0: off", low=0)
    optimizer: str = option(
        "sgd",
        "optimizer of the local steps; its options are keys such as adamw.beta1",
        choices=[*OPTIMIZERS],
        also=FUNCTIONS,
    )
    optimizer_state: str = option(
        "reset",
        "the optimiser's vectors between rounds: reset, kept by each client, or averaged over a "
        "round's clients, as the start of the next round",
        choices=STATES,
    )
    lr_schedule: str = option(
        "constant",
        "the local rate within a round, from lr towards 0 over its K steps",
        choices=SCHEDULES,
    )
    local_epochs: int = option(
        5, "passes over the client's data a round", low=1, only={"local_steps": [0]}
    )
    local_steps: int = option(0, "steps a round instead of epochs; 0: count epochs", low=0)
    batch_size: int = option(
        50, "local batch; 0: the whole client, in order, every step, not augmented", low=0
    )
    precision: str = option(
        "float32",
        "vectors and steps in float32 or float64; bfloat16: float32 with the model's passes in "
        "bfloat16; tf32: a GPU's products of float32",
        choices=("float32", "float64", "bfloat16", "tf32"),
    )
    buffers: str = option(
        "refuse",
        "running statistics and other buffers of the model: refuse the model, freeze them, average "
        "them over the clients, or keep each client's own",
        choices=BUFFER_POLICIES,
    )
    local_parameters: str = option(
        "",
        "patterns of names, separated by commas, of parameters that stay at each client, e.g. "
        "head.* or *norm*",
    )
    frozen_parameters: str = option(
        "",
        "patterns of names, separated by commas, of parameters that keep their values and are "
        "never sent, e.g. encoder.* or *lora_A*",
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def model_settings(self) -> ModelSettings:
        return ModelSettings.of(self)

    @property
    def is_buffered(self) -> bool:
        return self.schedule == BUFFERED

    def damping(self, delay: int) -> float:
        """omega(tau), the weight of the step of a reply to a model ``delay`` steps old."""
        return 1.0 if self.staleness == CONSTANT_WEIGHT else (1 + delay) ** -0.5

    def rate(self, t: int) -> float:
        """eta_t, the local rate of round t (from 0)."""
        return self.lr * self.lr_decay**t

    def steps_of_round(self, t: int) -> int:
        """K_t, local steps of each client in round t; 0: they count epochs."""
        return self.local_steps

    def is_one_step(self, t: int) -> bool:
        """Whether each client takes one local step in round t, also as one pass in one batch."""
        passes = self.local_epochs if self.batch_size == 0 else 0
        return (self.steps_of_round(t) or passes) == 1

    @property
    def local_length(self) -> str:
        """The length of a local round, as "10 steps" or "1 epoch"."""
        steps = self.steps_of_round(0)
        count = steps or self.local_epochs
        return f"{count} {'step' if steps else 'epoch'}{'s' if count > 1 else ''}"

    @property
    def optimizer_name(self) -> str:
        """The optimiser of the local steps; a method with its own also declares it in
        `replaces`."""
        return self.optimizer

    def own_schedule(self) -> Schedule:
        """The local rates within a round."""
        return Schedule(self.lr_schedule)


@cache
def own_options(kind: type[Settings]) -> "tuple[Field[Any], ...]":
    """The options that a method adds to those of every method."""
    common = {field.name for field in options(Settings)}
    return tuple(field for field in options(kind) if field.name not in common)
