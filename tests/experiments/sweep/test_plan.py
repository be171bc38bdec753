"""A sweep's file: invalid files, configurations and their names, equal gradients."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedaccord import config
from fedaccord.config import RunConfig, in_use
from fedaccord.experiments.sweep import Plan
from fedaccord.experiments.sweep.configuration import _samples
from fedaccord.experiments.sweep.plan import LISTS, keys, managed_keys
from tests.experiments.sweep.plans import content, make

PAGE = Path(__file__).parents[3] / "docs" / "sweeps.md"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sweeps": {}}, r"expected the tables sweep, run and space, got 'sweeps' \(did you mean"),
        ({"run": 3}, r"expected a table \[run\], got 3"),
        ({"run": {"lr-decay": [1.0]}}, r"\[run\] lr-decay: expected one value, .*; move it to \["),
        ({"sweep": {"what": 1}}, r"\[sweep\]: unknown key 'what'; known: .*, seeds, test-seeds"),
        ({"sweep": {"target": 90.0}}, r"\[sweep\] target: expected a share in \[0, 1\], e.g. 0.9"),
        ({"sweep": {"serach": "grid"}}, r"\[sweep\]: unknown key 'serach' \(did you mean 'search'"),
        ({"sweep": {"search": "bayes"}}, r"\[sweep\] search: expected one of grid, random"),
        ({"sweep": {"trials": 0}}, r"\[sweep\] trials: expected at least 1, got 0"),
        ({"sweep": {"validation": 0.0}}, r"\[sweep\] validation: expected above 0"),
        ({"sweep": {"validation": 1.0}}, r"\[sweep\] validation: expected .* at most 0.9"),
        ({"sweep": {"metric": "accuracy-best"}}, r"\[sweep\] metric: expected one of accuracy-m"),
        (
            {"sweep": {"metric": "personal-accuracy-last"}, "space": {"algo": ["local", "fedavg"]}},
            r"\[sweep\] metric=personal-accuracy-last: expected methods .* own, got fedavg;",
        ),
        (
            {"sweep": {"metric": "client-accuracy-last"}},
            r"metric=client-accuracy-last: expected .* = \"clients\" or \"both\", got 's",
        ),
        (
            {"run": {"evaluation": "clients"}},
            r"metric=accuracy-mean-of-last-10: expected .*, or metric=\"client-accuracy-mean",
        ),
        (
            {
                "sweep": {"metric": "loss-last"},
                "space": {"algo": ["fedavg"], "loss": ["auto", "tests.own:doubled"]},
            },
            r"\[sweep\] metric=loss-last: expected a metric other than the loss, which \[space\]",
        ),
        ({"sweep": {"metric": "accuracy-at-x"}}, r"e.g. accuracy-at-3600, got 'accuracy-at-x'"),
        (
            {"sweep": {"metric": "accuracy-at-60"}},
            r"\[sweep\] metric=accuracy-at-60: expected \[run\] device-profile, .* got \"none\"",
        ),
        (
            {
                "sweep": {"search": "halving"},
                "space": {"algo": ["fedsam"], "fedsam": {"num-server-rounds": [9, 90]}},
            },
            r"\[space\] fedsam.num-server-rounds: expected it in \[run\] with search=halving",
        ),
        (
            {"run": {"fedsam": {"lr": 0.3}}, "space": {"algo": ["fedsam"], "lr": [0.1]}},
            r"fedsam.lr: expected it in \[run.fedsam\] or lr in \[space\], got both; use \[space.f",
        ),
        (
            {"sweep": {"workers": 10_000, "ray-address": "local"}},
            r"\[sweep\] workers: expected at most \d+, the cores of this machine, got 10000",
        ),
        ({"sweep": {"seeds": 3}}, r"\[sweep\] seeds: expected a list of integers"),
        ({"sweep": {"seeds": [0, 0]}}, r"\[sweep\] seeds: expected different seeds"),
        ({"sweep": {"test-seeds": [-1]}}, r"seed: expected at least 0, got -1"),
        ({"sweep": {"search": "asha"}}, r"\[sweep\] search=asha: expected a ray-address"),
        ({"sweep": {"tune": False, "search": "halving"}}, r"\[sweep\] tune=false: expected search"),
        ({"sweep": {"fair": "trials"}}, r"\[sweep\] fair=trials: expected a search other than"),
        ({"run": {"seed": 1}}, r"^seed: a sweep sets it .* choose by seeds and validation of \[sw"),
        ({"space": {"fedavg": {"seed": [1]}}}, r"fedavg.seed: a sweep sets it"),
        ({"run": {"validation": 0.2}}, r"validation: a sweep sets it"),
        ({"run": {"resume": True}}, r"resume: a sweep sets it"),
        ({"run": {"algo": "fedavg"}}, r"algo: expected it in \[run\] or in \[space\], got both"),
        ({"run": {"lr": 0.1}}, r"^lr: expected it in \[run\] or in \[space\], got both; leave one"),
        ({"space": {"algo": ["fedagv"]}}, r"algo: expected one of .*did you mean 'fedavg'"),
        ({"space": {"lr": [0.1, -1]}}, r"lr: expected above 0, got -1"),
        ({"space": {"lr": {"low": 0.1, "high": 1}}}, r"\[space\] lr: expected a list with search="),
        ({"space": {"lrr": [1]}}, r"unknown key 'lrr'"),
        ({"space": {"scaffold": {"lr": [1]}}}, r"scaffold is not among the methods of the sweep"),
        ({"run": {"num-clients": 0}}, r"num-clients: expected at least 1"),
    ],
)
def test_an_invalid_file_gives_one_line(change: dict[str, Any], message: str) -> None:
    file = content()
    with pytest.raises(ValueError, match=message) as error:
        Plan.make(file | {k: v if v == 3 else file.get(k, {}) | v for k, v in change.items()})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("search", ["random", "halving", "optuna"])
def test_both_ends_of_a_range_are_checked_first(search: str) -> None:
    for low, high in ((-1.0, 0.1), (0.1, 2.0)):
        with pytest.raises(ValueError, match="lr-decay: expected above 0 and at most 1"):
            make({"lr-decay": {"low": low, "high": high}}, search=search)


def test_a_configuration_is_named_by_the_settings_that_affect_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def name(**run: Any) -> str:
        (configuration,) = make(
            {}, {k.replace("_", "-"): v for k, v in run.items()}
        ).configurations("fedinit")
        return configuration.name

    usual = name()
    assert name(device="cpu") == name(checkpoint_every=3) == name(workers=2) == usual
    assert name(tracker="tensorboard") == name(state_dir="/a") == name(round_timeout=9.0) == usual
    assert name(lr=0.1) == usual  # the default
    defaults = config.defaults()
    later = {"fedinit.later": 1.0, "later": True}  # keys of a later version
    monkeypatch.setattr(config, "defaults", lambda: defaults | later)
    monkeypatch.setattr(config, "in_use", lambda run_config: in_use(run_config) | later)
    assert name() == usual
    others = [name(lr=0.2), name(num_server_rounds=4), name(eval_every=2), name(num_clients=5)]
    assert len({usual, *others}) == 5
    tuned = make({}).configurations("fedinit")[0]
    assert make({}).tested(tuned).name != tuned.name
    assert make({}).tested(tuned).config.flat["validation"] == 0


def test_a_name_depends_on_the_content_of_the_data_not_on_its_path(tmp_path: Path) -> None:
    def name(**run: Any) -> str:
        keys = {k.replace("_", "-"): str(v) for k, v in run.items()}
        return make({}, keys).configurations("fedinit")[0].name

    public = {"dataset": "cifar10"}
    assert name(data_dir="/a", **public) == name(data_dir="/b", **public) == name(**public)
    paths = {name: tmp_path / name for name in ("one", "moved", "other")}
    for each, value in zip(paths.values(), (1, 1, 2), strict=True):
        for folder in ("train/cat", "train/dog", "test/cat", "test/dog"):
            each.joinpath(folder).mkdir(parents=True)
            Image.new("L", (2, 2), value).save(each / folder / "1.bmp")
        images = np.full((3, 2), value, dtype=np.float32)
        labels = np.array([0, 1, 1])
        np.savez(each / "a.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
        each.joinpath("parts.json").write_text(f"[[{value}]]")
    for run, key, file in (
        ({"dataset": "npz"}, "data_dir", "a.npz"),
        ({"dataset": "image-folder"}, "data_dir", ""),  # files of equal sizes
        ({"dataset": "digits", "partition": "file"}, "partition_file", "parts.json"),
    ):
        names = {n: name(**{key: path / file}, **run) for n, path in paths.items()}
        assert names["one"] == names["moved"] != names["other"], run
    with pytest.raises(FileNotFoundError, match="none"):
        name(dataset="npz", data_dir="/none.npz")


def test_a_name_depends_on_the_code_of_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(function: str) -> str:
        run = {"model": f"nets_of_a_sweep:{function}"}
        return make({}, run).configurations("fedinit")[0].name

    file = tmp_path / "nets_of_a_sweep.py"
    file.write_text("def one(): ...\ndef two(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = name("one"), name("two")
    assert name("one") == before[0] != before[1]
    file.write_text(file.read_text() + "# changed\n")
    assert name("one") == before[0]  # which is imported here
    monkeypatch.delitem(sys.modules, "nets_of_a_sweep")
    assert name("one") not in before
    with pytest.raises(ValueError, match=r"^model: .* it has no 'three'$"):
        name("three")


def test_a_name_depends_on_the_samples_that_a_function_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(dataset: str) -> str:
        run = {"dataset": f"data_of_a_sweep:{dataset}", "data-dir": str(tmp_path)}
        _samples.cache_clear()
        return make({}, run).configurations("fedinit")[0].name

    (tmp_path / "data_of_a_sweep.py").write_text(
        "import numpy as np\n"
        "def data(data_dir):\n"
        "    x = np.load(data_dir + '/x.npy')\n"
        "    return (x, np.arange(4) % 2), (x, np.arange(4) % 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = []
    for value in (1.0, 2.0):
        np.save(tmp_path / "x.npy", np.full((4, 2), value, dtype=np.float32))
        names.append(name("data"))
    assert names[0] != names[1] == name("data")


def test_other_configurations_change_no_name() -> None:
    few = make({"lr": [0.1]}).configurations("fedinit")
    many = make({"lr": [0.05, 0.1], "clip-norm": [10.0]}).configurations("fedinit")
    assert {c.name for c in few} < {c.name for c in many}


def test_methods_with_twice_the_gradients_get_half_the_steps() -> None:
    space = {"algo": ["fedavg", "fedsam", "fedspeed"]}
    plan = make(space, {"local-steps": 10})
    steps = {m: plan.configurations(m)[0].config.flat["local-steps"] for m in plan.methods}
    assert steps == {"fedavg": 10, "fedsam": 5, "fedspeed": 5}
    (fedsam,) = make(space).configurations("fedsam")  # 2 epochs
    assert fedsam.config.flat["local-epochs"] == 1
    (alone,) = make({"algo": ["fedsam"]}).configurations("fedsam")
    assert alone.config.flat["local-epochs"] == 2
    (as_is,) = make(space, fair="none").configurations("fedsam")
    assert as_is.config.flat["local-epochs"] == 2
    with pytest.raises(ValueError, match=r"^local-steps: expected a multiple of 2 with fair=steps"):
        make(space, {"local-steps": 5})


def test_each_configuration_gets_the_steps_of_its_own_gradients_and_is_labelled_by_them() -> None:
    for rhos in ([0.0, 0.1], [0.1, 0.0]):
        space = {"algo": ["fedavg"], "sam.rho": rhos, "local-steps": [10, 20]}
        plan = make(space)
        steps = {
            (c.point["sam.rho"], c.point["local-steps"]) for c in plan.configurations("fedavg")
        }
        assert steps == {(0.0, 10), (0.0, 20), (0.1, 5), (0.1, 10)}
        assert all(
            c.settings["local-steps"] == c.point["local-steps"]
            for c in plan.configurations("fedavg")
        )
    plan = make({"algo": ["fedavg"], "sam.rho": rhos}, search="random", trials=2, fair="trials")
    assert len(plan.configurations("fedavg")) == 1


def test_methods_with_twice_the_gradients_get_half_the_configurations() -> None:
    lr = {"algo": ["fedavg", "fedsam"], "lr": {"low": 0.01, "high": 0.1}}
    plan = make(lr, search="random", trials=7, fair="trials")
    by_method = {m: plan.configurations(m) for m in plan.methods}
    assert {m: len(each) for m, each in by_method.items()} == {"fedavg": 7, "fedsam": 4}
    assert by_method["fedsam"][0].config.flat["local-epochs"] == 2


@pytest.mark.parametrize("search", ["halving", "asha", "random"])
def test_a_budget_of_privacy_is_not_that_of_a_rung(search: str) -> None:
    private = {"sampling": "bernoulli", "fraction-train": 0.5, "dp.delta": 1e-3}
    own = {"search": search, "ray_address": "local"}
    make({"algo": ["fedavg"]}, private | {"dp.noise-multiplier": 1.0}, **own)
    budget = private | {"dp.epsilon": 4.0}
    if search == "random":
        make({"algo": ["fedavg"]}, budget, **own)
        return
    line = rf"^\[run\] dp.epsilon: expected dp.noise-multiplier with search={search}, got 4: as a "
    with pytest.raises(ValueError, match=line):
        make({"algo": ["fedavg"], "lr": [0.05, 0.1]}, budget, **own)
    make({"algo": ["fedavg"]}, budget, **own)  # nothing to choose from: no rungs


def test_losses_are_compared_by_another_metric() -> None:
    plan = make({"algo": ["fedavg"], "loss": ["auto", "tests.own:doubled"]})
    assert [c.point["loss"] for c in plan.configurations("fedavg")] == ["auto", "tests.own:doubled"]


def test_keys_without_effect_give_one_warning_for_each_method() -> None:
    plan = make({"algo": ["fedavg", "fedprox"]}, {"partition": "iid", "dirichlet-alpha": 0.1})
    assert len(plan.warnings()) == 2
    assert plan.warnings()[0].startswith("fedavg: dirichlet-alpha=0.1 has no effect")
    assert make().warnings() == []
    (line,) = make({"algo": ["fedavg"]}, {"fedprox": {"mu": 0.1}}).warnings()
    assert line == "[run.fedprox] has no effect: fedprox is not among the methods of the sweep"


def test_ranking_personal_models_by_the_mean_model_gives_a_warning() -> None:
    (line,) = make({"algo": ["feddeper", "local"]}).warnings()
    assert "feddeper, local: ranked by the mean model" in line
    assert line.endswith("metric=personal-accuracy-mean-of-last-10 in [sweep] ranks by them")
    own = {"metric": "personal-accuracy-last"}
    assert make({"algo": ["local"]}, **own).warnings() == []
    (line,) = make({"algo": ["local", "fedavg"]}).warnings()  # fedavg's clients have none
    assert line.startswith("local: ranked by the mean model")
    assert line.endswith("personal-accuracy-last reports the clients' own")
    assert make({"algo": ["fedavg", "dfedavg"]}).warnings() == []


def test_properties_of_a_plan() -> None:
    """Whether there is something to tune; which keys it sets; threads and vectorising are fixed."""
    assert managed_keys() == {"seed", "validation", "name", "out-dir", "resume"}
    assert not make({"algo": ["fedavg", "fedprox"]}).tunes
    assert make({"algo": ["fedavg", "fedprox"], "fedprox": {"mu": [0.1, 1]}}).tunes
    for run, fixed in (({}, (1, "off")), ({"threads": 2, "vectorize": "on"}, (2, "on"))):
        (usual,) = make({}, run).configurations("fedinit")
        assert (usual.config.threads, usual.config.vectorize) == fixed


def test_the_documentation_has_every_key_and_a_valid_example() -> None:
    text = PAGE.read_text()
    for key in [*LISTS, *(key for key, _ in keys())]:
        assert f"`{key}" in text, key
    example = text.partition("```toml\n")[2].partition("```")[0]
    plan = Plan.make(tomllib.loads(example))
    assert RunConfig.make({"algo": plan.methods[0]})
