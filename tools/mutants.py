"""The mistakes of tests/mutants.toml, one at a time: the tests named with each must notice it.

    python tools/mutants.py                  # all of them
    python tools/mutants.py FedDyn rounds    # those whose name or file contains one of the words

Each mistake is made in a temporary copy of the tree, where its tests must pass without it and fail
with it. A mistake that survives is a gap in the tests. One whose text does not stand in its file
exactly once does not apply any more: find the line that its name speaks of. Exit code 0: all were
noticed; 1: one survived, does not apply, or its tests fail without it.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 300  # seconds for the tests of a mistake


def main(words: list[str]) -> int:
    table = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / ROOT.name
        left_out = shutil.ignore_patterns(".*", "__pycache__", "mutants")
        shutil.copytree(ROOT, tree, ignore=left_out)
        for file, mistakes in table.items():
            for name, (old, new, tests) in mistakes.items():
                if words and not any(word.lower() in f"{file} {name}".lower() for word in words):
                    continue
                outcomes.append(outcome(tree, file, old, new, tests))
                print(f"{outcomes[-1]:26} {name}", flush=True)
    for kind in sorted({*outcomes}):
        print(f"{outcomes.count(kind)} {kind}")
    return int({*outcomes} != {"noticed"})


def outcome(tree: Path, file: str, old: str, new: str, tests: str) -> str:
    """What becomes of a mistake in a copy of the tree, which is afterwards as it was."""
    text = (tree / file).read_text("utf-8") if (tree / file).exists() else ""
    if text.count(old) != 1:
        return "DOES NOT APPLY"
    if not passes(tree, tests):
        return "TESTS FAIL WITHOUT IT"
    (tree / file).write_text(text.replace(old, new), "utf-8")
    try:
        return "SURVIVED" if _pytest(tree, tests) else "noticed"
    finally:
        (tree / file).write_text(text, "utf-8")


@cache
def passes(tree: Path, tests: str) -> bool:
    return _pytest(tree, tests)


def _pytest(tree: Path, tests: str) -> bool:
    """Whether tests on the package of ``tree`` pass; those that take too long have failed."""
    # bytecode of a file that changes within a second could be taken for that of another version
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *shlex.split(f"tests/{tests}")],
            cwd=tree,
            env=env,
            capture_output=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
