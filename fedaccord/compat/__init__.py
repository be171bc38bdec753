"""What depends on one release of another package."""
