"""The papers' tables, run again: `fedaccord reproduce`.

tables/*.toml: the papers' numbers, a file a table; table.py: its cells, with their settings;
study.py: their runs, by the sweep's workers; results.py and page.py: their results as CSV and page.
"""

from fedaccord.experiments.reproduce.study import Study
from fedaccord.experiments.reproduce.table import Cell, Table, find, tables

__all__ = ["Cell", "Study", "Table", "find", "tables"]
