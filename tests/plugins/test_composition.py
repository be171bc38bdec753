"""Methods and plug-ins by value: what adds to a method, what stands in its place, what is off."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord import simulate
from fedaccord import strategies as S
from fedaccord.core.cohort import Cohort
from fedaccord.core.options import option
from fedaccord.core.plugin import PlugIn
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins import PLUGINS as KNOWN
from fedaccord.plugins.broadcast import Broadcast
from fedaccord.plugins.compress import Compress
from fedaccord.plugins.dp import DP
from fedaccord.plugins.secure_sum import SecureSum
from fedaccord.strategies import METHODS, SAM, DFedAvg, Gossip, RelaxedInit, Robust
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import History, client_vectors, close, federate

C, T, K = 6, 4, 2
LEAST_SQUARES = LeastSquares(C, seed=3)
W0 = np.random.default_rng(1).normal(size=LEAST_SQUARES.dim)
SOME, EVERYONE = problem.cohorts(C, 3, T, seed=1), problem.everyone(C, T)
SETTINGS: dict[str, Any] = {"precision": "float64", "lr": 0.04, "local_steps": K}

PLUGINS: dict[str, tuple[Any, ...]] = {
    "ri": (RelaxedInit(beta=0.13),),
    "sam": (SAM(rho=0.07),),
    "ri+sam": (RelaxedInit(beta=0.13), SAM(rho=0.07)),
    "gossip": (Gossip(topology="full"),),
    "ri+sam+gossip": (RelaxedInit(beta=0.13), SAM(rho=0.07), Gossip(topology="full")),
}
REFUSED = {  # by what methods say of themselves
    part: {name for name, kind in METHODS.items() if plugin in kind.refuses}
    for part, plugin in (("ri", RelaxedInit), ("sam", SAM), ("gossip", Gossip))
}
REFUSED["gossip"] |= {name for name, kind in METHODS.items() if not kind.linear}


def test_who_refuses_what() -> None:
    assert {"dispfl", "local"} <= REFUSED["ri"]
    assert {"fedlesam", "fedsmoo", "dispfl"} <= REFUSED["sam"]
    adaptive = {"fedadam", "fedyogi", "fedadagrad", "fednova", "fedsmoo"}
    assert adaptive | {"fedpd", "afedpd", "afedpdsam", "local"} <= REFUSED["gossip"]


def make(kind: type[FederatedStrategy], *plugins: Any, **more: Any) -> FederatedStrategy:
    steps = {"local_steps": 1} if kind is S.DPSGD else {}
    return kind(plugins=plugins, **(SETTINGS | {"fraction_train": 1.0} | steps | more))


def run(method: FederatedStrategy) -> History:
    everyone = method.topology.is_decentralised or method.all_clients
    shapes = ((2, 2), (1, 1))  # so that Muon has a matrix
    return federate(method, LEAST_SQUARES, W0, EVERYONE if everyone else SOME, shapes=shapes)


def is_same(a: FederatedStrategy, b: FederatedStrategy) -> bool:
    """Whether two methods take the same path, bit for bit."""
    return torch.equal(run(a).weights, run(b).weights)


@pytest.mark.parametrize("plugins", PLUGINS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_with_every_plugin(name: str, plugins: str) -> None:
    """Finite and reproducible weights, another path than without; or one line of refusal."""
    kind, choice = METHODS[name], PLUGINS[plugins]
    accepted = [p for p in PLUGINS if not any(name in REFUSED[part] for part in p.split("+"))]
    if plugins not in accepted:
        with pytest.raises(ValueError, match=rf"^{kind.__name__} does not support \w+: \w[^\n]+$"):
            make(kind, *choice)
        return
    weights, without = weights_of(name, plugins), weights_of(name, "bare")
    assert torch.isfinite(weights).all()
    assert not torch.equal(weights, without)  # nodes have a model each, of another shape
    if plugins == accepted[-1]:
        assert torch.equal(weights, run(make(kind, *choice)).weights)


@cache
def weights_of(name: str, plugins: str) -> torch.Tensor:
    return run(make(METHODS[name], *(BARE | PLUGINS)[plugins])).weights


STEPS: dict[str, dict[str, Any]] = {
    "sgd-linear": {"lr_schedule": "linear"},
    "momentum-keep": {"optimizer": "momentum", "optimizer_state": "keep"},
    "adamw-cosine": {"optimizer": "adamw", "lr_schedule": "cosine"},
    "muon-average": {"optimizer": "muon", "optimizer_state": "average"},
}
BARE: dict[str, tuple[Any, ...]] = {"bare": (), "robust": (Robust(rule="median"),)}
OWN_STEPS = {"fednova", "feddeper", "dispfl", "ditto", "scaffnew"}  # their formulas assume SGD
ALONE = {"local"} | {name for name, kind in METHODS.items() if issubclass(kind, DFedAvg)}


def test_who_refuses_other_optimizers() -> None:
    refusing = {name for name, kind in METHODS.items() if kind.assumes_sgd}
    assert refusing - {"fedtoy"} == OWN_STEPS  # the method that test_a_new_method.py adds


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_with_every_optimizer_and_every_plugin(name: str, steps: str) -> None:
    """Finite weights and another path than with plain SGD, unless the method has steps of its own;
    or one line of refusal. With each optimiser one choice of plug-ins takes a run."""
    kind, more, runs = METHODS[name], STEPS[steps], []
    for plugins, choice in (BARE | PLUGINS).items():
        try:
            make(kind, *choice)
        except ValueError:
            continue  # with any optimiser
        apart = "gossip" in plugins or plugins == "robust" or name in ALONE
        if (
            kind.assumes_sgd
            or (name == "dfedavgm" and "optimizer" in more)
            or ("average" in steps and apart)
        ):
            with pytest.raises(
                ValueError, match=r"^(optimizer|optimizer-state|lr-schedule): [^\n]+$"
            ):
                make(kind, *choice, **more)
            continue
        runs.append((plugins, make(kind, *choice, **more)))
    if not runs:
        return
    plugins, method = runs[([*METHODS].index(name) + [*STEPS].index(steps)) % len(runs)]
    weights = run(method).weights
    assert torch.isfinite(weights).all()
    unread = more.keys() <= kind.replaces.keys()
    if steps != "sgd-linear" or name != "dpsgd":  # which takes one step
        assert torch.equal(weights, weights_of(name, plugins)) == unread


@pytest.mark.parametrize("name", METHODS)
def test_plugins_that_are_off_leave_the_bare_method_bit_for_bit(name: str) -> None:
    """rho = 0, beta = 0 and topology = none, also where a method would refuse them switched on."""
    kind = METHODS[name]
    bare = {
        "fedinit": S.FedAvg,
        "fedsam": S.FedAvg,
        "mofedsam": S.FedCM,
        "fedgamma": S.Scaffold,
        "afedpdsam": S.AFedPD,
        "dfedsam": DFedAvg,
        "dfedsam-mgs": DFedAvg,
    }.get(name, kind)
    off: tuple[Any, ...] = (RelaxedInit(beta=0.0), SAM(rho=0.0))
    if not issubclass(kind, DFedAvg):
        off += (Gossip(topology="none"),)
    method = make(kind, *off)
    assert [type(plugin) for plugin in method.active_plugins] in ([], [Gossip])
    more = {"radius": 0.0} if kind is S.FedSpeed else {}
    gossip = (Gossip(steps=4),) if name == "dfedsam-mgs" else ()
    assert is_same(method, make(bare, *gossip, **more))


def test_a_method_has_its_plugins_settings_as_its_own_arguments() -> None:
    assert is_same(make(S.FedSAM, rho=0.05), make(S.FedAvg, SAM(rho=0.05)))
    assert is_same(make(S.FedInit, beta=0.2), make(S.FedAvg, RelaxedInit(beta=0.2)))
    assert is_same(make(S.FedGamma, rho=0.05), make(S.Scaffold, SAM(rho=0.05)))
    assert is_same(make(S.MoFedSAM, rho=0.05), make(S.FedCM, SAM(rho=0.05)))
    assert is_same(make(S.AFedPDSAM, radius=0.05), make(S.AFedPD, SAM(rho=0.05)))
    assert is_same(make(S.DFedSAM, rho=0.05), make(S.DFedAvg, SAM(rho=0.05)))
    gossip = Gossip(steps=3)
    assert is_same(make(S.DFedSAMMGS, rho=0.05, steps=3), make(S.DFedAvg, SAM(rho=0.05), gossip))
    assert not is_same(make(S.FedSAM, rho=0.05), make(S.FedSAM, rho=0.06))


def test_plugins_add_to_a_methods_own() -> None:
    both = make(S.FedAvg, RelaxedInit(beta=0.1), SAM(rho=0.1))
    assert is_same(make(S.FedInit, SAM(rho=0.1)), both)
    assert is_same(make(S.FedSAM, RelaxedInit(beta=0.1)), both)
    assert not is_same(make(S.FedInit), both)


def test_a_plugin_of_a_methods_own_kind_takes_its_place() -> None:
    assert make(S.FedSAM, SAM(rho=0.2)).active_plugins == (SAM(rho=0.2),)
    assert make(S.FedSAM, SAM(rho=0.2), rho=0.3).active_plugins == (SAM(rho=0.2),)
    fedinit = make(S.FedInit, RelaxedInit(beta=0.02), SAM())
    assert [getattr(p, "beta", None) for p in fedinit.active_plugins] == [0.02, None]
    assert make(S.DFedSAM, Gossip(topology="full")).active_plugins == (
        SAM(rho=0.01),
        Gossip(topology="full"),
    )
    fedspeed = make(S.FedSpeed, SAM(rho=0.4), mix=0.5, variant="paper")
    assert fedspeed.active_plugins == (SAM(rho=0.4, mix=0.5, normalised=False),)


ONE_OF_EACH: dict[str, PlugIn] = {
    "broadcast": Broadcast(dtype="int8"),
    "compress": Compress(method="topk"),
    "dp": DP(noise_multiplier=0.0),
    "gossip": Gossip(topology="ring"),
    "relaxed-init": RelaxedInit(beta=0.1),
    "robust": Robust(rule="krum"),
    "sam": SAM(rho=0.1),
    "secure-sum": SecureSum(),
}
NO_SENSE = {
    ("broadcast", "gossip"): "broadcast.dtype: expected float32 .*: under gossip no server",
    ("compress", "gossip"): "compress.method: expected none with gossip",
    ("dp", "gossip"): "dp: expected none with gossip .*: it has no",
    ("gossip", "robust"): "robust.rule: expected none with gossip",
    ("gossip", "secure-sum"): "secure-sum.method: expected off with gossip .*: no server takes",
    ("dp", "robust"): "dp: expected no Robust: noise is on sums",
    ("robust", "secure-sum"): "secure-sum.method: expected off with Robust, which reads single",
    ("compress", "secure-sum"): "secure-sum.method: expected off with compress.method: masked",
}


@pytest.mark.parametrize("pair", [*combinations(ONE_OF_EACH, 2)], ids="+".join)
def test_each_two_plugins_are_in_their_places_or_refused_in_one_line(pair: tuple[str, str]) -> None:
    assert ONE_OF_EACH.keys() == KNOWN.keys()
    sampling = "bernoulli" if "dp" in pair else "fixed"
    for names in (pair, pair[::-1]):
        plugins = tuple(ONE_OF_EACH[name] for name in names)
        if line := NO_SENSE.get(pair):
            with pytest.raises(ValueError, match=rf"^{line}[^\n]+$"):
                S.FedAvg(plugins=plugins, sampling=sampling)
            continue
        active = S.FedAvg(plugins=plugins, sampling=sampling).active_plugins
        assert {*map(type, active)} == {*map(type, plugins)}
        assert active[0].place <= active[1].place


@pytest.mark.parametrize("name", sorted(set(ONE_OF_EACH) - {"gossip", "robust"}))
def test_with_every_plugin_the_servers_memory_is_that_of_the_clients(name: str) -> None:
    """Of SCAFFOLD; else `encode` changes the upload and `loses` does not say so. Under gossip every
    node has a memory, and SCAFFOLD refuses robust means."""
    sampling = "bernoulli" if name == "dp" else "fixed"
    history = run(make(S.Scaffold, ONE_OF_EACH[name], sampling=sampling))
    c_i = client_vectors(history.clients, "c_i")
    assert c_i.norm() > 1
    close(c_i.mean(0), history.server[-1].c)


@dataclass(frozen=True)
class FirstModel(PlugIn):
    """A stranger's plug-in that replaces the mean."""

    def mean(self, ups: Any, cohort: Cohort) -> tuple[Any, Cohort]:
        return ups._replace(w=ups.w[:1]), cohort.of_mean()


@pytest.mark.parametrize(
    ("plugin", "line"),
    [
        (DP(noise_multiplier=0.0), "dp: expected no FirstModel: noise is on sums"),
        (
            SecureSum(),
            "secure-sum.method: expected off with FirstModel, which reads single uploads",
        ),
    ],
)
def test_any_plugin_that_replaces_the_mean_is_refused_with_sums(plugin: PlugIn, line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}"):
        S.FedAvg(plugins=(plugin, FirstModel()), sampling="bernoulli")


@pytest.mark.parametrize("plugins", [SAM(rho=0.1), [SAM], ["sam"], None])
def test_plugins_are_a_sequence_of_instances(plugins: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^plugins: expected a sequence, e.g. .SAM.rho=0.1.,., got "
    ):
        S.FedAvg(plugins=plugins)


def test_a_plugin_without_a_strength_that_may_be_auto_is_refused() -> None:
    @dataclass(frozen=True)
    class AlwaysOn(PlugIn):
        scale: float = option(0.1, "without auto=True")

    with pytest.raises(TypeError, match=r"^AlwaysOn.scale: expected auto=True, .* in every run$"):
        AlwaysOn.is_set({"scale": 0.1})


@pytest.mark.parametrize("plugin", [SAM(rho=0.1), RelaxedInit(beta=0.1), Gossip()])
def test_two_of_a_kind_are_refused(plugin: Any) -> None:
    line = rf"^plugins: expected one of a kind, got {type(plugin).__name__} twice; leave one out$"
    with pytest.raises(ValueError, match=line):
        S.FedAvg(plugins=(plugin, plugin))
    with pytest.raises(ValueError, match=line):  # one of them off is as unclear
        S.FedSAM(plugins=(plugin, type(plugin)()))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"fraction_train": 0.0}, "fraction_train: expected at least 1e-06 and at most 1, got 0"),
        ({"plugins": (RelaxedInit(beta=-3.0),)}, r"beta: expected at least -1, got -3\.0$"),
        ({"plugins": (SAM(rho=-0.1),)}, r"rho: expected at least 0, got -0\.1$"),
        ({"plugins": (RelaxedInit(center="here"),)}, "center: expected one of server, start, got "),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match="^" + line):
        S.FedAvg(**settings)


@pytest.mark.parametrize("kind", [S.Scaffold, S.FedDeper, S.FedDyn])
def test_plugin_order_does_not_matter(kind: type[FederatedStrategy]) -> None:
    ri, sam = RelaxedInit(beta=0.1), SAM(rho=0.05)
    a, b = run(make(kind, ri, sam)), run(make(kind, sam, ri))
    assert torch.equal(a.weights, b.weights)
    assert torch.equal(client_vectors(a.clients, "last"), client_vectors(b.clients, "last"))


# --- relaxed initialisation at the server ---------------------------------------------------------

MOVED = RelaxedInit(beta=0.1, center="start")


@pytest.mark.parametrize("name", sorted(set(METHODS) - REFUSED["ri"]))
def test_a_methods_messages_know_nothing_of_relaxed_initialisation(name: str) -> None:
    """w_{i,0} travels beside the upload, and where the server step asks for it alone."""
    kind = METHODS[name]
    reads_anchor = {"feddyn", "fedgloss", "fedsmoo", "fedspeed"}
    reads_start = {"fednova", "fedcm", "mofedsam", "fedmuon", "fedpac"}
    for plugin, sends in (
        (RelaxedInit(beta=0.1), name in reads_start),
        (MOVED, name in reads_start | reads_anchor),
    ):
        if plugin is MOVED and kind.fixed_anchor:
            continue
        half, bare = make(kind, plugin).client_half(), make(kind).client_half()
        assert "w_i0" not in bare.sends._fields
        assert half.sends._fields == bare.sends._fields + (("w_i0",) if sends else ())
        assert half.rule == bare.rule


@pytest.mark.parametrize("name", ["afedpd", "afedpdsam", "fedlesam", "fedlesam-d", "fedlesam-s"])
def test_methods_whose_anchor_cannot_move_say_so(name: str) -> None:
    line = rf"^{METHODS[name].__name__} does not support RelaxedInit\.center=start: [a-z][^\n]+$"
    with pytest.raises(ValueError, match=line):
        make(METHODS[name], MOVED)


@pytest.mark.parametrize(
    ("beta", "share", "line"),
    [
        (0.1, 0.1, "^$"),
        (0.1, 0.05, "with 5% of the clients in a step .* from 0.0526 on, got 0.1; lower it, or "),
        (0.112, 0.1, "from 0.111 on, got 0.112; lower"),
        (1.0, 0.9, "from 1 on, got 1; lower"),
        (0.102, 1.0, "^$"),
        (0.103, 1.0, r"the theory holds below sqrt\(6\)/24 = 0.102, got 0.103$"),
    ],
)
def test_a_beta_above_its_bounds_is_a_warning(beta: float, share: float, line: str) -> None:
    assert re.search(line, RelaxedInit(beta=beta).advice(S.FedAvg(), share))


@pytest.mark.parametrize(
    ("least", "who", "percent"),
    [
        (1, None, "10%"),
        (3, None, ""),  # of 10: 30%
        (1, [[0], [3]], "10%"),
        (1, [[0, 1], [3, 4, 5]], ""),
    ],
)
def test_warnings_are_of_the_share_that_is_drawn(
    least: int, who: Any, percent: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [(torch.ones(4, 3), torch.zeros(4, 1))] * 10
    method = S.FedInit(beta=0.12, fraction_train=0.1, min_train_nodes=least)
    simulate(method, clients=rows, model=torch.nn.Linear(3, 1), rounds=2, participation=who)
    said = re.findall(r"with (.*) of the clients in a step of the server, old", caplog.text)
    assert said == [percent] * bool(percent)


def test_in_buffered_rounds_the_share_is_of_the_replies_of_a_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [(torch.ones(4, 3), torch.zeros(4, 1))] * 10
    buffered = {"schedule": "buffered", "concurrency": 4, "device_profile": "lognormal"}
    for size, percent in ((1, "10%"), (0, ""), (4, "")):  # 0: half of the active ones
        method = S.FedInit(beta=0.12, buffer_size=size, **buffered)
        caplog.clear()
        simulate(method, clients=rows, model=torch.nn.Linear(3, 1), rounds=1)
        said = re.findall(r"with (.*) of the clients in a step of the server, old", caplog.text)
        assert said == [percent] * bool(percent)


def test_under_gossip_all_clients_train(caplog: pytest.LogCaptureFixture) -> None:
    rows = [(torch.ones(4, 3), torch.zeros(4, 1))] * 10
    method = DFedAvg(plugins=(RelaxedInit(beta=0.12),), lr=0.01)
    simulate(method, clients=rows, model=torch.nn.Linear(3, 1), rounds=1)
    assert "the theory holds below" in caplog.text
    assert "of the clients in a step" not in caplog.text


BUFFERED: dict[str, Any] = {"schedule": "buffered", "concurrency": 4}


@pytest.mark.parametrize(
    ("kind", "center", "share", "line"),
    [
        (S.FedDyn, "server", 0.5, "duals of FedDyn .* set relaxed-init.center=start$"),
        (S.FedADMM, "server", 0.5, "duals of FedADMM .* set relaxed-init.center=start$"),
        (partial(S.FedDyn, **BUFFERED), "server", 0.5, "duals of FedDyn .* leave it out$"),
        (S.FedDyn, "start", 0.5, "^$"),
        (S.FedDyn, "server", 1.0, "^$"),
        (S.AFedPD, "server", 0.5, "duals of AFedPD .* leave it out$"),
        (S.FedLESAM, "server", 0.5, "^$"),
        (partial(S.FedInit, server="updates"), "server", 0.05, "^$"),
        (S.FedNova, "server", 0.05, "^$"),
        (S.FedCM, "server", 0.05, "from 0.0526 on"),
        (S.FedMuon, "server", 0.05, "from 0.0526 on"),
        (S.FedADMM, "start", 0.05, "^$"),
        (partial(S.FedADMM, variant="active"), "start", 0.05, "from 0.0526 on"),
    ],
)
def test_what_a_method_does_with_the_jumps_decides_on_a_warning(
    kind: Callable[[], FederatedStrategy], center: str, share: float, line: str
) -> None:
    assert re.search(line, RelaxedInit(beta=0.1, center=center).advice(kind(), share))


@pytest.mark.parametrize("first_visit", ["initial", "current"])
def test_w_0_is_asked_for_where_a_first_start_needs_it(first_visit: str) -> None:
    ri = RelaxedInit(beta=0.1, first_visit=first_visit)
    assert make(S.FedAvg, ri).client_half().needs_w_init == (first_visit == "initial")
    assert make(S.FedADMM, ri).client_half().needs_w_init  # w_hat_i begins at w^0 all the same
