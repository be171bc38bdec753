"""Measures, tables, figures and reports of run directories."""

INSTALL = "in the clone of FedAccord type `uv sync --extra report --inexact`"
