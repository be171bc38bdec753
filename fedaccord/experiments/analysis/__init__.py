"""Measures, tables, figures and reports of run directories."""
