"""Run directories: written and read only here."""

from fedaccord.runs.directory import (
    COMPLETED,
    RUNNING,
    RunDirectory,
    flatten,
    load_model,
    make,
    place,
    status,
    tables,
)

__all__ = [
    "COMPLETED",
    "RUNNING",
    "RunDirectory",
    "flatten",
    "load_model",
    "make",
    "place",
    "status",
    "tables",
]
