"""The runs behind a page in one small file: settings and tables, no models.

    python benchmarks/archive.py pack DIR docs/results/runs/NAME.tar.xz
    python benchmarks/archive.py unpack docs/results/runs/NAME.tar.xz DIR

DIR has run directories, at any depth, or sweeps, and may have tables beside them. Unpacked, they
are runs that ended: `fedaccord compare` and `report` read them, a benchmark makes its page from
them, and it or a sweep runs only what is missing. Left out are runs that neither completed nor
failed, settings that are paths, and what clients measured; the rows from which costs are counted
are there.
"""

import argparse
import io
import lzma
import sys
import tarfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import data
import pandas as pd
import tomli_w

from fedaccord.config import paths
from fedaccord.runs import COMPLETED, flatten, reader, status
from fedaccord.runs.directory import FAILED
from fedaccord.runs.origin import DIRTY
from fedaccord.storage.files import replace

KEPT = data.REPOSITORY / "docs" / "results" / "runs"
ROUNDING = (
    ", which round differently (equal runs on both, also of another commit, differ: those of "
    "FedInit in `beta` and `bound-10` of [claims](claims.md) by up to 0.13 points at beta 0.1 and "
    "1.25 at 0.15, and 18 of LeNet-5 in [tuned-cifar10-06](tuned-cifar10-06.md) by up to 1.3)"
)
OF_RUN = ("config.toml", "metrics.csv", "clients.csv", "summary.json", "measures.json")
OF_CLIENTS = ("round", "client", "status", "num-examples", "steps")
OF_SWEEP = ("*.csv", "*.toml", "defaults.json", "run.json", "rows/*.json")
BESIDE_RUNS = ("*.csv", "*.json")  # of what has no run directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    try:
        count = {"pack": pack, "unpack": unpack}[options.what](options.source, options.target)
    except (OSError, EOFError, ValueError, tarfile.TarError, lzma.LZMAError) as error:
        sys.exit(f"{options.source}: {' '.join(str(error).split())}")
    print(f"{options.target}: {count} files")


def pack(folder: Path, archive: Path) -> int:
    """The number of files. Equal runs give equal bytes."""
    folder = folder.resolve()
    files = sorted(_files(folder))
    archive.parent.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as tar:
        for file in files:
            content = SHORTER.get(file.name, Path.read_bytes)(file)
            info = tarfile.TarInfo(file.relative_to(folder).as_posix())
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    replace(archive, packed.getvalue())
    return len(files)


def unpack(archive: Path, folder: Path) -> int:
    """The number of files; what is there already stays. Raises TarError for an unsafe name."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        missing = [member for member in tar if not (folder / member.name).exists()]
        tar.extractall(folder, members=missing, filter="data")
    return len(missing)


def sentence(page: str, runs: Iterable[reader.StoredRun] = ()) -> str:
    """For the end of a page of docs/results: where its runs come from, and their archive, if there
    is one of its name."""
    text = origin([*runs])
    if not (KEPT / f"{page}.tar.xz").exists():
        return text
    return (
        f"{text} [runs/{page}.tar.xz](runs/{page}.tar.xz) has the tables of these runs: "
        "[how to read them](../../benchmarks/archive.py)."
    )


def origin(runs: Sequence[reader.StoredRun]) -> str:
    """The commits and processors of runs, in a sentence; empty: there are no runs."""
    if not runs:
        return ""
    commits = {run.commit.removesuffix(DIRTY) for run in runs}
    changed = sum(run.commit.endswith(DIRTY) for run in runs)
    processors = sorted({str(run.used["cpu"]) for run in runs if "cpu" in run.used})
    return (
        f" The {len(runs)} runs are of {len(commits)} commit{'s' * (len(commits) > 1)}"
        + (f", {changed} of them with changes that were not committed" if changed else "")
        + (f", on {' and '.join(processors)}" if processors else "")
        + (ROUNDING if len(processors) > 1 else "")
        + "; `config.toml` of each has its own."
    )


def _files(folder: Path) -> set[Path]:
    """Raises ValueError if there is no completed run."""
    ended = {run: status(run) for run in reader.find([folder])}
    if COMPLETED not in ended.values():
        raise ValueError("expected completed runs, found none")
    runs = [run for run, how in ended.items() if how in (COMPLETED, FAILED)]
    files = {run / name for run in runs for name in OF_RUN}
    files |= {file for pattern in BESIDE_RUNS for file in folder.glob(pattern)}
    for defaults in folder.rglob("defaults.json"):
        files |= {file for pattern in OF_SWEEP for file in defaults.parent.glob(pattern)}
    return {file for file in files if file.exists()}


def _without_paths(config: Path) -> bytes:
    """The settings of a run but for those that are paths: they are of one machine."""
    content = tomllib.loads(config.read_text(encoding="utf-8"))
    for key in paths(flatten(content["run"])):
        *tables, name = key.split(".")
        place = content["run"]
        for table in tables:
            place = place[table]
        del place[name]
    return tomli_w.dumps(content).encode()


def _counted(clients: Path) -> bytes:
    table = pd.read_csv(clients)
    columns = [name for name in OF_CLIENTS if name in table]
    return table.to_csv(columns=columns, index=False).encode()


SHORTER = {"config.toml": _without_paths, "clients.csv": _counted}


if __name__ == "__main__":
    main()
