"""Run directories: written and read in one place."""

from fedaccord.runs.directory import (
    RUNNING,
    RunDirectory,
    flatten,
    load_model,
    place,
    status,
    tables,
)

__all__ = ["RUNNING", "RunDirectory", "flatten", "load_model", "place", "status", "tables"]
