"""Differential privacy in a federation: what is released, remembered, written, spent, refused."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch

from fedaccord import engine, simulate
from fedaccord.config import RunConfig
from fedaccord.core.privacy import Guarantee, Privacy, seeded
from fedaccord.core.rounds import broadcast
from fedaccord.federation.accounting import Accountant, noise_multiplier
from fedaccord.federation.budget import first_of
from fedaccord.federation.errors import FederationError
from fedaccord.federation.round import Round
from fedaccord.plugins import DP, Compress
from fedaccord.runs import reader
from fedaccord.strategies import METHODS, RelaxedInit, Robust
from tests import federation
from tests.cli.shell import invoke, success
from tests.grid import InProcessGrid
from tests.reference import afedpd
from tests.reference.problem import LeastSquares, cohorts
from tests.server.runs import client_app, run_over
from tests.strategies.federate import Federation, client_vectors, close

C, P, T = 6, 2, 4  # P / C and 1 - P / C differ
PROBLEM = LeastSquares(C, num_rows=8, dim=4, seed=3)
W0 = np.random.default_rng(1).normal(size=4)
COHORTS = cohorts(C, P, T, seed=1)
SETTINGS: dict[str, Any] = {
    "precision": "float64", "lr": 0.04, "local_steps": 2, "batch_size": 0, "lr_decay": 1.0,
    "fraction_train": P / C, "sampling": "bernoulli",
}  # fmt: skip
BARE = ["fedavg", "fedinit", "scaffold", "feddyn", "fedcm", "fedadam", "feddeper"]
UNEVEN = [range(C), [0, 2], [], [1, 3, 4, 5], [0], [0, 5]]  # as of independent draws


def train(name: str, schedule: Any, clip: float, z: float = 0.0, **own: Any) -> Federation:
    """A federation after the rounds of ``schedule``, clipped, with noise of the seed."""
    method = METHODS[name](**SETTINGS, **own, plugins=[DP(clip=clip, noise_multiplier=z)])
    f = Federation(method, PROBLEM, W0, len(schedule), local_steps=2)
    f.s = f.s._replace(privacy=Privacy(0, z, clip, P / C, adaptive=False))
    for t, active in enumerate(schedule):
        f.normal = seeded(0, t)
        f.take(active)
    return f


@pytest.mark.parametrize("name", BARE)
def test_without_noise_and_clip_it_is_the_bare_method(name: str) -> None:
    bare = Federation(METHODS[name](**SETTINGS), PROBLEM, W0, T, local_steps=2)
    for active in COHORTS:
        bare.take(active)
    private = train(name, COHORTS, clip=1e12)
    close(private.s.w, bare.s.w)
    for of, other in zip(private.states.values(), bare.states.values(), strict=True):
        for one, two in zip(federation_leaves(of), federation_leaves(other), strict=True):
            close(one, two)


def federation_leaves(state: Any) -> Iterator[torch.Tensor]:
    from fedaccord.core.vectors import leaves

    return (v for _, v in leaves(state))


@pytest.mark.parametrize("clip", [0.05, 1e12])
@pytest.mark.parametrize(
    ("name", "own", "mean"), [("scaffold", "c_i", "c"), ("feddyn", "lam", "lam_bar")]
)
def test_memories_follow_the_clipped_uploads(name: str, own: str, mean: str, clip: float) -> None:
    f = train(name, UNEVEN, clip)
    total = client_vectors([f.states[i] for i in range(C)], own).mean(0)
    close(total, getattr(f.s.server, mean), 1e-12)
    assert float(total.norm()) > 0


@pytest.mark.parametrize("clip", [0.05, 1e12])
@pytest.mark.parametrize("name", ["afedpd", "afedpdsam"])
def test_the_mean_of_virtual_duals_is_the_servers(name: str, clip: float) -> None:
    """Whatever number of clients took part, once all have the virtual steps they missed."""
    f = train(name, UNEVEN, clip, rho=0.5)
    duals = [f.method.rule().dual(broadcast(f.method, f.s, i), f.states[i]) for i in range(C)]
    close(torch.stack(duals).mean(0), f.s.server.lam_bar, 1e-12)
    assert float(f.s.server.lam_bar.norm()) > 0


def test_afedpd_without_noise_is_its_listing_with_a_fixed_denominator() -> None:
    schedule = [[int(i) for i in active] for active in UNEVEN if active]
    ours = train("afedpd", schedule, clip=1e12, rho=0.5)
    own: dict[str, Any] = {"lr": 0.04, "local_steps": 2, "rho": 0.5, "share": P / C}
    own |= {"weight_decay": ours.method.weight_decay, "clip_norm": ours.method.clip_norm}
    expected = afedpd.run(PROBLEM, W0, schedule, **own)
    close(ours.s.w, expected.weights[-1], 1e-10)


def test_an_empty_cohort_is_a_round_of_noise_alone() -> None:
    f = train("fedavg", [[]], clip=1.0, z=2.0)
    noise = (f.s.w - f.w0) * P
    close(noise, seeded(0, 0)(4) * 2)
    assert f.s.privacy == Privacy(1, 2.0, 1.0, P / C, False)


# --- the accountant -------------------------------------------------------------------------------

KNOWN = [(2.0, 1e-4, 0.1, 200, 2.63), (8.0, 1e-4, 0.1, 200, 1.04), (2.0, 1e-6, 1e-4, 1500, 0.468)]
SEARCHED = [KNOWN[0], *(pytest.param(*it, marks=pytest.mark.slow) for it in KNOWN[1:])]


@pytest.mark.parametrize(("epsilon", "delta", "q", "rounds", "z"), KNOWN)
def test_known_noise_multipliers_have_their_epsilon(
    epsilon: float, delta: float, q: float, rounds: int, z: float
) -> None:
    """z of 200 rounds of a tenth of the clients, and in pfl-research's settings for CIFAR-10."""
    assert Accountant(z, q, delta).epsilon(rounds) == pytest.approx(epsilon, rel=1e-2)


@pytest.mark.parametrize(("epsilon", "delta", "q", "rounds", "z"), SEARCHED)
def test_known_noise_multipliers_are_found_again(
    epsilon: float, delta: float, q: float, rounds: int, z: float
) -> None:
    multiplier = noise_multiplier(epsilon, delta, q, rounds)
    assert multiplier == pytest.approx(z, abs=0.006)
    assert Accountant(multiplier, q, delta).epsilon(rounds) == pytest.approx(epsilon, rel=5e-3)
    assert Accountant(multiplier, q, delta).epsilon(rounds) <= epsilon


def test_weak_noise_has_its_exact_epsilon_and_no_endless_grid() -> None:
    z = 1e-3
    exact = dp_accounting.get_epsilon_gaussian(z / math.sqrt(20), 1e-5)
    epsilon = Accountant(z, 1.0, 1e-5).epsilon(20)
    assert exact <= epsilon <= exact * (1 + 1e-4)
    assert noise_multiplier(exact, 1e-5, 1.0, 20) == pytest.approx(z, rel=2e-4)


@pytest.mark.parametrize(
    ("z", "q", "rounds", "epsilon"),
    [(2.0, 1e-3, 2000, 0.08781), (1.0, 1e-3, 5000, 0.39163), (10.0, 0.02, 100, 0.05973)],
)
def test_rare_clients_cost_no_more_than_they_do(
    z: float, q: float, rounds: int, epsilon: float
) -> None:
    """A round's loss may be smaller than a fixed grid. The numbers are of both directions of the
    mechanism, composed by Fourier transforms on a grid of 1e-5."""
    delta = 1e-5 if q == 0.02 else 1e-6
    assert Accountant(z, q, delta).epsilon(rounds) == pytest.approx(epsilon, rel=1e-3)


def test_a_budget_that_needs_no_noise_is_refused() -> None:
    """A client is drawn in one of 3 rounds with probability 1 - 0.99^3 = 0.029701."""
    z = noise_multiplier(8.0, 0.0297, 0.01, 3)
    assert 0 < z < 0.2
    assert Accountant(z, 0.01, 0.0297).epsilon(3) <= 8.0
    for delta in (0.02971, 0.05):
        line = r"^dp.delta: expected less than 0.0297, the chance .*, go"
        with pytest.raises(ValueError, match=line):
            noise_multiplier(8.0, delta, 0.01, 3)


def test_epsilon_is_the_librarys() -> None:
    import dp_accounting as dp

    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(1.5)), 30)
    accountant = dp.pld.PLDAccountant()
    accountant.compose(event)
    ours = Accountant(1.5, 0.2, 1e-5)
    assert ours.epsilon(30) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    bound = ours.epsilon(17)
    assert ours.rounds_within(bound, 30) == 17
    assert ours.rounds_within(bound * 0.9999, 30) == 16
    assert ours.rounds_within(0.01, 30) == 0
    assert Accountant(0.0, 0.2, 1e-5).epsilon(1) == math.inf
    assert ours.epsilon(0) == 0


@pytest.mark.parametrize(("z", "q", "delta"), [(3**0.5, 1.0, 0.126936), (0.5, 0.2, 0.15594)])
def test_epsilon_of_the_librarys_own_examples(z: float, q: float, delta: float) -> None:
    """Three rounds cost epsilon 1: dp_accounting/pld/pld_privacy_accountant_test.py."""
    assert Accountant(z, q, delta).epsilon(3) == pytest.approx(1, abs=1e-3)


# --- a run ----------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "dataset": "npz", "model": "linear", "num-clients": 8, "partition": "iid", "threads": 1,
    "local-steps": 2, "batch-size": 5, "num-server-rounds": 6, "sampling": "bernoulli",
    "fraction-train": 0.5, "algo": "scaffold", "dp.noise-multiplier": 1.0, "dp.clip": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    x, y = rng.normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
    np.savez(folder / "data.npz", x_train=x[:48], y_train=y[:48], x_test=x[48:], y_test=y[48:])
    return RUN | {"data-dir": str(folder / "data.npz"), "out-dir": str(folder / "runs")}


def run(settings: dict[str, Any], **more: Any) -> reader.StoredRun:
    values = settings | {key.replace("__", ".").replace("_", "-"): v for key, v in more.items()}
    return reader.read(engine.run(RunConfig.make(values)).path)


def model(result: reader.StoredRun) -> bytes:
    return (result.path / "model.safetensors").read_bytes()


def test_a_run_writes_epsilon_and_nothing_of_single_clients(settings: dict[str, Any]) -> None:
    result = run(settings, name="plain")
    expected = [Accountant(1.0, 0.5, 1e-5).epsilon(t) for t in range(1, 7)]
    assert result.metrics["dp-epsilon"].tolist()[1:] == expected
    assert result.summary["dp.epsilon"] == expected[-1]
    assert (result.summary["dp.noise"], result.summary["dp.noise-multiplier"]) == ("seed", 1.0)
    unseen = {"train-loss", "drift", "consistency", "spread"}
    assert not unseen & {*result.metrics.columns}
    assert result.clients.empty
    assert result.classes is None
    other = run(settings, name="shown", dp__write_client_metrics=True)
    assert {"num-examples", "train-loss"} <= {*other.clients.columns}
    assert "train-loss" in other.metrics
    assert model(other) == model(result)


def test_rounds_whose_replies_are_all_dropped_fail_and_release_their_noise(
    settings: dict[str, Any],
) -> None:
    """An empty cohort between them is neither a failed round nor a good one."""
    more = {"lr": 1e30, "clip_norm": 0.0, "fraction_train": 0.15, "max_failed_rounds": 3}
    with pytest.raises(FederationError, match=r"^3 rounds in a row failed .* 1 good reply"):
        run(settings, name="dropped", num_server_rounds=30, **more)
    result = reader.read(Path(settings["out-dir"]) / "dropped")
    drops = [*result.metrics["dropped"][1:]]
    assert sum(number > 0 for number in drops) == 3
    assert 3 < len(drops) < 30
    assert [*result.metrics["replies"][1:]] == [0] * len(drops)
    losses = [*result.metrics["test-loss"]]
    assert len({*losses}) == len(losses)  # each round was a step along its noise
    budget = [Accountant(1.0, 0.15, 1e-5).epsilon(t) for t in range(1, len(drops) + 1)]
    assert [*result.metrics["dp-epsilon"][1:]] == budget


@pytest.mark.parametrize("more", [{"lr": 1e30, "clip_norm": 0.0}, {"fraction_train": 0.001}])
def test_a_run_without_an_accepted_reply_is_not_completed(
    settings: dict[str, Any], more: dict[str, Any]
) -> None:
    name = f"none {[*more]}"
    with pytest.raises(FederationError, match=r"none of 2 rounds counted .*raise fraction-train"):
        run(settings, name=name, num_server_rounds=2, **more)
    assert reader.read(Path(settings["out-dir"]) / name).summary["status"] == "failed"


def test_a_run_without_noise_has_no_epsilon(settings: dict[str, Any]) -> None:
    result = run(settings, name="no noise", dp__noise_multiplier=0.0)
    assert result.summary["dp.epsilon"] is None
    assert result.metrics["dp-epsilon"].tolist()[1:] == [math.inf] * 6


def test_the_command_shows_epsilon_each_round_and_at_the_end(settings: dict[str, Any]) -> None:
    pairs = [f"{key}={value}" for key, value in settings.items()]
    output = success(invoke("run", *pairs, "name=shown-by-command", "num-server-rounds=2")).stdout
    texts = [f"epsilon {Accountant(1.0, 0.5, 1e-5).epsilon(t):.4g}" for t in (1, 2)]
    assert all(text in output for text in texts)
    assert "noise from the seed" in " ".join(output.split())


def test_a_resumed_run_has_the_same_noise_and_the_same_budget(settings: dict[str, Any]) -> None:
    whole = run(settings, name="whole")
    run(settings, name="parts", num_server_rounds=3)
    parts = run(settings, name="parts", resume=True)
    assert model(parts) == model(whole)
    assert parts.metrics["dp-epsilon"].tolist()[1:] == whole.metrics["dp-epsilon"].tolist()[1:]


def test_a_run_ends_before_a_round_that_would_pass_its_budget(settings: dict[str, Any]) -> None:
    bound = Accountant(1.0, 0.5, 1e-5).epsilon(4)
    result = run(settings, name="bound", dp__max_epsilon=bound * 1.0001, eval_every=3)
    assert (result.summary["status"], result.summary["rounds"]) == ("completed", 4)
    is_evaluated = result.metrics["test-accuracy"].notna()
    assert result.metrics["round"][is_evaluated].tolist() == [0, 3, 4]  # its last round is
    with pytest.raises(ValueError, match=r"dp\.max-epsilon: expected a budget for one more round"):
        run(settings, name="bound", dp__max_epsilon=bound * 1.0001, eval_every=3, resume=True)


@pytest.mark.parametrize("bounded", [False, True])
def test_a_run_that_was_cut_off_after_its_last_round_is_completed_with_its_epsilon(
    settings: dict[str, Any], bounded: bool
) -> None:
    def cut_off(round: Round) -> None:
        if round.number == 4:
            raise KeyboardInterrupt

    epsilon = Accountant(1.0, 0.5, 1e-5).epsilon(4)
    own = {"dp.max-epsilon": 1.0001 * epsilon} if bounded else {"num-server-rounds": 4}
    values = settings | {"name": f"cut-off-{bounded}", **own}
    with pytest.raises(KeyboardInterrupt):
        engine.run(RunConfig.make(values), on_round=cut_off)
    result = reader.read(engine.run(RunConfig.make(values | {"resume": True})).path)
    assert (result.summary["status"], result.summary["rounds"]) == ("completed", 4)
    assert result.summary["dp.epsilon"] == result.metrics["dp-epsilon"].tolist()[-1] == epsilon
    more = {k: v for k, v in settings.items() if k not in ("num-server-rounds", "out-dir")}
    if bounded:
        with pytest.raises(
            ValueError, match=r"dp\.max-epsilon: expected a budget for one more round"
        ):
            simulate(rounds=6, resume=result.path, **more | own)


def test_a_budget_for_no_round_leaves_no_directory(settings: dict[str, Any]) -> None:
    bound = Accountant(1.0, 0.5, 1e-5).epsilon(1)
    with pytest.raises(ValueError, match=r"dp\.max-epsilon: .*; raise dp\.noise-multiplier$"):
        run(settings, name="none", dp__max_epsilon=bound / 2)
    assert not (Path(settings["out-dir"]) / "none").exists()
    assert run(settings, name="none").summary["rounds"] == 6


def test_a_round_that_fails_after_its_noise_was_drawn_counts(settings: dict[str, Any]) -> None:
    result = run(settings, name="failed", max_update_norm=0.5)
    assert {*result.metrics["counted"][1:]} == {0, 1}
    budget = [Accountant(1.0, 0.5, 1e-5).epsilon(t) for t in range(1, 7)]
    assert result.metrics["dp-epsilon"].tolist()[1:] == budget


def test_a_budget_sets_the_noise_and_stays_one_when_a_run_is_prolonged(
    settings: dict[str, Any],
) -> None:
    budget = {"dp__noise_multiplier": -1.0, "dp__epsilon": 4.0}
    result = run(settings, name="four", **budget)
    assert 3.9 < result.summary["dp.epsilon"] <= 4
    more = {"num_server_rounds": 7, "resume": True, **budget}
    files = {f: f.read_bytes() for f in result.path.rglob("*") if f.is_file()}
    with pytest.raises(ValueError, match=r"dp\.max-epsilon: .*; raise it, or end the run here"):
        run(settings, name="four", **more)
    assert {f: f.read_bytes() for f in result.path.rglob("*") if f.is_file()} == files
    assert run(settings, name="four", dp__max_epsilon=5.0, **more).summary["rounds"] == 7


@pytest.mark.parametrize("where", ["server", "client"])
def test_cohorts_in_one_call_agree(settings: dict[str, Any], where: str) -> None:
    tensors = []
    for how in ("off", "on"):
        more = {"vectorize": how, "dp__where": where, "num_server_rounds": 3}
        result = run(settings, name=f"{how}-{where}", **more)
        tensors.append(torch.cat([v.flatten() for v in reader_model(result)]))
    torch.testing.assert_close(*tensors)


def reader_model(result: reader.StoredRun) -> list[torch.Tensor]:
    from fedaccord.runs.directory import load_model

    return [*load_model(result.path).values()]


def test_the_adaptive_clip_travels_with_each_round(settings: dict[str, Any]) -> None:
    more = {"dp__noise_multiplier": 0.3, "dp__adaptive_clip": True, "dp__clip": 1e-3}
    more["num_server_rounds"] = 3
    result = run(settings, name="adaptive", **more)
    assert result.summary["dp.clip"] > 1.2e-3  # every upload is longer, so S grows


def test_the_adaptive_clip_needs_enough_clients_a_round() -> None:
    """The mean cohort counts: 10% of 20 are too few for noise for which all 20 are enough."""
    guarantee = Guarantee(0.5, 1.0, 0.0, 1e-5, 0.0, adaptive=True, writes_clients=False)
    assert first_of(guarantee, 1.0, 3, 20).multiplier == 1.0
    with pytest.raises(ValueError, match=r"^dp.adaptive-clip: expected more than 10 cl.*, got 2:"):
        first_of(guarantee, 0.1, 3, 20)


def deployed(rounds: int, share: float, noise: float) -> torch.Tensor:
    """The model of a federation over messages that is no simulation."""
    own = {"local_epochs": 1, "fraction_train": share}
    plugins = [DP(clip=0.1, noise_multiplier=noise)]
    method = METHODS["fedavg"](**SETTINGS | own, plugins=plugins)
    with InProcessGrid(client_app(), 6) as grid, engine.quiet():
        over = run_over(grid, method, rounds)
        assert over.session.is_deployed
        over.play()
    assert over.facts()["dp"]["noise"] == "system"
    return over.state.w


@pytest.mark.parametrize(("share", "noise"), [(1.0, 1.0), (0.5, 0.0)], ids=["noise", "cohorts"])
def test_a_deployment_draws_from_the_system(share: float, noise: float) -> None:
    """Each alone: the other would hide that it comes from the seed."""
    one, two = deployed(3, share, noise), deployed(3, share, noise)
    assert not torch.equal(one, two)


def test_a_deployment_counts_the_rounds_after_its_last_checkpoint(tmp_path: Path) -> None:
    from fedaccord.runs import logbook

    assert logbook._releases(tmp_path, 3) == 3
    (tmp_path / logbook.SPENT).write_text('{"releases": 5}')
    assert logbook._releases(tmp_path, 3) == 5
    assert logbook._releases(tmp_path, 7) == 7
    (tmp_path / logbook.SPENT).write_text("[]")
    with pytest.raises(ValueError, match="expected how many rounds"):
        logbook._releases(tmp_path, 3)


def test_a_client_that_lies_moves_the_model_by_the_clip_at_most() -> None:
    def huge(message: Any, reply: Any) -> Any:
        from fedaccord.wire.tensor_array import to_record, to_tensor

        for name, record in reply.content.array_records.items():
            tensors = {k: to_tensor(v) * 0 + 1e6 for k, v in record.items()}
            reply.content[name] = to_record(tensors)
        return reply

    plugins = [DP(clip=0.1, noise_multiplier=0.0)]
    settings = SETTINGS | {"fraction_train": 1.0, "local_steps": 1}
    method = METHODS["fedavg"](**settings, plugins=plugins)
    models = []
    for spoil in (None, huge):
        with InProcessGrid(client_app(spoil), 6) as grid, engine.quiet():
            over = run_over(grid, method, 1)
            over.play()
        models.append(over.state.w)
    assert 0 < float((models[0] - models[1]).norm()) <= 2 * 0.1 / 6 + 1e-9


LOSS = "the local model diverged: expected train-loss to be a number from -1e+15 to 1e+15"
STEPS = "expected steps to be at most local-epochs times num-examples"


@pytest.mark.parametrize("write_metrics", [False, True])
@pytest.mark.parametrize(
    ("key", "value", "line", "got"),
    [("train-loss", 1.2345e16, LOSS, "1.2345e+16"), ("steps", 10**6, STEPS, "1000000 beside ")],
)
def test_the_log_has_no_number_of_a_client_that_was_dropped(
    key: str,
    value: Any,
    line: str,
    got: str,
    write_metrics: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wrong(message: Any, reply: Any) -> Any:
        reply.content["metrics"][key] = value
        return reply

    private = DP(clip=0.1, noise_multiplier=0.0, write_client_metrics=write_metrics)
    steps = {"local_steps": 0, "local_epochs": 1} if key == "steps" else {}
    method = METHODS["fedavg"](**SETTINGS | {"fraction_train": 1.0} | steps, plugins=[private])
    with InProcessGrid(client_app(wrong), 6) as grid, engine.quiet():
        run_over(grid, method, 1).play()
    (said,) = [r.message for r in caplog.records if "dropped client" in r.message]
    start = f"round 1: dropped client 2: {line}"
    assert said.startswith(f"{start}, got {got}") if write_metrics else said == start


# --- refusals -------------------------------------------------------------------------------------

ONE, ADAPTIVE = DP(noise_multiplier=1.0), DP(noise_multiplier=1.0, adaptive_clip=True)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fedexp", {}, "FedExP does not support DP: its server rate is of the norms of single updates"),
    ("fednova", {}, "dp: expected none with FedNova, whose server step reads the number of steps"),
    ("fedcm", {"local_steps": 0}, r"number of steps of each client \(set local-steps\)"),
    ("fedinit", {"server": "updates"}, "reads the start of each client"),
    ("dfedavg", {}, "dp: expected none with gossip in DFedAvg: it has no server"),
    ("fedpd", {"fraction_train": 1.0, "sampling": "fixed"}, "sampling: expected bernoulli with dp"),
    ("fedavg", {"sampling": "fixed"}, "sampling: expected bernoulli with dp, got 'fixed'"),
    ("fedavg", {"weighting": "examples"}, "weighting: expected uniform with dp, got 'examples'"),
    ("fedavg", {"buffers": "mean"}, "buffers: expected refuse, freeze or local with dp"),
    ("fedavg", {"optimizer": "momentum", "optimizer_state": "average"}, "optimizer-state: expecte"),
    ("fedavg", {"min_replies": 2}, "min-replies: expected 1 with dp, got 2"),
    ("fedavg", {"evaluation": "both"}, "evaluation: expected server with dp, got 'both'"),
    ("fedavg", {"plugins": [ONE, Robust()]}, "dp: expected no Robust"),
    ("fedcm", {"plugins": [ONE, RelaxedInit()]}, "dp: expected no RelaxedInit with FedCM"),
    ("fedavg", {"max_client_norm": 2.0}, "max-client-norm: expected 0 with dp, got 2: dp.clip bo"),
    *(
        (
            "fedavg",
            {"plugins": [ADAPTIVE, Compress(method=name)]},
            "dp.adaptive-clip: expected false with Compress, got true: the clip follows",
        )
        for name in ("topk", "randk", "sign", "qsgd", "int8", "bf16")
    ),
    ("fedavg", {"plugins": [DP(clip=2.0)]}, "expected one of dp.epsilon and dp.noise-multiplier, "),
    ("fedavg", {"plugins": [DP(epsilon=1.0, noise_multiplier=1.0)]}, "got both; set dp.epsilon=4"),
]


@pytest.mark.parametrize(("name", "more", "line"), REFUSED)
def test_what_the_guarantee_cannot_cover_is_refused_in_one_line(
    name: str, more: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=line) as error:
        METHODS[name](**{**SETTINGS, "plugins": [ONE], **more})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["dp.clip", "dp.max-epsilon", "dp.delta"])
def test_a_setting_of_privacy_without_a_budget_is_refused_and_never_left_out(key: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of dp\.epsilon and dp.noise-multiplier"):
        RunConfig.make({key: 0.01, "sampling": "bernoulli"})


def test_given_cohorts_are_refused() -> None:
    method = METHODS["fedavg"](sampling="bernoulli", plugins=[DP(noise_multiplier=1.0)])
    with pytest.raises(ValueError, match="participation: expected a share of the clients with dp"):
        federation.run(method, PROBLEM, W0, COHORTS)


def test_a_large_delta_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"dp.noise-multiplier": 1.0, "dp.delta": 0.1}
    simulate("fedavg", rounds=1, num_clients=20, sampling="bernoulli", local_steps=1, **settings)
    assert "dp.delta: 0.1 is more than 1 / C = 0.05" in caplog.text
