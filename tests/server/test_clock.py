"""What remains of a run."""

from fedaccord.federation.eta import Eta


def test_the_mean_round_times_the_rounds_that_are_left() -> None:
    now = 100.0
    eta = Eta(2, 10, clock=lambda: now)  # resumes after two rounds
    assert eta(2) == ""
    now = 112.0
    assert eta(3) == "0:01:24 left"  # 7 rounds of 12 s
    now = 120.0
    assert eta(4) == "0:01:00 left"  # 6 of 10 s
    assert eta(10) == ""
