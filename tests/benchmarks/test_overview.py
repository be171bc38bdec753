"""The page of benchmarks/overview.py, from the pages of tuned methods."""

import math
from pathlib import Path

import accuracy
import overview
import pytest

PAGE = """# Tuned methods on Fashion-MNIST: 800 rounds, 5% of 200 clients, Dirichlet 0.6

Models are evaluated every 10 rounds.

| method | values | accuracy | points |  | validation | rounds | gradients | GB | gradients |
| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |
| scaffold | lr 1 | 88.79 ± 0.10% | +0.50 ± 0.08 | above | 89% | 237 ± 2 | 1 | 7.50 ± 1 | 1,000 |
| fedavg | lr 1 | 88.29 ± 0.16% | – |  | 89.2% | 320 ± 53 | 1 | 5.00 ± 0.84 | 1,000 |
| fedsam | lr 1, sam.rho 0.01 | 87.02% | -1.27 ± 0.10 | below | 89% | 500 (2 of 3) | 1 | 9 | 2,000 |
"""


def test_a_page_is_read_as_multiples_of_fedavg(tmp_path: Path) -> None:
    (tmp_path / "tuned.md").write_text(PAGE)
    page = overview.read(tmp_path, "tuned")
    assert page.column == "[5% of 200, Dirichlet 0.6, 800 rounds](tuned.md)"
    sent = 7.5 / 237 / (5 / 320)
    rounds = pytest.approx((230 + 240 + 240) / (3 * 320))  # 237 was rounded
    assert page.gains["scaffold"] == overview.Gain(0.5, 0.08, "above", rounds, 1.0, sent)
    fedsam = page.gains["fedsam"]
    assert (fedsam.text, fedsam.gradients) == ("*-1.27* ± 0.10", 2.0)
    assert math.isnan(fedsam.rounds)  # not all seeds reached the target
    assert math.isnan(fedsam.sent)
    assert page.values["fedsam"] == {"lr": 1.0, "sam.rho": 0.01}
    assert overview.winners([page, page])[2:] == ["| fedsam | sam.rho | 0.1 | 0.01 (2) |"]
    assert overview.order([page]) == ["scaffold", "fedsam"]
    (tmp_path / "tuned.md").write_text("# Devices")
    with pytest.raises(ValueError, match=r"tuned\.md: expected a page of tuned methods"):
        overview.read(tmp_path, "tuned")


def test_the_overview_is_that_of_the_pages() -> None:
    page = (accuracy.RESULTS / f"{overview.PAGE}.md").read_text()
    assert page == overview.text(accuracy.RESULTS), "run python benchmarks/overview.py"
