"""Data sets by name, decoded once, and which client holds which samples."""
