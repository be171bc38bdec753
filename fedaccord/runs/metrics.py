"""The metrics of a round, the columns of metrics.csv: what each means and which way is better.

Row r of metrics.csv is the end of round r: clients were sent w^{r-1}, the server's step gave w^r.
Code that summarises, ranks, draws or prints a metric reads its properties here.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from fedaccord.core.metrics import MAX, MIN, SHARE
from fedaccord.core.metrics import METRICS as NAMED


class Column(NamedTuple):
    name: (
        str  # in metrics.csv <metric> stands for any of `NAMED`, in the summary for what it repeats
    )
    meaning: str  # the formula, of which model, on which data
    unit: str
    rows: str  # which rows have it
    source: str = "server"  # who measures it
    title: str = ""  # in words, of its curve; empty: it is not drawn
    kind: str = ""  # EVALUATED: the summary repeats it; SUMMED: the summary has its sum
    better: str = ""  # MAX, MIN, OWN; empty: neither, and the summary has no mean and no best of it


EVALUATED, SUMMED = "evaluated", "summed"
METRIC_NAME, OWN = "<metric>", "of the metric"  # a named metric; its own unit, or direction
DIFFERENCE = "-1 to 1"  # a unit; people read it in percent, as SHARE
COUNTED = "rounds that counted"
ASKED = "rounds from 1 on"
AT_EVALUATION = "0, every `eval-every` rounds, the last"
LOCAL = "rounds that counted, where clients send their model"
GRAPH = "rounds that counted, without a server"
BROADCAST = "as test-loss, where the two models differ"
NODES = "as test-loss, from round 1 on, without a server"
HELD_OUT = "as test-loss, with `validation` above 0"
TRAIN = "as test-loss, with `eval-train=true`"
PERSONAL = "as test-loss, once a client has one, with methods that have personal models"

METRICS = (
    Column("round", "r; 0 is the untrained model", "", "all"),
    Column(
        "train-loss",
        "mean over the accepted clients, weighted by num-examples, of their train-loss in "
        "clients.csv: of the local models as they move, not of one model",
        "of the loss (nats)",
        COUNTED,
        "clients",
        title="train loss of the local models",
        better=MIN,
    ),
    Column("replies", "replies that were good", "clients", ASKED, kind=SUMMED),
    Column(
        "dropped",
        "clients that were asked and gave no good reply; clients.csv has the reasons",
        "clients",
        ASKED,
        title="dropped replies",
        kind=SUMMED,
    ),
    Column(
        "counted",
        "1: at least `min-replies` replies were good and the server took its step; "
        "0: the model stayed",
        "0 or 1",
        ASKED,
    ),
    Column(
        "down-vectors",
        "vectors of d numbers that the server sent with training messages, summed over the cohort",
        "d",
        COUNTED,
    ),
    Column("down-bytes", "their bytes as numbers, without headers", "bytes", COUNTED, kind=SUMMED),
    Column("up-vectors", "vectors in the accepted replies, summed over them", "d", COUNTED),
    Column("up-bytes", "their bytes as numbers, without headers", "bytes", COUNTED, kind=SUMMED),
    Column(
        "drift",
        "client drift: mean over the accepted clients of ||w_{i,K} - w^{r-1}||^2, how far their "
        "local steps (and a relaxed start) took them from the model they were sent; without a "
        "server from each node's own model",
        "squared L2",
        LOCAL,
        title="client drift",
    ),
    Column(
        "consistency",
        "mean over the accepted clients of ||w_{i,K} - w^r||^2: Delta^t of FedInit "
        "(arXiv:2306.05706), there over all clients, here over the active ones",
        "squared L2",
        f"{LOCAL}, with a server",
        title="consistency",
    ),
    Column(
        "spread",
        "mean over the accepted clients of ||w_{i,K} - w_bar||^2, w_bar their mean; consistency "
        "is spread + ||w_bar - w^r||^2 with uniform weights, so both are equal for FedAvg",
        "squared L2",
        f"{LOCAL}, with a server",
        title="spread of the local models",
    ),
    Column(
        "consensus-before",
        "(1/m) sum over the nodes of ||w_i - mean||^2 before they mix, after their local steps",
        "squared L2",
        GRAPH,
        title="consensus distance before mixing",
    ),
    Column(
        "consensus-after",
        "the same of w^r, after the nodes mixed",
        "squared L2",
        GRAPH,
        title="consensus distance after mixing",
    ),
    Column(
        "spectral-gap",
        "1 - ||W - 11^T/m||, W the round's mixing matrix: the least share of the distance to "
        "consensus that a gossip step takes away",
        "1",
        GRAPH,
    ),
    Column(
        "peer-vectors",
        "vectors that nodes would send each other: a message a link, direction and gossip step",
        "d",
        GRAPH,
    ),
    Column("peer-bytes", "their bytes as numbers", "bytes", GRAPH, kind=SUMMED),
    Column(
        "seconds",
        "wall clock from the draw of the cohort to the server's step, without evaluation",
        "s",
        ASKED,
    ),
    Column(
        "test-loss",
        "mean loss over the test samples of the model that the method returns: w^r, for A-FedPD "
        "the mean of the local models, without a server the mean of the nodes",
        "of the loss (nats)",
        AT_EVALUATION,
        title="test loss",
        kind=EVALUATED,
        better=MIN,
    ),
    Column(
        f"test-{METRIC_NAME}",
        "a metric of the task over the test samples, same model; of class labels the accuracy",
        OWN,
        "as test-loss",
        title=f"test {METRIC_NAME}",
        kind=EVALUATED,
        better=OWN,
    ),
    Column(
        "validation-loss",
        "with `validation` above 0, instead of test-loss: on the training samples that were held "
        "out; so are validation-<metric> and what ends in -broadcast, -nodes and -nodes-std",
        "of the loss (nats)",
        HELD_OUT,
        title="validation loss",
        kind=EVALUATED,
        better=MIN,
    ),
    Column(
        f"validation-{METRIC_NAME}",
        "the same of a metric",
        OWN,
        HELD_OUT,
        title=f"validation {METRIC_NAME}",
        kind=EVALUATED,
        better=OWN,
    ),
    Column("test-loss-broadcast", "test-loss of w^r", "of the loss (nats)", BROADCAST, better=MIN),
    Column(f"test-{METRIC_NAME}-broadcast", "test-<metric> of w^r", OWN, BROADCAST, better=OWN),
    Column(
        "test-loss-nodes",
        "mean over the nodes of the test-loss of their own w_i^r",
        "of the loss (nats)",
        NODES,
        better=MIN,
    ),
    Column(
        "test-loss-nodes-std",
        "its standard deviation over the nodes (divided by m)",
        "of the loss (nats)",
        NODES,
    ),
    Column(
        f"test-{METRIC_NAME}-nodes",
        "mean over the nodes of the test-<metric> of their own w_i^r",
        OWN,
        NODES,
        title=f"test {METRIC_NAME} of the nodes",
        kind=EVALUATED,
        better=OWN,
    ),
    Column(
        f"test-{METRIC_NAME}-nodes-std",
        "its standard deviation over the nodes (divided by m)",
        OWN,
        NODES,
    ),
    Column(
        f"train-{METRIC_NAME}",
        "test-<metric>'s model on all training samples, not augmented",
        OWN,
        TRAIN,
        title=f"train {METRIC_NAME}",
        kind=EVALUATED,
        better=OWN,
    ),
    Column(
        "train-loss-of-model",
        "test-loss's model on all training samples, not augmented",
        "of the loss (nats)",
        TRAIN,
        title="train loss of the model",
        better=MIN,
    ),
    Column(
        "generalisation-gap",
        "train-accuracy less test-accuracy",
        DIFFERENCE,
        TRAIN,
        title="generalisation gap",
        kind=EVALUATED,
    ),
    Column(
        "personal-loss",
        "mean over the clients of the loss of their own model on their own test samples: a share "
        "of the test set with the class mixture of their training samples, on a device its own",
        "of the loss (nats)",
        PERSONAL,
        "clients",
        better=MIN,
    ),
    Column(
        f"personal-{METRIC_NAME}",
        "the same of a metric",
        OWN,
        PERSONAL,
        "clients",
        title=f"{METRIC_NAME} of personal models",
        kind=EVALUATED,
        better=OWN,
    ),
)


def _of_each_metric(column: Column) -> Iterator[Column]:
    """The column, or those that it stands for."""
    if METRIC_NAME not in column.name:
        yield column
        return
    for name, metric in NAMED.items():
        yield column._replace(
            name=column.name.replace(METRIC_NAME, name),
            unit=metric.unit,
            title=column.title.replace(METRIC_NAME, metric.title),
            better=column.better and metric.better,
        )


METRIC = {column.name: column for general in METRICS for column in _of_each_metric(general)}
RANKED = tuple(  # what runs are ranked by: the first that they have
    f"{split}-{name}" for name in (*NAMED, "loss") for split in ("test", "validation")
)
WINDOW = 10  # last evaluations behind a window mean
LAST, MEAN, BEST = "-last", f"-mean-of-last-{WINDOW}", "-best"  # endings of keys of the summary


def named(columns: Iterable[str]) -> list[str]:
    """The names of columns, those with <metric> once for each metric."""
    return [
        name
        for column in columns
        for name in dict.fromkeys(column.replace(METRIC_NAME, metric) for metric in NAMED)
    ]


def of_kind(kind: str) -> list[str]:
    """The metrics that the summary repeats, or sums."""
    return [column.name for column in METRIC.values() if column.kind == kind]


def best(metric: str) -> Callable[[Iterable[float]], Any]:
    """max or min, whichever gives the best of a metric's values."""
    return max if METRIC[metric].better == MAX else min


def is_share(metric: str) -> bool:
    return METRIC[metric].unit in (SHARE, DIFFERENCE)


def metric_of(key: str) -> str:
    """The metric that a key of the summary repeats: test-loss of test-loss-last; empty: none."""
    found = (key.removesuffix(end) for end in (LAST, MEAN, BEST) if key.endswith(end))
    return next((name for name in found if name in METRIC), "")
