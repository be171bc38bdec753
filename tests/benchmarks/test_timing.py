"""The pages of timings: the command that makes one, sections by hand, results of other options."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import cohort
import load
import methods
import precision
import pytest
import ray_path
import ray_path_page
import rounds
import scale
import timing
import torch


def test_a_command_has_every_option_that_is_not_its_default() -> None:
    parser = timing.parser("benchmarks/some.py", "A script.\n")
    timing.add_options(parser)
    timing.add_out(parser)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--limit", type=float, default=2e9)
    parser.add_argument("--sizes", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    assert timing.command(parser, parser.parse_args([])) == "python benchmarks/some.py"
    page = str(timing.REPOSITORY / "docs" / "page.md")
    words = ["a b", "--check", "--repetitions", "3", "--out", "/mine/it.json", "--limit", "1.5e9"]
    options = parser.parse_args([*words, "--sizes", "1", "3", "--markdown", page, "--one", "x"])
    assert timing.command(parser, options) == (
        "python benchmarks/some.py 'a b' --repetitions 3 --check --markdown docs/page.md --out OUT "
        "--limit 1500000000 --sizes 1 3"
    )


def test_pages_name_the_options_that_they_were_made_with() -> None:
    words = ["--active", "2", "--markdown", "docs/results/rounds.md"]
    options = rounds.arguments().parse_args(words)
    text = rounds.page({name: [1.0, 1.1] for name in rounds.CONTESTANTS}, options)
    assert "`python benchmarks/rounds.py --markdown docs/results/rounds.md --active 2`" in text
    text = cohort.page([], [], cohort.arguments().parse_args(["--repetitions", "5"]))
    assert "`python benchmarks/cohort.py --repetitions 5`" in text
    options = methods.arguments().parse_args(["--models", "lenet", "--repetitions", "2"])
    text = methods.page({"lenet": [dict.fromkeys(methods.COMPARED, (1.0, 1.0))]}, options)
    assert "`python benchmarks/methods.py --repetitions 2 --models lenet`" in text
    assert "Not measured yet" not in text


def test_methods_that_a_table_lacks_are_named() -> None:
    few = [name for name in methods.COMPARED if name not in ("ditto", "fedexp")]
    options = methods.arguments().parse_args([*few, "--models", "lenet"])
    text = methods.page({"lenet": [dict.fromkeys(few, (1.0, 1.0))]}, options)
    assert "Not measured yet: ditto, fedexp." in text
    assert "scaffnew" not in text  # its steps are not as many as FedAvg's


def test_sections_by_hand_stay(tmp_path: Path) -> None:
    page = tmp_path / "precision.md"
    page.write_text("# Old\n\n## Accuracy\n\nold\n\n## Seconds\n\nby hand\n")
    timing.rewrite(page, "# Old\n\n## Accuracy\n\nnew\n")
    assert page.read_text() == "# Old\n\n## Accuracy\n\nnew\n\n## Seconds\n\nby hand\n"
    timing.rewrite(page, "# Old\n\n## More\n\nmore\n", own=["## Accuracy"])
    assert page.read_text() == "# Old\n\n## Seconds\n\nby hand\n\n## More\n\nmore\n"


def test_the_section_of_precision_is_written_again_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "precision.md"
    page.write_text("# bfloat16 beside float32\n\n## Accuracy\n\nold\n\n## Seconds\n\nby hand\n")
    monkeypatch.setattr(precision, "accuracy", lambda _: 50.0)
    monkeypatch.setattr(sys, "argv", ["", "--out", "runs", "--seeds", "1", "--markdown", str(page)])
    precision.main()
    assert "old" not in page.read_text()
    assert "| fedavg | 50.00 (50.00 to 50.00) |" in page.read_text()
    assert f"benchmarks/precision.py --out OUT --seeds 1 --markdown {page}`" in page.read_text()
    assert page.read_text().endswith("\n\n## Seconds\n\nby hand\n")


def test_the_tables_of_scale_are_written_again_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "scale.md"
    by_hand = "## 100 clients\n\nby hand\n"
    own = f"\n{scale.heading('cnn fedavg')}\n\nold\n"
    page.write_text(f"# Registered clients\n\nold\n\n{by_hand}{own}")
    row = {"start": 1.0, "seconds": [1.0], "at-start": 1, "at-end": 1}
    monkeypatch.setattr(scale, "in_a_process", lambda _, clients, __: row | {"clients": clients})
    monkeypatch.setattr(sys, "argv", ["scale.py", "linear fedavg", "--markdown", str(page)])
    scale.main()
    text = page.read_text()
    assert "old" not in text
    assert "cnn fedavg" not in text
    assert scale.heading("linear fedavg") in text
    assert by_hand in text
    assert f"`python benchmarks/scale.py 'linear fedavg' --markdown {page}`" in text


def test_the_table_of_one_model_leaves_that_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, ratios = tmp_path / "methods.md", dict.fromkeys(methods.COMPARED, (1.0, 1.0))
    other = "## ResNet-18\n\n| fedavg |\n"
    page.write_text(
        f"# What a round of each method costs\n\noutdated\n\n{other}\n## Targets\n\noutdated\n"
    )
    monkeypatch.setattr(methods, "measure", lambda model, all, _: all.update({model: [ratios]}))
    monkeypatch.setattr(timing, "prepare", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["", "--models", "lenet", "--markdown", str(page)])
    methods.main()
    text = page.read_text()
    assert "outdated" not in text
    assert other in text
    assert "## LeNet" in text


def test_versions_are_compared_by_cpu_seconds(tmp_path: Path) -> None:
    before, now = tmp_path / "before.json", tmp_path / "now.json"
    before.write_text(json.dumps({"steps": {"one thread": [2.0, 2.0]}}))  # as an earlier version
    seconds = {"seconds": {"steps": {"one thread": [1.0, 1.0]}}}
    now.write_text(json.dumps({"clock": "cpu"} | seconds))
    row = ray_path_page.comparison([before, now], "").splitlines()[-1]
    assert row.startswith("| steps | one thread | 1 |")
    assert row.endswith("| 0.50 (0.50 to 0.50) |")
    now.write_text(json.dumps({"clock": "wall"} | seconds))
    with pytest.raises(SystemExit, match=r"expected CPU seconds, got others: .* --clock cpu$"):
        ray_path_page.comparison([before, now], "")


def test_cohort_refuses_options_that_it_does_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--device", "cuda"], ["--out", "it.json"]):
        with pytest.raises(SystemExit):
            cohort.arguments().parse_args(words)
        assert f"unrecognized arguments: {words[0]}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_timing_on_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rounds.py", "--device", "cuda"])
    with pytest.raises(
        SystemExit, match=r"^--device: expected a GPU, found none: use --device cpu$"
    ):
        rounds.main()


@pytest.mark.parametrize(
    ("script", "results", "other"),
    [
        (load, [{"nodes": 30}], "--algo scaffold"),
        (load, [{"nodes": 30}], "--limit 1e9"),
        (ray_path, {"steps": {}}, "--clock cpu"),
        (ray_path, {"steps": {}}, "--repetitions 7"),
    ],
)
def test_results_of_other_options_are_not_used_again(
    tmp_path: Path, script: Any, results: Any, other: str
) -> None:
    out = tmp_path / "out.json"
    name = "measurements" if script is load else "seconds"
    options = script.arguments().parse_args(["--out", str(out)])
    assert not script.earlier(options)
    out.write_text(json.dumps(script.made_with(options) | {name: results}))
    assert script.earlier(options) == results
    options = script.arguments().parse_args(["--out", str(out), *other.split()])
    with pytest.raises(SystemExit, match=f"out.json has results of other options: .*{other[:8]}"):
        script.earlier(options)
    out.write_text(json.dumps(results))  # as an earlier version wrote it
    with pytest.raises(SystemExit, match="has results of other options"):
        script.earlier(options)
