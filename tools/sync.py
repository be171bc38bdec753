"""What is written twice is written from the code: run-config keys, lists, tables, pages of docs.

The page of docs/results/reproduction.csv too, which `fedaccord reproduce` writes as well.

    python tools/sync.py            # write what is stale in pyproject.toml, README.md and docs
    python tools/sync.py --check    # write nothing; exit 1 and name the files that would change

CI and pre-commit run the second.
"""

import argparse
import json
import sys
from pathlib import Path

import pages

from fedaccord.cli.columns import columns_markdown
from fedaccord.config import config_toml, default, keys
from fedaccord.core.options import FREE
from fedaccord.experiments.analysis.groups import OPTIONS
from fedaccord.experiments.reproduce import tables
from fedaccord.experiments.reproduce.page import as_markdown
from fedaccord.experiments.reproduce.results import merged
from fedaccord.plugins import PLUGINS
from fedaccord.strategies import BUILT_IN, METHODS

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where stale")
    check = parser.parse_args().check
    if others := [name for name in METHODS if name not in BUILT_IN]:
        print(f"expected FedAccord's own methods, got {others[0]!r} too: uninstall its package")
        return 1
    changes = stale(ROOT)
    for path, text in changes.items():
        print(f"{path.relative_to(ROOT)} {'is stale' if check else 'written'}")
        if not check:
            write(path, text)
    if check and changes:
        print("run `uv run python tools/sync.py`")
    return int(check and bool(changes))


def stale(root: Path) -> dict[Path, str | None]:
    """The files below ``root`` that differ from the code, and what they should be; None: gone."""
    pyproject, readme = root / "pyproject.toml", root / "README.md"
    folder = root / "docs" / "methods"
    wanted: dict[Path, str | None] = dict.fromkeys(folder.glob("*"))
    wanted |= {folder / name: text for name, text in pages.pages().items()}
    wanted[pyproject] = replaced(pyproject, config_toml(), "[tool.flwr.app.config]", "[tool.hatch")
    wanted[readme] = replaced(readme, pages.readme_list(), "<summary>The", "</details>")
    tables_of = {"strategies": ("BUILT_IN:", BUILT_IN), "plugins": ("PLUGINS:", PLUGINS)}
    for name, (after, table) in tables_of.items():
        package = root / "fedaccord" / name / "__init__.py"
        lines = pages.imports(table.values())
        wanted[package] = replaced(package, lines, "if TYPE_CHECKING:", after)
    wanted[root / "fedaccord/experiments/analysis" / OPTIONS.name] = options_json()
    metrics = root / "docs" / "metrics.md"
    wanted[metrics] = replaced(metrics, columns_markdown(), "## metrics.csv", "## Using")
    results = root / "docs" / "results" / "reproduction.csv"
    page = as_markdown(tables(), merged(results, []), results.name)
    wanted[results.with_suffix(".md")] = page
    return {path: text for path, text in sorted(wanted.items()) if text != read(path)}


def options_json() -> str:
    """Every key with its default and whether it affects the numbers of a run, a line each."""
    lines = []
    for key, field in keys().items():
        pair = default(field), field.metadata["affects"] not in FREE
        lines.append(f"  {json.dumps(key)}: {json.dumps(pair)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def replaced(path: Path, new: str, first: str, after: str) -> str:
    """A file's text with ``new`` from the line ``first...`` up to the line ``after...``."""
    text = path.read_text("utf-8")
    begin = text.find(f"\n{first}") + 1
    end = text.find(f"\n{after}", begin)
    if not begin or end < 0:
        raise SystemExit(
            f"{path.name}: expected a line that begins with {first!r}, and {after!r} after it"
        )
    return text[:begin] + new + text[end:]


def read(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None


def write(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
