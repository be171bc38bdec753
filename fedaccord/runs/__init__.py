"""Run directories: written and read in one place."""

from fedaccord.runs.directory import RunDirectory, flatten, place, status, tables

__all__ = ["RunDirectory", "flatten", "place", "status", "tables"]
