"""`fedaccord report`: a comparison of runs in one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from fedaccord.cli.compare import At, Metric, Runs, Target, note_compared, read_groups
from fedaccord.cli.console import check_output, make_console, refusing, stop
from fedaccord.process.allocator import uncollected
from fedaccord.storage.files import is_special


@uncollected()
def report(
    runs: Runs,
    target: Target = None,
    at: At = None,
    metric: Metric = "",
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML file that compares runs and opens in a browser without a network.

    It shows curves with their spread over seeds, the table of `fedaccord compare`, accuracy against
    bytes, gradients, seconds, simulated seconds and epsilon, the clients' classes and
    participation, the effect of settings, versions and commit. Examples:

    fedaccord report ~/fedaccord-runs/first ~/fedaccord-runs/second

    fedaccord report my-sweep --out my-sweep.html
    """
    check_output("--out", out)
    is_pipe = is_special(out)  # e.g. /dev/stdout
    if out.suffix != ".html" and not is_pipe:
        stop(f"--out: expected a file that ends in .html, got {out}; name one", 2)
    groups = read_groups(runs)
    from fedaccord.experiments.analysis.groups import tested
    from fedaccord.experiments.analysis.ranking import main_metric

    compared = tested(groups)
    with refusing(ValueError):
        note_compared(groups, compared, main_metric(compared, metric), at)
    from fedaccord.experiments.analysis.notebook import write_page

    try:
        path = write_page(groups, out, target, at, metric)
    except (ImportError, ValueError) as error:
        stop(error, 2)
    except OSError as error:
        stop(f"--out: cannot write {out} ({error.strerror})", 2)
    if not is_pipe:
        make_console().print(f"report: {path}", soft_wrap=True)
