"""Flower's simulation with Flower's own FedAvg, an actor of one CPU for each process of the job."""

import sys

from flower_app import JOB, client_app, replies, server_app
from flwr.simulation import run_simulation

if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=len(JOB["cohorts"][0]),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": JOB["processes"], "num_gpus": 0},
        },
    )
    if replies != (expected := [len(cohort) for cohort in JOB["cohorts"]]):
        sys.exit(f"expected {expected} replies in the rounds, got {replies}")
