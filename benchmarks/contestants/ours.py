"""This package: `fedaccord run` in process, with the clients of every round given."""

from common import read_job, report

from fedaccord.config import RunConfig
from fedaccord.engine import run
from fedaccord.federation.round import Round
from fedaccord.process.allocator import keep_freed_memory


def main() -> None:
    job = read_job()
    keep_freed_memory()  # as `fedaccord run` does
    config = RunConfig.make(job["keys"])
    run(config, cohorts=job["cohorts"], on_round=tell)


def tell(round: Round) -> None:
    if "test-accuracy" in round.metrics:
        report(round.number, round.metrics["test-accuracy"])


if __name__ == "__main__":
    main()
