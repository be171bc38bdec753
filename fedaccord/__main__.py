"""`python -m fedaccord`: the command line, if its script is not on the path."""

from fedaccord.cli import app

if __name__ == "__main__":
    app()
