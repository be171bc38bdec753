"""What every number in a run directory means: the source of docs/metrics.md and `--list-columns`.

Row r of metrics.csv is the end of round r: clients were sent w^{r-1}, the server's step gave w^r.
"""

from typing import NamedTuple


class Column(NamedTuple):
    name: str  # <metric>: any of those that metrics.csv has and the summary repeats
    meaning: str  # the formula, of which model, on which data
    unit: str
    rows: str  # which rows have it
    source: str  # who measures it


COUNTED = "rounds that counted"
ASKED = "rounds from 1 on"
EVALUATED = "0, every `eval-every` rounds, the last"
LOCAL = "rounds that counted, where clients send their model"
GRAPH = "rounds that counted, without a server"
BROADCAST = "as test-loss, where the two models differ"
NODES = "as test-loss, from round 1 on, without a server"
HELD_OUT = "as test-loss, with `validation` above 0"
TRAIN = "as test-loss, with `eval-train=true`"
PERSONAL = "as test-loss, once a client has one, with methods that have personal models"
ACCEPTED = "accepted replies"
ALWAYS = "always"

METRICS = (
    Column("round", "r; 0 is the untrained model", "", "all", "server"),
    Column(
        "train-loss",
        "mean over the accepted clients, weighted by num-examples, of their train-loss in "
        "clients.csv: of the local models as they move, not of one model",
        "of the loss (nats)",
        COUNTED,
        "clients",
    ),
    Column("replies", "replies that were good", "clients", ASKED, "server"),
    Column(
        "dropped",
        "clients that were asked and gave no good reply; clients.csv has the reasons",
        "clients",
        ASKED,
        "server",
    ),
    Column(
        "counted",
        "1: at least `min-replies` replies were good and the server took its step; "
        "0: the model stayed",
        "0 or 1",
        ASKED,
        "server",
    ),
    Column(
        "down-vectors",
        "vectors of d numbers that the server sent with training messages, summed over the cohort",
        "d",
        COUNTED,
        "server",
    ),
    Column("down-bytes", "their bytes as numbers, without headers", "bytes", COUNTED, "server"),
    Column(
        "up-vectors", "vectors in the accepted replies, summed over them", "d", COUNTED, "server"
    ),
    Column("up-bytes", "their bytes as numbers, without headers", "bytes", COUNTED, "server"),
    Column(
        "drift",
        "client drift: mean over the accepted clients of ||w_{i,K} - w^{r-1}||^2, how far their "
        "local steps (and a relaxed start) took them from the model they were sent; without a "
        "server from each node's own model",
        "squared L2",
        LOCAL,
        "server",
    ),
    Column(
        "consistency",
        "mean over the accepted clients of ||w_{i,K} - w^r||^2: Delta^t of FedInit "
        "(arXiv:2306.05706), there over all clients, here over the active ones",
        "squared L2",
        f"{LOCAL}, with a server",
        "server",
    ),
    Column(
        "spread",
        "mean over the accepted clients of ||w_{i,K} - w_bar||^2, w_bar their mean; consistency "
        "is spread + ||w_bar - w^r||^2 with uniform weights, so both are equal for FedAvg",
        "squared L2",
        f"{LOCAL}, with a server",
        "server",
    ),
    Column(
        "consensus-before",
        "(1/m) sum over the nodes of ||w_i - mean||^2 before they mix, after their local steps",
        "squared L2",
        GRAPH,
        "server",
    ),
    Column(
        "consensus-after", "the same of w^r, after the nodes mixed", "squared L2", GRAPH, "server"
    ),
    Column(
        "spectral-gap",
        "1 - ||W - 11^T/m||, W the round's mixing matrix: the least share of the distance to "
        "consensus that a gossip step takes away",
        "1",
        GRAPH,
        "server",
    ),
    Column(
        "peer-vectors",
        "vectors that nodes would send each other: a message a link, direction and gossip step",
        "d",
        GRAPH,
        "server",
    ),
    Column("peer-bytes", "their bytes as numbers", "bytes", GRAPH, "server"),
    Column(
        "seconds",
        "wall clock from the draw of the cohort to the server's step, without evaluation",
        "s",
        ASKED,
        "server",
    ),
    Column(
        "test-loss",
        "mean loss over the test samples of the model that the method returns: w^r, for A-FedPD "
        "the mean of the local models, without a server the mean of the nodes",
        "of the loss (nats)",
        EVALUATED,
        "server",
    ),
    Column(
        "test-accuracy",
        "share of the test samples whose largest output is their class, same model",
        "0 to 1",
        "as test-loss, for classes",
        "server",
    ),
    Column(
        "validation-loss",
        "with `validation` above 0, instead of test-loss: on the training samples that were held "
        "out; so are validation-accuracy and what ends in -broadcast, -nodes and -nodes-std",
        "of the loss (nats)",
        HELD_OUT,
        "server",
    ),
    Column("validation-accuracy", "the same of the accuracy", "0 to 1", HELD_OUT, "server"),
    Column("test-loss-broadcast", "test-loss of w^r", "of the loss (nats)", BROADCAST, "server"),
    Column("test-accuracy-broadcast", "test-accuracy of w^r", "0 to 1", BROADCAST, "server"),
    Column(
        "test-loss-nodes",
        "mean over the nodes of the test-loss of their own w_i^r",
        "of the loss (nats)",
        NODES,
        "server",
    ),
    Column(
        "test-loss-nodes-std",
        "its standard deviation over the nodes (divided by m)",
        "of the loss (nats)",
        NODES,
        "server",
    ),
    Column(
        "test-accuracy-nodes",
        "mean over the nodes of the test-accuracy of their own w_i^r",
        "0 to 1",
        NODES,
        "server",
    ),
    Column(
        "test-accuracy-nodes-std",
        "its standard deviation over the nodes (divided by m)",
        "0 to 1",
        NODES,
        "server",
    ),
    Column(
        "train-accuracy",
        "test-accuracy's model on all training samples, not augmented",
        "0 to 1",
        TRAIN,
        "server",
    ),
    Column(
        "train-loss-of-model",
        "test-loss's model on all training samples, not augmented",
        "of the loss (nats)",
        TRAIN,
        "server",
    ),
    Column("generalisation-gap", "train-accuracy less test-accuracy", "-1 to 1", TRAIN, "server"),
    Column(
        "personal-loss",
        "mean over the clients of the loss of their own model on their own test samples: a share "
        "of the test set with the class mixture of their training samples, on a device its own",
        "of the loss (nats)",
        PERSONAL,
        "clients",
    ),
    Column("personal-accuracy", "the same of the accuracy", "0 to 1", PERSONAL, "clients"),
)

CLIENTS = (
    Column("round", "r, from 1 on", "", "all", "server"),
    Column("client", "number of the client, its partition-id, from 0", "", "all", "server"),
    Column("status", "ok, or why its reply was dropped", "", "all", "server"),
    Column(
        "repair",
        "what the server did about a client that lost its state",
        "",
        "clients that lost it",
        "server",
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
    Column("up-vectors", "vectors of d numbers in its reply", "d", ACCEPTED, "server"),
    Column("up-bytes", "their bytes as numbers, without headers", "bytes", ACCEPTED, "server"),
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
        "where it says running and its process is gone",
        "",
        ALWAYS,
        "server",
    ),
    Column("reason", "what ended the run", "", "failed runs", "server"),
    Column("rounds", "rounds that were run", "rounds", ALWAYS, "metrics.csv"),
    Column("rounds-counted", "sum of counted", "rounds", ALWAYS, "metrics.csv"),
    Column("seconds", "wall clock of the run so far, with evaluation", "s", ALWAYS, "server"),
    Column(
        "<metric>-last",
        "test-accuracy, test-loss, validation-accuracy, validation-loss, personal-accuracy, "
        "test-accuracy-nodes, train-accuracy or "
        "generalisation-gap when it was last evaluated; round 0 does not count",
        "of the metric",
        "evaluated metrics",
        "metrics.csv",
    ),
    Column(
        "<metric>-mean-of-last-10",
        "mean of its last 10 evaluations, or of all where there are fewer; without round 0",
        "of the metric",
        "evaluated metrics but generalisation-gap",
        "metrics.csv",
    ),
    Column(
        "<metric>-best",
        "largest accuracy or smallest loss of any evaluation; without round 0. It is chosen on the "
        "test samples: compare runs by the mean of the last 10",
        "of the metric",
        "evaluated metrics but generalisation-gap",
        "metrics.csv",
    ),
    Column("replies", "sum over the rounds", "replies", ALWAYS, "metrics.csv"),
    Column("dropped", "sum over the rounds", "replies", ALWAYS, "metrics.csv"),
    Column("down-bytes", "sum over the rounds", "bytes", ALWAYS, "metrics.csv"),
    Column("up-bytes", "sum over the rounds", "bytes", ALWAYS, "metrics.csv"),
    Column("peer-bytes", "sum over the rounds", "bytes", "without a server", "metrics.csv"),
    Column("clients", "clients C that were there before round 1", "clients", ALWAYS, "server"),
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
    Column(
        "gossip.spectral-gap",
        "spectral-gap of round 1",
        "1",
        "without a server",
        "settings",
    ),
    Column(
        "process.host",
        "where the run's process is: a run that says running may have died",
        "",
        "running",
        "server",
    ),
    Column("process.pid", "its process id", "", "running", "server"),
    Column("process.started", "when that process began, since 1970", "s", "running", "server"),
)

TABLES = {
    "metrics.csv": METRICS,
    "clients.csv": CLIENTS,
    "classes.csv": CLASSES,
    "summary.json": SUMMARY,
}
