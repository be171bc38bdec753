"""What every number of a run directory means: the source of docs/metrics.md, `--list-columns`."""

from fedaccord.core.metrics import METRICS as NAMED
from fedaccord.runs.metrics import (
    BEST,
    EVALUATED,
    LAST,
    MEAN,
    METRICS,
    WINDOW,
    Column,
)

ACCEPTED = "accepted replies"
ALWAYS = "always"

CLIENTS = (
    Column("round", "r, from 1 on", "", "all"),
    Column("client", "number of the client, its partition-id, from 0", "", "all"),
    Column("status", "ok, or why its reply was dropped", "", "all"),
    Column(
        "repair",
        "what the server did about a client that lost its state",
        "",
        "clients that lost it",
    ),
    Column("num-examples", "training samples of the client", "samples", ACCEPTED, "client"),
    Column(
        "train-loss",
        "mean over its local steps of the loss on the step's batch, before the step; without "
        "weight decay, prox and dual terms",
        "of the loss (nats)",
        ACCEPTED,
        "client",
    ),
    Column("steps", "local steps K_i", "steps", ACCEPTED, "client"),
    Column("up-vectors", "vectors of d numbers in its reply", "d", ACCEPTED),
    Column("up-bytes", "their bytes as numbers, without headers", "bytes", ACCEPTED),
    Column(
        "seconds",
        "wall clock of its local round at the client, from the message to the reply, without their "
        "way and without waiting for its turn; of clients in one call its share of the steps",
        "s",
        ACCEPTED,
        "client",
    ),
)

CLASSES = (
    Column("client", "number of the client", "", "all", "data set"),
    Column(
        "<class>",
        "training samples of the class that the client holds, counted as often as it holds them",
        "samples",
        "the first 1,000 clients, in process",
        "data set",
    ),
)

SUMMARY = (
    Column(
        "status",
        "running, completed, interrupted (Ctrl-C, SIGTERM, SIGHUP) or failed; shown as dead "
        "if it says running and no process writes the folder",
        "",
        ALWAYS,
    ),
    Column("reason", "what ended the run", "", "failed runs"),
    Column("rounds", "rounds that were run", "rounds", ALWAYS, "metrics.csv"),
    Column("rounds-counted", "sum of counted", "rounds", ALWAYS, "metrics.csv"),
    Column("seconds", "wall clock of the run so far, with evaluation", "s", ALWAYS),
    Column(
        f"<metric>{LAST}",
        f"{', '.join(c.name for c in METRICS if c.kind == EVALUATED)}: when it was last evaluated; "
        "round 0 does not count",
        "of the metric",
        "evaluated metrics",
        "metrics.csv",
    ),
    Column(
        f"<metric>{MEAN}",
        f"mean of its last {WINDOW} evaluations, or of all where there are fewer; without round 0",
        "of the metric",
        "evaluated metrics but generalisation-gap",
        "metrics.csv",
    ),
    Column(
        f"<metric>{BEST}",
        "largest or smallest value, whichever is better, of any evaluation; without round 0. It is "
        "chosen on the test samples: compare runs by the mean of the last 10",
        "of the metric",
        "evaluated metrics but generalisation-gap",
        "metrics.csv",
    ),
    Column("replies", "sum over the rounds", "replies", ALWAYS, "metrics.csv"),
    Column("dropped", "sum over the rounds", "replies", ALWAYS, "metrics.csv"),
    Column("down-bytes", "sum over the rounds", "bytes", ALWAYS, "metrics.csv"),
    Column("up-bytes", "sum over the rounds", "bytes", ALWAYS, "metrics.csv"),
    Column("peer-bytes", "sum over the rounds", "bytes", "without a server", "metrics.csv"),
    Column("clients", "clients C that were there before round 1", "clients", ALWAYS),
    Column(
        "partition.duplicated",
        "distinct training samples held more than once, by several clients or twice by one",
        "samples",
        "in process",
        "data set",
    ),
    Column(
        "partition.unused",
        "training samples that no client holds",
        "samples",
        "in process",
        "data set",
    ),
    Column("gossip.topology", "name of the graph", "", "without a server", "settings"),
    Column("gossip.nodes", "nodes m", "nodes", "without a server", "settings"),
    Column("gossip.steps", "gossip steps Q a round", "steps", "without a server", "settings"),
    Column("gossip.spectral-gap", "spectral-gap of round 1", "1", "without a server", "settings"),
)

METRIC_NAMES = tuple(
    Column(
        name,
        metric.meaning,
        metric.unit,
        "class labels" if metric.of_classes else "numbers as targets",
        better=metric.better,
    )
    for name, metric in NAMED.items()
)

TABLES = {
    "metrics.csv": METRICS,
    "Metrics by name": METRIC_NAMES,
    "clients.csv": CLIENTS,
    "classes.csv": CLASSES,
    "summary.json": SUMMARY,
}
