"""A deployment's files: certificates, keys, start scripts, units, a folder for each machine."""
