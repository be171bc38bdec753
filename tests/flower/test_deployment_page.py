"""The commands of docs/deployment.md: a reader's first federation of two sites."""

import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from tests.cli.shell import invoke
from tests.flower.conftest import REPOSITORY, Flower, digits_files, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = REPOSITORY / "docs" / "deployment.md"


def test_the_page_says_what_works(tmp_path: Path) -> None:
    """With this machine's address, ports and files; then with the path of one site wrong."""
    flower = Flower(tmp_path / "home", simulation=False)
    text = PAGE.read_text().replace("0.0.0.0", "127.0.0.1").replace("192.0.2.10", "127.0.0.1")
    text = text.replace("8000", str(flower.port)).replace("/data/", f"{tmp_path}/")
    text = text.replace("num-server-rounds=50", "num-server-rounds=2")
    (entry,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    _, (link,), nodes, (listed, run), (doctor,), (_, _) = (
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
        wait_until(lambda: not flower._nodes_online(), "their end", flower.log)
        flower.start_nodes([word.replace("site-b.npz", "site-x.npz") for word in nodes[1]])
        outcome = flower.run_words(*run[1:])
    finally:
        flower.stop()
    assert outcome.status == "finished:failed", outcome.output
    missing = f"partition-id=1: npz: expected a .npz file, found no file {tmp_path}/site-x.npz"
    for what in ("is left out", "FederationError"):
        (line,) = [line for line in outcome.output.splitlines() if what in line]
        assert missing in line
