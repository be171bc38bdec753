"""Many runs: presets, sweeps, the papers' tables, and their analysis."""
