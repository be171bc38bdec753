"""A method is its file and its reference: a copy of the repository gets one and passes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fedaccord import simulate
from fedaccord.core import Cohort, Direction, LocalConfig, LocalRule, Model, option
from fedaccord.core.folder import class_of, classes
from fedaccord.core.options import options
from fedaccord.strategies import DFedAvg, FedAdam, FedAvg, FederatedStrategy
from fedaccord.strategies.fedadam import Adaptive
from fedaccord.strategies.fedavg import FedAvgClient
from tests.strategies import test_references
from tests.strategies.toy import reference
from tests.strategies.toy.fedtoy import FedToy, FedToyClient

REPOSITORY = Path(__file__).resolve().parents[2]
TOY = Path(__file__).parent / "toy"
ENUMERATING = [  # tests that go over the methods, and are quick; the slow test has all
    *("tests/strategies/test_references.py", "tests/strategies/test_costs.py"),
    *("tests/strategies/test_weighting.py", "tests/wire/test_states.py", "tests/test_config.py"),
]
WITHOUT = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "dist", "*.egg-info")


SYNC_AND_TEST = """
import sys, pytest, sync
arguments, sys.argv[1:] = sys.argv[1:], []
sync.main()
sys.exit(pytest.main(arguments))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository with one method more."""
    root = tmp_path / "copy"
    shutil.copytree(REPOSITORY, root, ignore=shutil.ignore_patterns(*WITHOUT), symlinks=True)
    shutil.copy(TOY / "fedtoy.py", root / "fedaccord" / "strategies")
    shutil.copy(TOY / "reference.py", root / "tests" / "reference" / "fedtoy.py")
    return root


def check(root: Path, *arguments: str) -> str:
    """Run tools/sync.py and tests of a copy. Raises AssertionError if one of them fails."""
    paths = os.pathsep.join([str(root), str(root / "tools")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    marks = ("-m", "not flower and not data and not slow", "--ignore", "tests/outside")
    result = subprocess.run(
        [sys.executable, "-c", SYNC_AND_TEST, "-p", "no:cacheprovider", *marks, *arguments],
        **{"cwd": root, "env": environment, "capture_output": True, "text": True},
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]
    return result.stdout


def test_a_method_is_two_files(copy: Path) -> None:
    """Tests of every method have its name."""
    which = "fedtoy or FedToy"
    out = check(copy, "-n", "0", "-vv", "-k", which, *ENUMERATING)
    assert "docs/methods/fedtoy.md written" in out
    for test in (
        "test_equals_the_dense_reference[FedToy-0.2-0.8-relaxed-some-minibatch]",
        "test_through_messages_equals_the_dense_reference[FedToy-0.2-0.8]",
        "test_a_method_costs_what_the_table_says[fedtoy]",
        "test_a_client_with_n_examples_counts_for_n_clients[fedtoy]",
    ):
        assert f"{test} PASSED" in out


def test_a_wrong_method_is_found() -> None:
    """The toy with another sign than its reference."""

    class WrongClient(FedToyClient):
        def direction(self, *arguments: Any) -> Direction:
            return Direction(shift=-super().direction(*arguments).shift)

    class Wrong(FedToy):
        def rule(self) -> LocalRule:
            return WrongClient(self.gamma)

    [case] = reference.CASES
    compare = test_references.test_equals_the_dense_reference
    for kind, outcome in ((FedToy, nullcontext()), (Wrong, pytest.raises(AssertionError))):
        with outcome:
            compare(test_references.Case(kind, reference, **case), 0.0, test_references.SOME, None)


def test_a_file_with_no_method_or_with_two_is_one_line() -> None:
    class One(FedAvg):
        pass

    class Two(FedAvg):
        pass

    for kinds, names in (([], "none"), ([One, Two], "One, Two"), ([Adaptive], "none")):
        module = ModuleType("fedaccord.strategies.adaptive")
        for kind in kinds:
            kind.__module__, before = module.__name__, kind.__module__
            setattr(module, kind.__name__, kind)
        with pytest.raises(TypeError, match=rf"expected one subclass .*, got {names}; if it has"):
            class_of(module, FederatedStrategy)
        for kind in kinds:
            kind.__module__ = before
    assert class_of(import_module("fedaccord.strategies.fedadam"), FederatedStrategy) is FedAdam


def test_a_copied_file_whose_class_was_not_renamed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `fedaccord.strategies.FedAvg` would be the copy."""
    package = tmp_path / "copies"
    package.mkdir()
    text = (REPOSITORY / "fedaccord" / "strategies" / "fedavg.py").read_text("utf-8")
    for file, client in (("__init__", ""), ("one", "OneClient"), ("two", "TwoClient")):
        own = text.replace("FedAvgClient", client) if client else ""
        (package / f"{file}.py").write_text(own, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = "^copies.two: expected a class with a name of its own, got FedAvg, also that of copies.o"
    with pytest.raises(TypeError, match=line):
        classes("copies", [str(package)], FederatedStrategy)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda w: w, "a Tensor"),
        (lambda w: (None, w), r"\(NoneType, Tensor\)"),
        (lambda w: (w, w), r"\(Tensor, Tensor\)"),
    ],
)
@pytest.mark.parametrize("topology", ["star", "ring"])
def test_a_server_step_that_is_no_pair_is_one_line(
    result: Callable[[Tensor], Any], text: str, topology: str
) -> None:
    class Half(FedAvg if topology == "star" else DFedAvg):  # type: ignore[misc]
        def aggregate(self, w: Tensor, *_: Any) -> Any:
            return result(w)

    line = rf"^Half.aggregate: expected \(w, state\), the next model as a tensor .*, got {text}$"
    with pytest.raises(TypeError, match=line):
        simulate(Half(), dataset="digits", num_clients=4, rounds=1)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda w: w[..., :3], r".*3,?\) in torch.float32"),
        (lambda w: w.double(), ".* in torch.float64"),
    ],
)
@pytest.mark.parametrize("topology", ["star", "ring"])
def test_a_next_model_of_another_shape_or_type_is_one_line(
    result: Callable[[Tensor], Tensor], text: str, topology: str
) -> None:
    class Half(FedAvg if topology == "star" else DFedAvg):  # type: ignore[misc]
        def aggregate(self, w: Tensor, ups: Any, state: Any, cohort: Cohort) -> Any:
            return result(cohort.mean(ups.w)), state

    line = rf"^Half.aggregate: expected the next model as w, .* in torch.float32, got {text}$"
    with pytest.raises(TypeError, match=line):
        simulate(Half(), dataset="digits", num_clients=4, rounds=1)


@pytest.mark.parametrize("asks", [True, False])
def test_a_state_has_the_first_model_if_it_asks_for_it(asks: bool) -> None:
    """Else it would begin with w^t, without a word."""
    models: list[Any] = []

    @dataclass(frozen=True)
    class AsksClient(FedAvgClient):
        needs_w_init = asks

        def init(self, w: Tensor, w_init: Tensor, config: Any) -> Any:
            models.append(w_init)
            return Kept(w)

    class Asks(FedAvg):
        def rule(self) -> LocalRule:
            return AsksClient()

    simulate(Asks(), dataset="digits", num_clients=4, rounds=2, participation=[[0, 1], [2, 3]])
    assert {isinstance(w_init, Tensor) for w_init in models} == {asks}


def test_a_server_state_that_is_no_named_tuple_is_one_line() -> None:
    class Half(FedAvg):
        def init(self, w: Tensor) -> Any:
            return torch.zeros_like(w)

    line = r"^Half.init: expected the server state as a NamedTuple of vectors, got a Tensor; a"
    with pytest.raises(TypeError, match=line):
        simulate(Half(), dataset="digits", num_clients=4, rounds=1)


class Kept(NamedTuple):
    m: Tensor


class Pair(NamedTuple):
    w: Tensor
    c: Tensor


@pytest.mark.parametrize("half", ["client", "server"])
def test_a_message_of_another_type_than_the_client_half_declares_is_one_line(half: str) -> None:
    """In process the client half would read it, on a device it could not."""

    @dataclass(frozen=True)
    class ReadsClient(FedAvgClient):
        receives = Pair if half == "client" else Model

        def direction(self, down: Any, state: Any, config: Any) -> Direction:
            return Direction(shift=down.c)

    class Reads(FedAvg):
        def rule(self) -> LocalRule:
            return ReadsClient()

        def broadcast(self, w: Tensor, state: Any, client: Any) -> Any:
            return Model(w) if half == "client" else Pair(w, torch.zeros_like(w))

    kinds = ["Pair", "Model"] if half == "client" else ["Model", "Pair"]
    line = r"^Reads.broadcast: expected a {}, which ReadsClient.receives declares, got a {}$"
    with pytest.raises(TypeError, match=line.format(*kinds)):
        simulate(Reads(), dataset="digits", num_clients=4, rounds=1)


@pytest.mark.parametrize("argument", ["w", "an upload", "state"])
def test_a_server_step_that_changes_its_arguments_is_one_line(argument: str) -> None:
    class Half(FedAvg):
        def init(self, w: Tensor) -> Any:
            return Kept(torch.zeros_like(w))

        def aggregate(self, w: Tensor, ups: Any, state: Any, cohort: Cohort) -> Any:
            {"w": w, "an upload": ups.w[0], "state": state.m}[argument].mul_(0.5)
            return cohort.mean(ups.w), state

    line = (
        r"^Half.aggregate: expected unchanged arguments, got .*; return new vectors, e.g. w - x, "
    )
    with pytest.raises(TypeError, match=line):
        simulate(Half(), dataset="digits", num_clients=4, rounds=1)


@pytest.mark.parametrize("verb", ["init", "upload", "remember"])
def test_a_client_half_that_returns_another_type_is_one_line(verb: str) -> None:
    results = {"init": lambda v: {"m": v}, "upload": lambda v: v, "remember": lambda v: None}

    @dataclass(frozen=True)
    class HalfClient(FedAvgClient):
        def init(self, w: Tensor, *_: Any) -> Any:
            return results["init"](w) if verb == "init" else Kept(w)

        def upload(self, w_K: Tensor, *_: Any) -> Any:
            return results["upload"](w_K) if verb == "upload" else Model(w_K)

        def remember(self, read: Any, down: Any, state: Any, result: Any) -> Any:
            return results["remember"](read) if verb == "remember" else state

    class Half(FedAvg):
        def rule(self) -> LocalRule:
            return HalfClient()

    expected = {"init": "the client's state as a NamedTuple of vectors, got a dict"}
    expected |= {"upload": "a Model, got a Tensor", "remember": "a Kept, got a NoneType"}
    with pytest.raises((TypeError, RuntimeError), match=rf"HalfClient.{verb}: .* {expected[verb]}"):
        simulate(Half(), dataset="digits", num_clients=4, rounds=5)


@pytest.mark.parametrize(
    ("of", "line"),
    [
        (lambda w_init: w_init, "got None; w_init is None unless needs_w_init is True$"),
        (lambda _: 0, "got 0$"),
    ],
)
def test_a_client_state_with_anything_but_vectors_is_one_line(
    of: Callable[[Any], Any], line: str
) -> None:
    @dataclass(frozen=True)
    class TallyClient(FedAvgClient):
        def init(self, w: Tensor, w_init: Any, config: Any) -> Any:
            return Kept(of(w_init))

    class Tally(FedAvg):
        def rule(self) -> LocalRule:
            return TallyClient()

    with pytest.raises(TypeError, match=f"^TallyClient.init: expected a vector as m, {line}"):
        simulate(Tally(), dataset="digits", num_clients=4, rounds=1)


@pytest.mark.parametrize(("result", "text"), [(None, "a NoneType"), (FedAvgClient, "a class")])
def test_a_rule_that_is_no_client_half_is_one_line(result: Any, text: str) -> None:
    class Forgets(FedAvg):
        def rule(self) -> Any:
            return result

    line = f"^rule: expected it to return an instance of a LocalRule, got {text}$"
    with pytest.raises(TypeError, match=line):
        simulate(Forgets(), dataset="digits", num_clients=4, rounds=1)


@pytest.mark.parametrize(
    ("verb", "result", "line"),
    [
        ("start", None, "a vector as w_i0, got None"),
        ("start", torch.ones(3), r"w_i0 of shape \(..., 56\), as the model, got \(3,\)"),
        ("direction", None, "a Direction, got a NoneType"),
        ("direction", Direction(shift=torch.ones(3)), r"shift of shape .*, got \(3,\)"),
        ("gradient", None, "the loss at w, got None"),
        ("upload", Model(torch.ones(3)), r"w of shape \(..., 56\), as the model, got \(3,\)"),
    ],
)
def test_a_hook_that_returns_no_vector_as_long_as_the_model_is_one_line(
    verb: str, result: Any, line: str
) -> None:
    """Found with a tiny model, whose costs are computed before a run."""
    kind = type("ShortClient", (FedAvgClient,), {verb: lambda *_: result})

    class Short(FedAvg):
        def rule(self) -> LocalRule:
            return kind()  # type: ignore[no-any-return]

    with pytest.raises((TypeError, ValueError), match=f"^ShortClient.{verb}: expected {line}$"):
        simulate(Short(), dataset="digits", num_clients=4, rounds=1)


def test_a_class_with_a_field_but_without_a_decorator_is_one_line() -> None:
    """Its options would be unknown, and another value of them never read."""

    class BareClient(FedAvgClient):
        strength: float = 0.1

    class Bare(FedAvg):
        kinds: ClassVar[tuple[str, ...]] = ()
        alpha: float = option(0.1, "a strength")

    class Heir(FedAvg):
        kinds: ClassVar[tuple[str, ...]] = ()

    line = r"^{}: expected @dataclass\(...\) above the class, as above {}, for its field {}$"
    with pytest.raises(TypeError, match=line.format("BareClient", "FedAvgClient", "strength")):
        BareClient()
    for use in (Bare, lambda: Bare(alpha=0.3), lambda: options(Bare)):
        with pytest.raises(TypeError, match=line.format("Bare", "FedAvg", "alpha")):
            use()
    assert Heir().kinds == ()


@pytest.mark.parametrize("verb", ["start", "direction", "upload", "remember"])
@pytest.mark.parametrize("argument", ["message", "state"])
@pytest.mark.parametrize("vectorize", ["off", "on"])
def test_a_client_half_that_changes_its_arguments_is_one_line(
    verb: str, argument: str, vectorize: str
) -> None:
    """Else the clients that train next would begin elsewhere, or a lost reply change a memory."""

    def change(where: str, down: Any, state: Any) -> None:
        if where == verb:
            {"message": down.w, "state": state.m}[argument].mul_(0.5)

    @dataclass(frozen=True)
    class ChangesClient(FedAvgClient):
        def init(self, w: Tensor, *_: Any) -> Any:
            return Kept(w.clone())

        def start(self, down: Any, state: Any, config: Any) -> Tensor:
            change("start", down, state)
            return super().start(down, state, config)

        def direction(self, down: Any, state: Any, config: Any) -> Any:
            change("direction", down, state)
            return super().direction(down, state, config)

        def upload(self, w_K: Tensor, down: Any, state: Any, result: Any) -> Any:
            change("upload", down, state)
            return super().upload(w_K, down, state, result)

        def remember(self, read: Any, down: Any, state: Any, result: Any) -> Any:
            change("remember", down, state)
            return state

    class Changes(FedAvg):
        def rule(self) -> LocalRule:
            return ChangesClient()

    line = r"^ChangesClient: expected unchanged vectors of the message and the client's state, got"
    with pytest.raises(TypeError, match=line):
        simulate(Changes(), dataset="digits", num_clients=4, rounds=1, vectorize=vectorize)


def test_a_client_state_of_another_shape_is_one_line() -> None:
    class CutClient(FedAvgClient):
        def init(self, w: Tensor, *_: Any) -> Any:
            return Kept(w)

        def remember(self, read: Any, down: Any, state: Any, result: Any) -> Any:
            return Kept(state.m[:3])

    class Cut(FedAvg):
        def rule(self) -> LocalRule:
            return CutClient()

    line = r"CutClient.remember: expected m of shape \(\d+,\) as before, got \(3,\)"
    with pytest.raises(ValueError, match=line):
        simulate(Cut(), dataset="digits", num_clients=4, rounds=5)


def test_a_client_half_whose_fields_cannot_travel_is_one_line() -> None:
    @dataclass(frozen=True)
    class LadderClient(FedAvgClient):
        mus: Any

    class Ladder(FedAvg):
        def rule(self) -> LocalRule:
            return LadderClient((0.1, 0.2))

    line = r"^expected numbers, strings and booleans as fields of LadderClient, .*mus=\(0.1, 0.2\)$"
    with pytest.raises(ValueError, match=line):
        simulate(Ladder(), dataset="digits", num_clients=4, rounds=1)


def test_the_number_of_steps_is_known_before_the_first_one() -> None:
    """Also with rates that do not fall, one client at a time and in a cohort."""
    seen = []

    class CountsClient(FedAvgClient):
        def direction(self, down: Any, state: Any, config: LocalConfig) -> Direction:
            seen.extend(torch.as_tensor(config.steps).flatten().tolist())
            return super().direction(down, state, config)

    class Counts(FedAvg):
        def rule(self) -> LocalRule:
            return CountsClient()

    data = [(torch.randn(n, 3), torch.randn(n, 1)) for n in (4, 9)]
    settings = {"batch_size": 4, "local_epochs": 2, "fraction_train": 1.0}
    for vectorize in ("off", "on"):
        simulate(
            Counts(**settings), clients=data, model=nn.Linear(3, 1), rounds=1, vectorize=vectorize
        )
        assert {*seen} - {1} == {2, 6}  # a trial of the hooks has one step
        seen.clear()


class Change(NamedTuple):
    delta: Tensor


def test_an_upload_without_a_model_is_averaged() -> None:
    """The change of the model in place of the model."""

    @dataclass(frozen=True)
    class ChangeClient(LocalRule):
        sends = Change

        def upload(self, w_K: Tensor, down: Any, state: Any, result: Any) -> Any:
            return Change(w_K - down.w)

    class SendsChanges(FederatedStrategy):
        def rule(self) -> LocalRule:
            return ChangeClient()

        def aggregate(self, w: Tensor, ups: Any, state: Any, cohort: Cohort) -> Any:
            return w + cohort.mean(ups.delta), state

    assert ChangeClient().models == ()
    settings: dict[str, Any] = {"precision": "float64", "local_steps": 2, "fraction_train": 1.0}
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]
    model = nn.Linear(3, 1)
    changes, models = (
        simulate(kind(**settings), clients=data, model=model, rounds=2)
        for kind in (SendsChanges, FedAvg)
    )
    for name, value in models.model.items():
        torch.testing.assert_close(changes.model[name], value, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_whole_suite_passes_with_it(copy: Path) -> None:
    check(copy, "-n", "2", "tests", "--ignore", "tests/strategies/test_a_new_method.py")
