"""A method: a frozen dataclass of hyper-parameters with pure methods.

It has no state: values that change from round to round belong to a `Run` (run.py), so one instance
serves any number of runs, also at the same time.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fedaccord.core.client_half import ClientHalf, has_personal
from fedaccord.core.cohort import Client, Cohort, Cohorts
from fedaccord.core.cost import Cost, cost_of
from fedaccord.core.method_settings import OWN_BUFFERS, OWN_STATES, combine, expect, in_use
from fedaccord.core.optimizer import Optimizer, made, setting_of
from fedaccord.core.optimizer_trial import check_step
from fedaccord.core.options import argument, check_options, listed, plain
from fedaccord.core.plugin import PlugIn
from fedaccord.core.privacy import Guarantee, Masking, guarantee_of, has_noisy_sums
from fedaccord.core.rule import LocalRule, Model, Stateless
from fedaccord.core.topology import Star, Topology
from fedaccord.core.vectors import Vector
from fedaccord.federation import sampling
from fedaccord.federation.device_profiles import NONE
from fedaccord.federation.settings import Settings

log = logging.getLogger("flwr")

LEAST = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")  # as Flower's strategies


@dataclass(frozen=True, kw_only=True)
class Method(Settings, ABC):
    """The server half of a method, with the plug-ins and the settings of a federation.

    A subclass implements the paper: `rule` (its client half), `init`, `broadcast`, `aggregate` and
    `output_model`. State is an argument and a result.
    """

    # Properties of the server step; the defaults are safe
    linear: ClassVar[bool] = False  # mean of steps = step of the mean: gossip may mix them
    takes_weights: ClassVar[bool] = False  # with weighting=examples its fixed point is weighted too
    reads_anchors: ClassVar[bool] = False  # `aggregate` reads cohort.anchor
    has_duals: ClassVar[bool] = False  # clients sum up their w_{i,K} - anchor over the rounds
    fixed_anchor: ClassVar[str] = ""  # why relaxed initialisation cannot move w^t as the anchor
    tied: ClassVar[bool] = True  # the server's memory sums up the clients': see `rounds.forget`
    anneals: ClassVar[bool] = False  # the local steps depend on the number of rounds T
    averages: ClassVar[bool] = False  # `aggregate` reads the uploads by cohort.mean(ups.w) alone
    assumes_sgd: ClassVar[bool] = True  # its formulas hold only for plain SGD at a constant rate
    all_clients: ClassVar[bool] = False  # a round counts only with the replies of all clients
    replaces: ClassVar[dict[str, str]] = {}  # settings without effect -> why
    refuses: ClassVar[dict[type[PlugIn], str]] = {}  # a plug-in -> why it does not fit
    cost_note: ClassVar[str] = ""  # a note on the cost

    plugins: tuple[PlugIn, ...] = argument(
        (),
        "plug-ins beside the method's own, or replacing its own of the same type, e.g. "
        "(SAM(rho=0.1), Gossip(topology='ring')); the outermost last",
    )

    min_train_nodes: int = argument(
        1, "fewest clients of a round, if fraction_train gives fewer", shown=False
    )
    min_evaluate_nodes: int = argument(
        1, "fewest clients that evaluate, if fraction_evaluate gives fewer", shown=False
    )
    min_available_nodes: int = argument(
        1, "fewest clients of the federation; round 1 waits for all of them anyway", shown=False
    )
    local_optimizer: Optimizer | None = argument(
        None, "the optimiser with its own options, e.g. AdamW(beta1=0.8); sets optimizer too"
    )

    def __post_init__(self) -> None:
        if self.local_optimizer is not None:
            name = setting_of(self.local_optimizer)
            if self.optimizer == type(self).optimizer and "optimizer" not in self.replaces:
                object.__setattr__(self, "optimizer", name)
            if self.optimizer_name != name:
                raise ValueError(
                    f"local_optimizer: expected one called {self.optimizer_name}, as "
                    f"{type(self).__name__} is set, got {name!r}"
                )
        super().__post_init__()
        name = type(self).__name__
        if not self.takes_weights:
            why = ": its server step counts clients equally"
            expect(self, "weighting", ["uniform"], f"with {name}", why)
        if self.all_clients and (self.fraction_train < 1 or self.sampling != "fixed"):
            raise ValueError(
                f"{name}: expected all clients in every round, got fraction-train="
                f"{self.fraction_train:g} with sampling={self.sampling}; set fraction-train=1 and "
                "sampling=fixed, or use a method that allows partial participation, e.g. scaffold "
                "or feddyn"
            )
        for name in LEAST:
            value = plain(getattr(self, name))
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}: expected an integer of at least 0, got {value!r}")
            object.__setattr__(self, name, value)
        if self.min_train_nodes > 1 and self.sampling == "bernoulli":
            raise ValueError(
                "min_train_nodes: expected sampling='fixed', got 'bernoulli', which draws clients "
                "independently: remove one of the two"
            )
        plugins: Any = self.plugins
        if not isinstance(plugins, Sequence) or not all(isinstance(it, PlugIn) for it in plugins):
            raise ValueError(
                f"plugins: expected a sequence, e.g. (SAM(rho=0.1),), got {plugins!r:.80}"
            )
        object.__setattr__(self, "plugins", tuple(plugins))
        for plugin in combine(self.own_plugins(), self.plugins):
            check_options(plugin)
        _ = self.active_plugins  # raises if one does not fit
        self._check_parts()

    def _check_parts(self) -> None:
        """Raise ValueError, in one line, for an unsupported optimiser or unsupported buffers."""
        name, own = type(self).__name__, self.own_optimizer()
        check_options(own)
        check_step(own)
        if self.assumes_sgd:
            expect(self, "optimizer", ["sgd"], f"with {name}, whose formulas assume its steps")
            why = "whose formulas assume one rate a round"
            expect(self, "lr-schedule", ["constant"], f"with {name}, {why}")
        if own.sends is Stateless and not own.is_stateless:
            why = f"with {type(own).__name__}, which does not declare what it sends"
            expect(self, "optimizer-state", OWN_STATES, why)
        if self.all_clients or self.sampling != "fixed":
            why = "its rounds have all clients" if self.all_clients else "cohorts vary in size"
            beside = f"with {name} and sampling={self.sampling}"
            expect(self, "over-selection", [0], beside, f": {why}")
        if self.hides_clients:
            why = ": the guarantee does not cover clients' evaluations; "
            why += "dp.write-client-metrics=true allows it"
            expect(self, "evaluation", ["server"], "with dp", why)
        if self.topology.is_decentralised:
            why = ": it times visits to a server, and under gossip there is none"
            expect(self, "device-profile", [NONE], f"with {name}", why)
            why = ": under gossip no server averages"
            expect(self, "optimizer-state", OWN_STATES, f"with {name}", why)
            expect(self, "buffers", OWN_BUFFERS, f"with {name}", why)

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "headline" in vars(cls):
            raise TypeError(f"{cls.__name__}.headline is now called output_model: rename it")

    def own_optimizer(self) -> Optimizer:
        """The optimiser of the local steps."""
        return self.local_optimizer or made(self.optimizer_name)

    def own_state(self) -> str:
        """Its vectors between rounds, as `optimizer_state`."""
        return self.optimizer_state

    # the method, written by a subclass

    @property
    def reads_starts(self) -> bool:
        """Whether `aggregate` reads cohort.starts; may be a class attribute."""
        return False

    @property
    def keeps_jumps(self) -> bool:
        """Whether `aggregate` moves w by the jumps of starts that a plug-in moves, too, as a mean
        of local models does; may be a class attribute."""
        return True

    @property
    def beyond_sums(self) -> str:
        """The inputs of `aggregate` besides means and sums of the uploads over the cohort; empty:
        none. May be a class attribute."""
        return "" if self.averages else "more of the uploads than it declares"

    @property
    def synchronous(self) -> str:
        """Why the method does not support replies to earlier models, as in buffered rounds; empty:
        it does. May be a class attribute."""
        return "its step has not been derived for replies to earlier models"

    @abstractmethod
    def rule(self) -> LocalRule:
        """The client half with this run's hyper-parameters."""

    def own_plugins(self) -> tuple[PlugIn, ...]:
        """The plug-ins that are part of the method."""
        return ()

    def init(self, w: Vector) -> Any:
        """Server state before round 1, a NamedTuple of vectors; w: (d,).

        A field that is a dict, round -> vector (d,), has vectors of past rounds; a run moves the
        oldest ones to files.
        """
        return Stateless()

    def broadcast(self, w: Vector, state: Any, client: Client) -> Any:
        """The message to one client, a NamedTuple of vectors (d,); w: (d,)."""
        return Model(w)

    @abstractmethod
    def aggregate(self, w: Vector, ups: Any, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        """w^{t+1} (..., d) and the next server state; the arguments are not changed.

        w: (..., d), w^t. ups: the replies' NamedTuple with a tuple of vectors (..., d), one for
        each client, in every field. state: the server state, its vectors (..., d).
        """

    def output_model(self, w: Vector, state: Any) -> Vector:
        """The model (..., d) that is evaluated, saved and returned."""
        return w

    def check_clients(self, num_clients: int, cohorts: Cohorts | None = None) -> None:
        """Raise ValueError, in one line, if the settings do not fit this many clients.

        cohorts: explicit ones, a cohort for each round; None: they are drawn.
        """
        for t, cohort in enumerate(cohorts or ()):
            sampling.check_cohort(cohort, t, num_clients)
            if self.all_clients and (missing := sorted({*range(num_clients)} - {*cohort})):
                raise ValueError(
                    f"participation: {type(self).__name__} expects all {num_clients} clients in "
                    f"every round, got round {t + 1} without {listed(missing)}"
                )
        for name in LEAST:
            if getattr(self, name) > num_clients:
                raise ValueError(
                    f"{name}: expected at most {num_clients}, the clients of this federation "
                    f"(num-partitions of its nodes), got {getattr(self, name)}; lower it"
                )
        size = self.cohort_size(num_clients)
        if self.is_buffered:
            if size > num_clients:
                raise ValueError(
                    f"concurrency: expected at most {num_clients}, the clients of this federation, "
                    f"got {size}; lower it"
                )
            if self.buffer_of(num_clients) > size:
                raise ValueError(
                    f"buffer-size: expected at most {size}, the active clients, got "
                    f"{self.buffer_size}; lower it, or raise concurrency"
                )
            size = self.buffer_of(num_clients)
        if cohorts is None and self.masking and size < self.masking.least:
            raise ValueError(
                f"secure-sum.method: expected at least {self.masking.least} clients a round (a "
                f"sum of fewer would reveal uploads), got {size}; raise fraction-train, or set off"
            )
        if cohorts is None and self.min_replies > size:
            average = " on average" if self.sampling == "bernoulli" else ""
            key = "buffer-size" if self.is_buffered else "fraction-train"
            more = "" if size == num_clients else f", or raise {key}"
            raise ValueError(
                f"min-replies: expected at most {size}, the clients of a round{average} (of "
                f"{num_clients} in all), got {self.min_replies}; lower it{more}"
            )

    def needed_replies(self, num_clients: int) -> int:
        """Accepted replies that a round needs to count."""
        if self.has_noisy_sums and not self.masking:  # an empty cohort is a round too
            return 0
        return num_clients if self.all_clients else self.min_replies

    # derived from these

    @cached_property
    def active_plugins(self) -> tuple[PlugIn, ...]:
        """The method's own plug-ins and the given ones, adapted to it, without those that are off.

        Raises ValueError, in one line, if one is incompatible.
        """
        return tuple(plugin.fit(self) for plugin in in_use(self))

    @cached_property
    def guarantee(self) -> Guarantee | None:
        """The differential privacy that the run promises; None: none."""
        return guarantee_of(self.active_plugins)

    @property
    def has_noisy_sums(self) -> bool:
        """Whether the server adds the noise of that guarantee."""
        return has_noisy_sums(self.active_plugins)

    @cached_property
    def masking(self) -> Masking | None:
        """How uploads are masked until they are summed; None: they are not."""
        maskings = (plugin.masking() for plugin in self.active_plugins)
        return next((masking for masking in maskings if masking is not None), None)

    @property
    def hides_clients(self) -> bool:
        """Whether numbers of single clients, and their means without noise, are not written."""
        return self.guarantee is not None and not self.guarantee.writes_clients

    @property
    def has_personal(self) -> bool:
        """Whether clients evaluate models of their own."""
        return has_personal(self.client_half()) and not self.hides_clients

    @cached_property
    def topology(self) -> Topology:
        """Who averages with whom: a star, or the graph of a plug-in."""
        graphs = (plugin.graph(self.seed) for plugin in self.active_plugins)
        return next((graph for graph in graphs if graph is not None), Star())

    @cached_property
    def cost(self) -> Cost:
        """The cost of a round for an active client, with the plug-ins in use."""
        return cost_of(self, self.client_half())

    def client_half(self) -> ClientHalf:
        """The client half: the method's rule in its plug-ins."""
        inside = (p for p in self.active_plugins if p.graph(self.seed) is None)
        own = self.own_optimizer(), self.own_schedule(), self.own_state()
        keeps_local = bool(self.local_parameters) or self.buffers == "local"
        return ClientHalf(self.rule(), tuple(inside), *own, keeps_local)

    def averaged_output(self, w: Vector, state: Any) -> Vector:
        """The one model (d,) of a state: the method's, of the topology's average."""
        return self.topology.average(self.output_model(w, state))

    def cohort_size(self, num_clients: int) -> int:
        """Clients of a round, on average if they are drawn independently."""
        if self.topology.is_decentralised:
            return num_clients
        if self.is_buffered and self.concurrency:
            return self.concurrency
        return max(sampling.cohort_size(self.fraction_train, num_clients), self.min_train_nodes)

    @property
    def why_synchronous(self) -> str:
        """Why buffered rounds are not supported, in one line; empty: they are."""
        if self.topology.is_decentralised:
            return "under gossip no server waits for replies"
        return "its rounds have all clients" if self.all_clients else self.synchronous

    def buffer_of(self, num_clients: int) -> int:
        """Replies of a server step in buffered rounds."""
        return self.buffer_size or -(-self.cohort_size(num_clients) // 2)

    def draw(
        self,
        t: int,
        available: Sequence[int],
        num_clients: int,
        size: int | None = None,
        secret: bool = False,
    ) -> Sequence[int]:
        """The cohort of round t, of the clients that are available; size: of a fixed one, None:
        from the settings; secret: as of `sampling.generator`."""
        if self.topology.is_decentralised:
            return available
        generator = sampling.generator("cohort", self.seed, t, secret)
        if self.sampling == "bernoulli":
            share, may_be_empty = self.fraction_train, self.has_noisy_sums
            return sampling.bernoulli(available, share, generator, may_be_empty)
        if size is None:
            size = self.cohort_size(num_clients)
            if self.over_selection and self.device_profile != NONE:
                size = math.ceil(size * (1 + self.over_selection) - 1e-9)
        return sampling.fixed(available, size, generator)

    def draw_evaluators(self, t: int, available: Sequence[int], num_clients: int) -> list[int]:
        """The clients that evaluate after t rounds, of those that are available."""
        size = sampling.cohort_size(self.fraction_evaluate, num_clients)
        generator = sampling.generator("evaluation", self.seed, t)
        return sampling.fixed(available, max(size, self.min_evaluate_nodes), generator)

    def summary(self) -> None:
        """Log the client half, its plug-ins, and the settings of the local steps."""
        half = self.client_half()
        log.info("%s, client half %s", type(self).__name__, half.rule)
        for plugin in half.plugins:
            log.info("with %s", plugin)
        if self.buffers == "mean" and (self.max_client_norm or self.max_update_norm):
            log.warning("buffers=mean: their norms are not bounded: one client can spoil the mean")
        log.info("each round: %s", self.local_training())

    def local_training(self) -> str:
        """The settings of training and averaging in one line, including defaults."""
        every = self.fraction_train == 1 or self.topology.is_decentralised
        who = "all" if every else f"{self.fraction_train:.4g} of the"
        clip = f"clip norm {self.clip_norm:g}" if self.clip_norm else "no clipping"
        own = type(self).rate is not Settings.rate
        first_two = f"{self.rate(0):g} and {self.rate(1):g} in the first two rounds"
        rate = first_two if own else f"{self.lr:g} x {self.lr_decay:g} a round"
        return (
            f"{who} clients, {self.local_length} of {self.own_optimizer().registered_name()}, lr "
            f"{rate} ({self.own_schedule().name} within one), weight decay "
            f"{self.weight_decay:g}, {clip}, {self.precision}, weighting {self.weighting}"
        )
