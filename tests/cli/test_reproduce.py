"""`fedaccord reproduce`: its lists and runs, how it resumes, and one line for each error."""

from pathlib import Path

import pandas as pd
import pytest

from tests.cli.shell import invoke, refusal, success

SMALL = ("dataset=digits", "model=linear", "num-clients=4", "local-epochs=1", "threads=1")
CELLS = ("--cells", "fed*n*t/*", "--cells", "fedavg/dir-0.1")


def reproduce(folder: Path, *words: object) -> tuple[int, str, str]:
    result = invoke("reproduce", "lenet", *SMALL, "--workers", 1, "--out", folder, *words)
    return result.exit_code, result.stdout, result.stderr


def test_a_second_start_continues_with_more_seeds_and_rounds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, stdout, stderr = reproduce(out, "--seeds", 1, "--rounds", 2, *CELLS)
    assert (code, stderr) == (0, "")
    lines = stdout.splitlines()
    assert [line.split("  ")[:2] for line in lines[:-2]] == [
        ["run 1/3", "fedavg/dir-0.1"],
        ["run 2/3", "fedinit/dir-0.1"],
        ["run 3/3", "fedinit/dir-0.6"],
    ]
    assert lines[-2:] == [f"page: {out / 'reproduction.md'}", f"runs: {out}"]
    first = pd.read_csv(out / "reproduction.csv")
    assert [*first.rounds] == [2, 2, 2]
    assert reproduce(out, "--seeds", 2, "--rounds", 3, *CELLS)[0] == 0
    second = pd.read_csv(out / "reproduction.csv")
    assert [*second.rounds] == [3] * 6
    page = (out / "reproduction.md").read_text()
    changes = "dataset=digits local-epochs=1 model=linear num-clients=4"
    assert f"| `fedavg/dir-0.1` with `{changes}` | – | 3 of 300 | 2 |" in page
    assert "Not run: 11 of 14 cells." in page


def test_the_order_of_the_settings_makes_no_other_result(tmp_path: Path) -> None:
    words = ("--seeds", 1, "--rounds", 1, "--cells", "fedavg/dir-0.1")
    for pairs in (("lr=0.2", "lr-decay=1.0"), ("lr-decay=1.0", "lr=0.2")):
        assert reproduce(tmp_path, *words, *pairs)[0] == 0
    table = pd.read_csv(tmp_path / "reproduction.csv")
    assert len(table) == 1
    changed = "dataset=digits local-epochs=1 lr-decay=1.0 lr=0.2 model=linear num-clients=4"
    assert table["changed"].tolist() == [changed]


def test_the_page_is_written_to_the_given_path_and_keeps_earlier_results(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    for number, cell in enumerate(("fedavg/dir-0.1", "fedavg/dir-0.6"), 1):
        more = ("--seeds", 1, "--rounds", 1, "--cells", cell, "--page", page)
        assert reproduce(tmp_path / f"out{number}", *more)[0] == 0
        assert len(pd.read_csv(page.with_suffix(".csv"))) == number
        assert page.read_text().count("1 of 300") == number


def test_tables_and_cells_are_listed() -> None:
    tables = success(invoke("reproduce", "--list"))
    assert any(line.split()[:2] == ["fl-simulator", "80"] for line in tables.stdout.splitlines())
    cells = invoke("reproduce", "fl-simulator", "--list", "--cells", "fedsmoo/*")
    words = [line.split() for line in cells.stdout.splitlines()]
    assert ["fedsmoo/5%-200/dir-0.1", "1000", "81.35"] in words
    assert sum(line[:1] != [] and line[0].startswith("fed") for line in words) == 8


def test_a_dry_run_prints_the_cost_and_writes_nothing(tmp_path: Path) -> None:
    code, stdout, stderr = reproduce(tmp_path / "out", "--seeds", 2, *CELLS, "--dry-run")
    assert (code, stderr) == (0, "")
    rows = [line.split() for line in stdout.splitlines()]
    # 300 rounds of 1 client with 8 steps; digits: 1,437 samples in batches of 50
    assert [row[:4] for row in rows if row[:1] == ["fedavg/dir-0.1"]] == [
        ["fedavg/dir-0.1", "2", "300", "2,400"]
    ]
    assert "6 runs; about " in stdout
    assert "hours left with 1 process" in stdout
    assert not (tmp_path / "out").exists()


def test_a_dry_run_needs_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are computed from the facts of the data set; nothing is fetched."""
    monkeypatch.setenv("FEDACCORD_CACHE", str(tmp_path))
    for own in ((), ("download=false",), (f"data-dir={tmp_path}",)):
        result = invoke("reproduce", "fedinit-table3", "--dry-run", *own)
        assert (result.exit_code, result.stderr) == (0, "")
        rows = [line.split() for line in result.stdout.splitlines()]
        # 500 rounds of 10 clients with 5 epochs of 10 batches
        assert ["beta=0.1/10%-100/dir-0.1", "3", "500", "250,000", "–"] in rows
        assert "24 runs; estimating the hours needs the data: add data-dir=" in result.stdout
        has_note = result.stdout.strip().endswith(f"cifar10, which is not in {tmp_path}")
        assert has_note == (len(own) > 0 and own[0].startswith("data-dir="))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "expected a TABLE, got none; `fedaccord reproduce --list`"),
        (("fedint-table1",), "got 'fedint-table1' (did you mean 'fedinit-table1'?)"),
        (("lenet",), "--out: expected a folder for the runs, got none"),
        (
            ("lenet", "--out", "/proc/x"),
            "--out: cannot write to /proc/x (No such file or directory)",
        ),
        (("lenet", "--workers", "9999"), "--workers: expected at most "),
        (("lenet", "metrics=f1"), "got metrics=f1 evaluation=server: add accuracy to metrics"),
        (("lenet", "metrics=top-5-accuracy"), "got metrics=top-5-accuracy evaluation=server: add"),
        (("lenet", "evaluation=clients"), "got metrics=accuracy evaluation=clients: add"),
        (("lenet", "--cells", "fedavgg/*"), "--cells: expected a name or pattern"),
        (("lenet", "--out", "x", "--page", "x.csv"), "--page: expected a Markdown file, beside"),
        (("lenet", "--out", "{}/o", "--page", "{}"), "--page: expected a file in an existing"),
        (("lenet", "--out", "{}/o", "--page", "/dev/null/x.md"), "--page: expected a folder for "),
        (("lenet", "seed=3"), "seed: `reproduce` sets it for each run; leave it out"),
        (("lenet", "lr"), "expected key=value, e.g. lr=0.05, got 'lr'"),
        (("lenet", "--seeds", "0"), "Invalid value for '--seeds'"),
    ],
)
def test_bad_input_gives_one_line(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    given = [word.replace("{}", str(tmp_path)) for word in words]
    assert message in refusal(tmp_path, invoke("reproduce", *given))


def test_a_file_that_is_no_page_of_results_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "page.csv").write_text("mine\n1\n")
    page = tmp_path / "page.md"
    code, _, stderr = reproduce(tmp_path / "out", "--rounds", 1, "--page", page)
    assert code == 2
    assert "choose another --page" in stderr
    assert not (tmp_path / "out" / "runs").exists()
