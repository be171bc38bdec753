"""Privacy that clients add themselves: what they send, remember and spend, and what is refused."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from flwr.app import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaccord import engine
from fedaccord.core.cohort import Decoded
from fedaccord.core.privacy import Guarantee, Privacy
from fedaccord.core.rule import LocalConfig
from fedaccord.federation.budget import Budget
from fedaccord.federation.evaluation import evaluate_at_server
from fedaccord.federation.run import Run
from fedaccord.plugins import DP, SAM, Compress, Robust, SecureSum
from fedaccord.runs import load_model
from fedaccord.runs.logbook import Logbook
from fedaccord.strategies import METHODS, RelaxedInit
from tests import federation
from tests.faults.test_restarts import Lab
from tests.grid import InProcessGrid
from tests.reference.problem import LeastSquares, cohorts
from tests.server.runs import LEAST_SQUARES, W0, client_app, run_over
from tests.strategies.federate import Federation, client_vectors, close

C = LEAST_SQUARES.num_clients
SETTINGS: dict[str, Any] = {
    "precision": "float64", "lr": 0.04, "local_steps": 2, "batch_size": 0, "lr_decay": 1.0,
    "weight_decay": 0.0, "clip_norm": 0.0,
}  # fmt: skip
LOCAL = DP(clip=0.5, noise_multiplier=1.0, where="client")
TAKEN = [
    name
    for name, kind in METHODS.items()
    if not (strategy := kind(fraction_train=1.0, local_steps=1)).topology.is_decentralised
    and strategy.own_state() != "average"
    and name not in ("local", "fedexp")
]


def at(t: int = 0, client: Any = 0, seed: int = 0, secret: bool = False) -> Any:
    """The part of a local result that a plug-in reads."""
    config = LocalConfig(t, t + 1, 0.1, 0.0, 0.0, client, seed, (), secret=secret)
    return SimpleNamespace(config=config)


def sent(plugin: DP, up: Any, w: torch.Tensor, result: Any) -> Any:
    message, memory = plugin.encode(up, SimpleNamespace(w=w), None, result)
    assert memory is None
    return message


# --- the mechanism --------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.sampled_from(TAKEN), st.integers(0, 99), st.floats(-3, 3), st.sampled_from([0.01, 1, 50]))
def test_what_is_noised_has_at_most_the_norm_of_the_clip(
    name: str, seed: int, size: float, clip: float
) -> None:
    method = METHODS[name](fraction_train=1.0, local_steps=1, plugins=[LOCAL])
    rule, (plugin,) = method.rule(), [p for p in method.active_plugins if isinstance(p, DP)]
    draw = torch.Generator().manual_seed(seed)
    w, *fields = torch.randn(1 + len(rule.sends._fields), 7, generator=draw, dtype=torch.float64)
    up = rule.sends(*(10**size * v for v in fields))
    bare = plugin.at(Privacy(0, 0.0, clip, 1.0, False, local=True))
    upload = sent(bare, up, w, at())
    assert bare.decode(Decoded(upload), rule.sends, None, w).up is upload

    def norm(of: Any) -> float:
        updates = [v - w if n in rule.models else v for n, v in of._asdict().items()]
        return float(torch.cat(updates).norm())

    assert norm(upload) == pytest.approx(min(clip, norm(up)), rel=1e-9)


@pytest.mark.parametrize("secret", [False, True], ids=["seed", "system"])
def test_the_noise_of_an_upload_has_the_stated_deviation(
    secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of clients, fields and rounds each its own: eight vectors without correlation; also beyond
    the numbers that are drawn at a time."""
    monkeypatch.setattr("fedaccord.core.privacy.CHUNK", 999)
    n, rule = 10**5, METHODS["scaffold"]().rule()
    w = torch.zeros(2, n, dtype=torch.float64)
    plugin = DP(clip=0.3, noise_multiplier=1.7, where="client", models="w")
    ups = [sent(plugin, rule.sends(w, w), w, at(t, (4, 5), secret=secret)) for t in (0, 1)]
    noise = torch.cat([v for up in ups for v in up]) / (0.3 * 1.7)
    correlations = noise @ noise.mT / n - torch.eye(8, dtype=torch.float64)
    assert float(correlations.abs().max()) < 5 * math.sqrt(2 / n)
    assert float(((noise**4).mean(1) - 3).abs().max()) < 5 * math.sqrt(96 / n)
    assert float((noise[:, -1000:].std(1) - 1).abs().max()) < 5 / math.sqrt(2 * 1000)
    assert noise.all()
    again = sent(plugin, rule.sends(w[0], w[0]), w[0], at(0, 5, secret=secret))
    assert torch.equal(again.w, ups[0].w[1]) != secret
    if not secret:
        assert torch.equal(again.dc_i, ups[0].dc_i[1])  # one at a time as in a cohort
        other = sent(plugin, rule.sends(w[0], w[0]), w[0], at(0, 5, seed=1))
        assert not torch.equal(other.w, again.w)


def test_a_client_sends_nothing_without_a_multiplier_or_with_numbers_that_are_not_finite() -> None:
    w = torch.zeros(3, dtype=torch.float64)
    kind: Any = METHODS["fedavg"]().rule().sends
    with pytest.raises(ValueError, match="expected a noise multiplier from the server, got none"):
        sent(DP(epsilon=1.0, where="client", models="w"), kind(w), w, at())
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="dp: the upload holds NaN or Inf"):
            sent(LOCAL.fit(METHODS["fedavg"](**SETTINGS)), kind(w + bad), w, at())  # type: ignore[arg-type]


MEMORIES = [
    ("scaffold", {}, "c_i", "c"),
    ("scaffold", {"upload": "one"}, "c_i", "c"),
    ("feddyn", {}, "lam", "lam_bar"),
    ("fedspeed", {}, "lam", "lam_bar"),
]
PROBLEM = LeastSquares(6, num_rows=8, dim=4, seed=3)


@pytest.mark.parametrize("compress", [[], [Compress(method="topk", share=0.5)]], ids=["", "topk"])
@pytest.mark.parametrize(("name", "own", "memory", "mean"), MEMORIES)
def test_memories_follow_the_noised_uploads(
    name: str, own: dict[str, Any], memory: str, mean: str, compress: list[Compress]
) -> None:
    ends = []
    for z in (0.0, 1.0):
        plugins = [DP(clip=0.5, noise_multiplier=z, where="client"), *compress]
        method = METHODS[name](**SETTINGS, **own, plugins=plugins)
        f = Federation(method, PROBLEM, np.ones(4), 4, local_steps=2)
        f.s = f.s._replace(privacy=Privacy(0, z, 0.5, 1.0, False, local=True))
        for active in (range(6), [0, 2], [1, 3, 4, 5], [0]):
            f.take(active)
            own_memories = client_vectors([f.states[i] for i in range(6)], memory)
            close(own_memories.mean(0), getattr(f.s.server, mean), 1e-12)
        assert f.s.privacy.releases == 4
        ends.append(own_memories)
    assert float((ends[1] - ends[0]).norm()) > 0.1


def test_noised_uploads_keep_error_feedback() -> None:
    """What follows the noise may read it: only sums that the server noises refuse it."""
    compress = Compress(method="topk", error_feedback="true")
    method = METHODS["fedavg"](**SETTINGS, plugins=[LOCAL, compress])
    assert [p.error_feedback for p in method.active_plugins if isinstance(p, Compress)] == ["true"]


# --- the budget -----------------------------------------------------------------------------------


def budget(multiplier: float, epsilon: float, rounds: int, **more: Any) -> Budget:
    guarantee = Guarantee(0.5, multiplier, epsilon, 1e-5, epsilon, False, False, local=True)
    return Budget(
        guarantee, 0.1, rounds, 50, **{"numbers": 100, "begun": None, "secret": False, **more}
    )


def test_epsilon_is_that_of_gaussians_composed() -> None:
    """T releases with z and sensitivity 2 S are one with z / (2 sqrt(T)), by no sampling."""
    own_budget = budget(12.0, 0.0, 9)
    for rounds in (1, 4, 9):
        exact = dp_accounting.get_epsilon_gaussian(12 / 2 / math.sqrt(rounds), 1e-5)
        privacy = own_budget.first._replace(releases=rounds)
        assert own_budget.epsilon(privacy) == pytest.approx(exact, rel=1e-3)
        assert own_budget.epsilon(privacy) >= exact * (1 - 1e-9)


def test_a_multiplier_is_found_for_the_budget_of_all_rounds_and_no_more_are_begun() -> None:
    whole = budget(-1.0, 4.0, 16)
    exact = 2 * math.sqrt(16) * dp_accounting.get_sigma_gaussian(4.0, 1e-5)
    assert whole.first.multiplier == pytest.approx(exact, rel=1e-3)
    assert whole.rounds_left == 16
    assert budget(-1.0, 4.0, 16, begun=whole.first._replace(releases=6)).rounds_left == 10
    for releases in (16, 17):
        spent = whole.first._replace(releases=releases)
        assert budget(-1.0, 4.0, 16, begun=spent).rounds_left == 0


@pytest.mark.parametrize(("local", "numbers", "loud"), [(True, 900, 18), (False, 900, 3.6)])
def test_noise_that_drowns_the_mean_upload_is_warned_of(
    local: bool, numbers: int, loud: float, caplog: pytest.LogCaptureFixture
) -> None:
    """25 clients of 250, z 3: on a sum of 25 the noise has the norm 3 sqrt(n) S, on a mean of 25
    noised uploads 3 sqrt(n / 25) S."""
    guarantee = Guarantee(0.5, 3.0, 0.0, 1e-5, 0.0, False, False, local=local)
    for times in (1, (20.1 / loud) ** 2, (19.9 / loud) ** 2):
        Budget(guarantee, 0.1, 3, 250, round(numbers * times), None, secret=False)
    lines = [r.message for r in caplog.records if "noise of a round" in r.message]
    assert lines == [lines[0]]
    assert lines[0].startswith("dp: the noise of a round is 20 times as long as the longest mean")


def test_a_resumed_server_counts_the_round_in_which_it_was_killed(tmp_path: Path) -> None:
    """Devices draw new noise for it: 7 rounds, the 8th that was cut off, 6 to 10 once more."""
    lab = Lab(tmp_path, "fedavg", {"checkpoint-every": 5})
    private = {"dp.noise-multiplier": 9.0, "dp.where": "client", "local-steps": 2}
    lab.run(10, killed_after=7, **private)
    assert json.loads((tmp_path / "runs" / "x" / "privacy.json").read_text()) == {"releases": 7}
    lab.run(10, killed_after=6, resume=True, **private)
    assert json.loads((tmp_path / "runs" / "x" / "privacy.json").read_text()) == {"releases": 9}
    path = lab.run(10, resume=True, **private)
    assert json.loads((path / "privacy.json").read_text()) == {"releases": 15}
    exact = dp_accounting.get_epsilon_gaussian(9 / 2 / math.sqrt(15), 1e-5)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["dp"]["epsilon"] == pytest.approx(exact, rel=1e-3)
    assert summary["dp"]["noise"] == "system"


def test_a_budget_is_spent_before_anything_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed while the model of round 2 is evaluated."""
    lab, evaluate = Lab(tmp_path, "fedavg", {}), evaluate_at_server

    def killed(session: Any, state: Any, *functions: Any) -> dict[str, float]:
        if state.t == 2:
            raise KeyboardInterrupt
        return evaluate(session, state, *functions)

    monkeypatch.setattr("fedaccord.federation.run.evaluate_at_server", killed)
    private = {"dp.noise-multiplier": 1.0, "sampling": "bernoulli", "local-steps": 2}
    with pytest.raises(KeyboardInterrupt):
        lab.run(3, **private)
    assert json.loads((tmp_path / "runs" / "x" / "privacy.json").read_text()) == {"releases": 2}


def test_a_model_whose_round_is_not_noted_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is stopped while it notes round 2."""
    lab, spend, w = Lab(tmp_path, "fedavg", {}), Logbook.spend, dict[int, Any]()

    def evaluate(session: Any, state: Any, *functions: Any) -> dict[str, float]:
        w[state.t] = state.w.clone()
        return {}

    def stopped(book: Logbook, releases: int) -> None:
        if releases == 2:
            raise KeyboardInterrupt
        spend(book, releases)

    monkeypatch.setattr("fedaccord.federation.run.evaluate_at_server", evaluate)
    monkeypatch.setattr(Logbook, "spend", stopped)
    private = {"dp.noise-multiplier": 1.0, "sampling": "bernoulli", "local-steps": 2}
    with pytest.raises(KeyboardInterrupt):
        lab.run(3, **private)
    saved = load_model(tmp_path / "runs" / "x")
    vector = torch.cat([tensor.reshape(-1) for tensor in saved.values()])
    assert torch.equal(vector.sort().values, w[1].sort().values)
    assert not torch.equal(w[0], w[1])


# --- a federation ---------------------------------------------------------------------------------

COHORTS = cohorts(C, 3, 3, seed=1)


def over_messages(replies: list[Message] | None = None, **more: Any) -> Run:
    def seen(message: Message, reply: Message) -> Message:
        if replies is not None:
            replies.append(reply)
        return reply

    dp = DP(clip=0.5, noise_multiplier=1.0, where="client", **more)
    method = METHODS["scaffold"](**SETTINGS, plugins=[dp])
    with InProcessGrid(client_app(seen, None), C) as grid, engine.quiet():
        run = run_over(grid, method, len(COHORTS), cohorts=COHORTS)
        run.play()
    return run


def test_a_simulation_has_the_same_bits_by_messages_and_in_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = federation.run(METHODS["scaffold"](**SETTINGS), LEAST_SQUARES, W0, COHORTS).state.w
    local = METHODS["scaffold"](**SETTINGS, plugins=[LOCAL])
    expected = federation.run(local, LEAST_SQUARES, W0, COHORTS).state.w
    assert float((expected - bare).norm()) > 0.5
    devices = over_messages().state.w
    monkeypatch.setattr("fedaccord.client.train.is_simulated", lambda: True)
    assert torch.equal(over_messages().state.w, expected)
    assert not torch.equal(devices, expected)  # they draw from the system


@pytest.mark.parametrize("write_metrics", [False, True])
def test_numbers_beside_an_upload_are_sent_only_if_allowed(write_metrics: bool) -> None:
    replies: list[Message] = []
    run = over_messages(replies, write_client_metrics=write_metrics)
    numbers = [dict(reply.content["metrics"]) for reply in replies]
    assert len(numbers) == sum(map(len, COHORTS))
    plain = {"num-examples": 1, "train-loss": 0.0, "steps": 2}
    assert all((it == plain) != write_metrics and it["steps"] == 2 for it in numbers)
    assert all(("seconds" in it) == write_metrics for it in numbers)
    assert run.facts()["dp"]["noise"] == "system"


def test_a_budget_is_known_once_a_run_begins_and_a_cost_before() -> None:
    method = METHODS["scaffold"](**SETTINGS, plugins=[DP(epsilon=4.0, where="client")])
    assert (method.cost.up, method.cost.client) == (2, 1)
    history = federation.run(method, LEAST_SQUARES, W0, COHORTS)
    expected = 2 * math.sqrt(3) * dp_accounting.get_sigma_gaussian(4.0, 1e-5)
    assert history.state.privacy[:2] == (3, pytest.approx(expected, rel=1e-3))


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("fednova", {}),
    ("fedpd", {"fraction_train": 1.0}),
    ("scaffnew", {"fraction_train": 1.0, "local_steps": 0}),
    ("fedavg", {"min_replies": 2}),
    ("fedavg", {"plugins": [LOCAL, Robust(rule="median")]}),
    ("scaffold", {"plugins": [LOCAL, SAM()], "upload": "one"}),
]


@pytest.mark.parametrize(("name", "more"), ACCEPTED)
def test_a_server_step_may_read_more_than_sums(name: str, more: dict[str, Any]) -> None:
    method = METHODS[name](**{**SETTINGS, "plugins": [LOCAL], **more})
    assert method.needed_replies(C) >= 1
    assert not method.has_noisy_sums


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dfedavg", {}, "dp: expected none with gossip in DFedAvg: it has no server"),
    ("fedavg", {"plugins": [DP(noise_multiplier=1.0, where="client", adaptive_clip=True)]},
     "dp.adaptive-clip: expected false with dp.where=client"),
    ("fedavg", {"local_steps": 0}, "local-steps: expected a fixed number with dp.where=client"),
    ("fedavg", {"weighting": "examples"}, "weighting: expected uniform with dp, got 'examples'"),
    ("fedavg", {"buffers": "mean"}, "buffers: expected refuse, freeze or local with dp"),
    ("fedavg", {"optimizer": "momentum", "optimizer_state": "average"}, "optimizer-state: expecte"),
    ("fedavg", {"evaluation": "both"}, "evaluation: expected server with dp, got 'both'"),
    ("fedavg", {"schedule": "buffered"}, "dp: expected off with schedule=buffered"),
    ("fedcm", {"plugins": [LOCAL, RelaxedInit()]}, "dp: expected no RelaxedInit with FedCM"),
    ("fedavg", {"plugins": [LOCAL, SecureSum()]}, "secure-sum.method: expected off with dp.where"),
    ("fedexp", {}, "FedExP does not support DP: its server rate is of the norms of single updates"),
    ("local", {}, "Local does not support DP: its uploads are whole models, which no broadcast"),
    ("fedpd", {"fraction_train": 1.0, "p": 0.5}, "p: expected 0 with DP, got 0.5"),
    ("fedavg", {"plugins": [DP(where="client")]}, "expected one of dp.epsilon and dp.noise-multi"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "more", "line"), REFUSED)
def test_what_would_leak_beside_the_noise_is_refused_in_one_line(
    name: str, more: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=line) as error:
        METHODS[name](**{**SETTINGS, "plugins": [LOCAL], **more})
    assert "\n" not in str(error.value)
