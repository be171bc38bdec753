"""Code for another process that ends where it would load PyTorch."""

ENDS_AT_PYTORCH = """
import os, sys

class End:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print({}, flush=True)
            os._exit(0)

sys.meta_path.insert(0, End())
"""  # {}: what it prints then, an expression
