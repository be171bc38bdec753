"""The repository's app on a SuperLink and SuperNodes, one process each, as on real devices."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fedaccord import engine, simulate
from fedaccord.config import RunConfig
from fedaccord.federation.errors import last_line
from fedaccord.task import datasets
from fedaccord.wire.records import pack
from fedaccord.wire.tensor_array import to_tensor
from tests.cli.shell import invoke
from tests.flower.conftest import REPOSITORY, Flower, assert_same_run, running, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]

PAGE = REPOSITORY / "docs" / "deployment.md"
STATES = Path(__file__).parent / "states"
SCAFFOLD = {
    "algo": "scaffold",
    "relaxed-init.beta": 0.05,
    "fraction-train": 1.0,
    "num-server-rounds": 2,
    "local-epochs": 1,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    with running(tmp_path_factory.mktemp("deployment") / "home", simulation=False) as flower:
        flower.start_supernodes(*(f"partition-id={i} num-partitions=2" for i in range(2)))
        yield flower


def test_same_bits_and_client_states_as_in_process(two: Flower, tmp_path: Path) -> None:
    """A client's state lives in its SuperNode's memory, by run, and dies with it. To read it, the
    app runs with two components around FedAccord's: when the rounds are over, the server asks and
    each client tells.
    """
    config: dict[str, Any] = SCAFFOLD | {"out-dir": str(tmp_path)}
    outcome = two.run(with_own_components(tmp_path / "app"), config | {"name": "there"})
    assert outcome.status == "finished:completed", outcome.output
    engine.run(RunConfig.make(config | {"name": "here", "num-clients": 2, "vectorize": "off"}))
    assert_same_run(tmp_path / "there", tmp_path / "here")

    history = simulate("scaffold", rounds=2, **settings(SCAFFOLD), num_clients=2)
    for client, state in enumerate(history.clients):
        found = load_file(tmp_path / "there" / f"client-{client}.safetensors")
        expected = pack(state)
        assert found.keys() == expected.keys() == {"last", "base.c_i"}
        for name, array in expected.items():
            assert torch.equal(found[name], to_tensor(array)), (client, name)
            assert found[name].count_nonzero()

    reason = last_line((tmp_path / "there" / "unknown-rule.txt").read_text())
    assert "expected a message with a LocalRule that this client knows, got 'antigravity" in reason


def test_without_a_server_on_the_same_supernodes(two: Flower, tmp_path: Path) -> None:
    """Gossip through the relay, masks, and personal models evaluated at their nodes. It is also the
    second run on these SuperNodes, which must begin anew.
    """
    config: dict[str, Any] = SCAFFOLD | {
        "algo": "dispfl",
        "relaxed-init.beta": 0.0,
        "eval-every": 2,
    }
    config |= {"out-dir": str(tmp_path)}
    outcome = two.run(REPOSITORY, config | {"name": "there"})
    assert outcome.status == "finished:completed", outcome.output
    engine.run(RunConfig.make(config | {"name": "here", "num-clients": 2, "vectorize": "off"}))
    assert_same_run(tmp_path / "there", tmp_path / "here")
    assert "personal-accuracy-last" in json.loads((tmp_path / "there/summary.json").read_text())


def test_a_wrong_setting_fails_with_one_line(two: Flower, tmp_path: Path) -> None:
    outcome = two.run(REPOSITORY, {"algo": "fedinot", "out-dir": str(tmp_path)})
    assert outcome.status == "finished:failed", outcome.output
    (line,) = [line for line in outcome.output.splitlines() if "fedinot" in line]
    assert "Traceback" not in outcome.output
    assert "algo: expected one of" in line
    assert "did you mean 'fedinit'?" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_node_that_does_not_know_its_number_says_so(lab: Flower, tmp_path: Path) -> None:
    lab.start_supernodes("num-partitions=3")
    outcome = lab.run(REPOSITORY, SCAFFOLD | {"out-dir": str(tmp_path), "name": "there"})
    assert outcome.status == "finished:failed", outcome.output
    reason = "no client could start: expected an integer 'partition-id' in this node's config, got "
    (line,) = [line for line in outcome.output.splitlines() if reason in line]
    assert "--node-config" in line
    assert json.loads((tmp_path / "there" / "summary.json").read_text())["status"] == "failed"


def test_the_page_says_what_works(tmp_path: Path) -> None:
    """The commands of docs/deployment.md, with this machine's address, ports and files; then with
    the path of one site wrong.
    """
    flower = Flower(tmp_path / "home", simulation=False)
    text = PAGE.read_text().replace("0.0.0.0", "127.0.0.1").replace("192.0.2.10", "127.0.0.1")
    text = text.replace("8000", str(flower.port)).replace("/data/", f"{tmp_path}/")
    text = text.replace("num-server-rounds=50", "num-server-rounds=2")
    (entry,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    (link,), nodes, (listed, run), (doctor,), (_, _) = (
        [shlex.split(line.removeprefix("uv run ")) for line in block.splitlines()]
        for block in blocks
    )
    train = digits_files(tmp_path)
    result = invoke(*doctor[1:], FEDACCORD_CACHE=str(tmp_path / "cache"))
    assert result.exit_code == 0, result.output

    flower.configure(entry)
    try:
        flower.start_superlink(*link)
        flower.start_nodes(*nodes)
        assert flower._flwr(*listed[1:]).count("online") == 2
        run[run.index(".")] = str(REPOSITORY)
        outcome = flower.run_words(*run[1:])
        assert outcome.status == "finished:completed", outcome.output
        (folder,) = (tmp_path / "runs").iterdir()
        clients = pd.read_csv(folder / "clients.csv").groupby("client")["num-examples"]
        assert [set(examples) for _, examples in clients] == [{count} for count in train]
        assert json.loads((folder / "summary.json").read_text())["test-accuracy-last"] > 0.5

        for _ in nodes:
            flower.end_last()
        wait_until(lambda: not flower._nodes_online(), "the SuperNodes' end", flower.log)
        flower.start_nodes([word.replace("site-b.npz", "site-x.npz") for word in nodes[1]])
        outcome = flower.run_words(*run[1:])
    finally:
        flower.stop()
    assert outcome.status == "finished:failed", outcome.output
    missing = f"partition-id=1: npz: expected a .npz file, found no file {tmp_path}/site-x.npz"
    for what in ("is left out", "FederationError"):
        (line,) = [line for line in outcome.output.splitlines() if what in line]
        assert missing in line


def digits_files(folder: Path) -> list[int]:
    """The digits as the page's files; the numbers of the sites' training samples."""
    digits = datasets.load("digits")
    x, x_test = (images.movedim(1, -1).numpy() for images in (digits.x_train, digits.x_test))
    y = digits.y_train.numpy()
    cut = 500
    test = {"x_test": x_test, "y_test": digits.y_test.numpy()}
    for name, part in (("site-a", slice(cut)), ("site-b", slice(cut, None)), ("test", slice(50))):
        np.savez(folder / f"{name}.npz", x_train=x[part], y_train=y[part], **test)
    return [cut, len(y) - cut]


def with_own_components(folder: Path) -> Path:
    """The app in ``states``, with the run-config keys of the repository's app."""
    shutil.copytree(STATES, folder)
    pyproject = (REPOSITORY / "pyproject.toml").read_text()
    for side in ("server_app", "client_app"):
        assert f"fedaccord.apps:{side}" in pyproject
        pyproject = pyproject.replace(f"fedaccord.apps:{side}", f"statesapp.{side}:app")
    (folder / "pyproject.toml").write_text(pyproject.replace('"fedaccord"', '"states"'))
    return folder


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a run config that `simulate` takes as they are."""
    return {k: v for k, v in config.items() if k not in ("algo", "num-server-rounds")}
