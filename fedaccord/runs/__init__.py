"""Run directories: written and read in one place."""

from fedaccord.runs.directory import (
    RunDirectory,
    flatten,
    load_model,
    place,
    status,
    tables,
)

__all__ = ["RunDirectory", "flatten", "load_model", "place", "status", "tables"]
