"""Commands check every setting before they write."""

from pathlib import Path

import pytest
import tomli_w

from tests.cli.shell import TINY, invoke, refusal
from tests.experiments.sweep.plans import content

OUT = ("--out", "{}/out")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("run", *TINY, "out-dir={}/out", "lr=-1"), "lr: expected above 0"),
        (
            ("run", *TINY, "out-dir={}/out", "name=x", "keep-best=client-loss"),
            "keep-best: expected",
        ),
        (
            ("run", *TINY, "out-dir={}/out", "schedule=buffered"),
            "schedule: expected synchronous without simulated devices",
        ),
        (("sweep", "{}/sweep.toml", "lr-decay=2", *OUT), "lr-decay: expected"),
        (("sweep", "{}/sweep.toml", "min-replies=9", *OUT), "min-replies: expected at most 2"),
        (("sweep", "{}/sweep.toml", "max-examples=1", *OUT), "max-examples: expected at least"),
        (
            ("reproduce", "lenet", "data-dir={}", "download=false", *OUT),
            "has no cifar-10-batches-py",
        ),
        (("reproduce", "lenet", "lr=-1", *OUT, "--page", "{}/docs/a.md"), "lr: expected above 0"),
        (("reproduce", "lenet", "--cells", "fedavgg/*", *OUT), "--cells: expected a name"),
        (
            (
                "deploy",
                "init",
                "{}/out",
                "--supernodes",
                "1",
                "--host",
                "a.example",
                "--host",
                "a b",
            ),
            "--host: expected a host name",
        ),
        (("deploy", "key", "{}/out"), "expected the server's or a device's folder"),
    ],
)
def test_one_bad_setting_leaves_no_folder(
    words: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(tomli_w.dumps(content()))
    assert line in refusal(tmp_path, invoke(*(word.replace("{}", str(tmp_path)) for word in words)))
    assert [*tmp_path.iterdir()] == [file]
