"""Code that depends on one release of another package."""
