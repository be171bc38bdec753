"""The measures of a run."""

from pathlib import Path

from fedaccord.experiments.reproduce.measures import of_run
from fedaccord.runs import reader
from tests.experiments.analysis.made import write


def test_the_seconds_of_a_round_are_those_of_trained_rounds(tmp_path: Path) -> None:
    """Round 0 takes none; a round of the run takes 2."""
    assert of_run(reader.read(write(tmp_path, [0.1, 0.5, 0.7])), None)["seconds-a-round"] == 2
