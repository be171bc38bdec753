"""What lost replies, kills, bad replies and bad settings do to a federation.

    python benchmarks/faults.py --markdown docs/results/faults.md      # all parts, half an hour
    python benchmarks/faults.py losses settings                        # some

losses       the methods whose server sums up what clients keep, on least squares in float64, eight
             clients, full-batch steps, all asked in every round; replies are lost at random on
             their way back. Before: clients continue from the state of their last step, whether
             or not its reply arrived. After: from the last accepted one
checkpoints  seconds of a checkpoint beside a round, 100 clients with a state each, 10 active
replies      the kinds of bad reply in tests/server/test_bad_replies.py, of four methods in turn
data         the nasty data sets of tests/data/nasty
settings     400 runs with random settings, most of them invalid: each must end by itself, with a
             trained model or with one line
kills        the kills of tests/engine/test_kills.py
crashes      five kinds of run, killed before a change of a file or with half of one written
locks        two processes that resume one run at the same moment
restarts     servers that go back to an earlier checkpoint: tests/faults/test_restarts.py
flower       those of tests/faults/test_kills.py, under `flwr run`: half an hour; only where it
             is named
"""

import argparse
import csv
import logging
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import data
import torch
from timing import SETTING
from torch import Tensor, nn

from fedaccord import engine, recorded_run
from fedaccord.config import RunConfig, keys
from fedaccord.core.request import TrainRequest
from fedaccord.core.vectors import map_vectors
from fedaccord.engine.faults import FaultyFleet
from fedaccord.engine.fleet import LocalFleet
from fedaccord.federation.errors import FederationError
from fedaccord.federation.fleet import TrainReplies
from fedaccord.federation.run import Run
from fedaccord.runs import status
from fedaccord.runs.logbook import Logbook
from fedaccord.storage.store import Memory, Version
from fedaccord.strategies import METHODS, SAM
from fedaccord.task import Clients, Task, load_task

Table = list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"default: {', '.join(USUAL)}")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        sys.exit(f"expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    lines = ["# Faults"]
    with engine.quiet():
        logging.getLogger("flwr").setLevel(logging.ERROR)  # losses are no news here
        for name in options.parts or USUAL:
            lines += ["", *PARTS[name]()]
            print("\n".join(lines), flush=True)
    command = " ".join(["python benchmarks/faults.py", *options.parts])
    lines += ["", f"Made by `{command}`; torch {torch.__version__}, one thread, CPU."]
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    rule = ["---", *["--:"] * (len(columns) - 1)]
    return [f"| {' | '.join(row)} |" for row in (columns, rule, *rows)]


# --- lost replies ---------------------------------------------------------------------------------

C, ROUNDS, STEPS, SHARES = 8, 150, 10, (0.0, 0.05, 0.2, 0.5)
TIED: dict[str, dict[str, Any]] = {  # without the ascent of SAM, which moves the fixed point
    "scaffold": {},
    "fedgamma": {"plugins": (SAM(rho=0.0),)},
    "feddyn": {"alpha": 0.6},
    "fedadmm": {"rho": 0.6},
    "fedspeed": {"rho": 0.6, "plugins": (SAM(rho=0.0),)},
    "fedsmoo": {"rho": 0.6, "radius": 0.0},
    "afedpd": {"rho": 0.6},
    "fedpd": {"rho": 0.6},
}


class GoingOn(LocalFleet):
    """Clients without the protocol: each continues from its last step, whoever heard of it."""

    def train(self, requests: Sequence[TrainRequest], timeout: float) -> TrainReplies:
        def last(request: TrainRequest) -> TrainRequest:
            memory = self.store.load(request.instruction.client)
            accepted = memory.latest.round if memory else -1
            return request._replace(instruction=request.instruction._replace(accepted=accepted))

        return super().train([*map(last, requests)], timeout)


def least_squares(seed: int = 0) -> tuple[Task, Tensor]:
    """The task of eight clients, 12 samples of 5 features each, and its optimum (5,)."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    u, _, v = torch.linalg.svd(normal(C, 12, 5), full_matrices=False)
    curvature = 0.8 + 3.2 * torch.rand(C, 1, 5, generator=rng, dtype=torch.float64)
    A = u * curvature.sqrt() @ v
    b = A @ (normal(5) + normal(C, 5))[:, :, None] + 0.3 * normal(C, 12, 1)
    optimum = torch.linalg.solve((A.mT @ A).mean(0), (A.mT @ b).mean(0)).squeeze(1)

    def module() -> nn.Module:
        model = nn.Linear(5, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        return model

    def half_square(prediction: Tensor, y: Tensor) -> Tensor:
        return 0.5 * ((prediction - y) ** 2).sum()

    return Task(module, Clients([*A], [*b]), None, half_square, torch.device("cpu")), optimum


def after_losses(name: str, share: float, fleet_of: type[LocalFleet]) -> tuple[float, float]:
    """(distance to the optimum, broken identity) of a run."""
    task, optimum = least_squares()
    own: dict[str, Any] = TIED[name]
    method: Any = METHODS[name](
        precision="float64",
        lr=0.05,
        lr_decay=1.0,
        weight_decay=0.0,
        clip_norm=0.0,
        local_steps=STEPS,
        batch_size=0,
        fraction_train=1.0,
        max_failed_rounds=ROUNDS + 1,
        eval_every=ROUNDS + 1,
        **own,
    )
    lost = lost_replies(share)
    fleet = fleet_of(task, vectorize=True)
    faulty = FaultyFleet(fleet, lambda t, i: "lost-reply" if (t, i) in lost else None)
    run = Run(method, faulty, recorded_run.initial_arrays(task, method.model_settings), ROUNDS)
    run.play()
    s = run.state
    return float((s.w - optimum).norm()), gap(name, s, fleet)


def lost_replies(share: float) -> set[tuple[int, int]]:
    """(round, client) whose reply is lost: the same for all methods."""
    rng = random.Random(int(100 * share))
    return {(t, i) for t in range(ROUNDS) for i in range(C) if rng.random() < share}


def gap(name: str, s: Any, fleet: LocalFleet) -> float:
    """How far the mean of what clients keep is from what the server keeps."""
    c, lam = ("c", "c_i"), ("lam_bar", "lam")
    pairs = {"scaffold": c, "fedgamma": c, "fedadmm": ("w", "w_hat"), "fedpd": ("w", "anchor")}
    server, kept = pairs.get(name, lam)
    total = torch.zeros_like(s.w)
    store = fleet.store
    for i in store.clients():
        accepted = int(s.accepted[i])
        memory = store.load(i)
        assert memory is not None
        last = memory.latest.round
        own = store.state(i, last if isinstance(fleet, GoingOn) else accepted)
        if own is None:
            continue
        total += getattr(own, kept)
        if name == "afedpd":  # a client that was away misses virtual steps until it is back
            total += s.server.lam_bar - s.server.lam_bar_after[accepted]
    return float((total / C - (s.w if server == "w" else getattr(s.server, server))).norm())


def losses() -> Table:
    _, optimum = least_squares()
    rows = []
    for name in TIED:
        for fleet_of, when in ((GoingOn, "before"), (LocalFleet, "after")):
            results = [after_losses(name, share, fleet_of) for share in SHARES]
            numbers = [distance for distance, _ in results] + [broken for _, broken in results]
            rows.append([name, when, *(f"{x:.1e}" for x in numbers)])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    shares = [f"{share:.0%} lost" for share in SHARES]
    whole = [ROUNDS - len({t for t, _ in lost_replies(share)}) for share in SHARES]
    columns = ["method", "protocol", *shares, *(f"identity, {share}" for share in shares)]
    return [
        "## Replies that get lost",
        "",
        f"Distance to the optimum, of norm {float(optimum.norm()):.2f}, after {ROUNDS} rounds of "
        f"{STEPS} steps, lr 0.05, and the error of the identity between clients and server (the "
        "mean of c_i is c, the mean of the duals is the server's, the mean of FedADMM's and "
        "FedPD's uploads is w); float64, eight clients, all requested in every round; each row "
        "loses the same replies. Before: a client resumes from its last step. After: from the last "
        "one that the server accepted.",
        "",
        "FedPD counts a round only with the replies of all clients: of the "
        f"{ROUNDS} rounds here {', '.join(map(str, whole))}: with the protocol it skips rounds "
        "with lost replies, and stays correct.",
        "",
        *table(columns, rows),
    ]


# --- checkpoints ----------------------------------------------------------------------------------


def checkpoints() -> Table:
    rows = [["LeNet", *checkpoint("lenet", 10, 3)], ["ResNet-18", *checkpoint("resnet18", 2, 3)]]
    columns = ["model", "local steps", "seconds a round", "checkpoint", "the first", "megabytes"]
    return [
        "## Checkpoints",
        "",
        "CIFAR-10, SCAFFOLD, 100 clients with a state each, 10 of them active a round, batch 50. A "
        "checkpoint writes the states that changed; the first one writes all. Wall-clock seconds, "
        "median of 3 rounds (min to max), on a machine with other load, each file synced.",
        "",
        *table(columns, rows),
    ]


def checkpoint(model: str, steps: int, repetitions: int) -> list[str]:
    """Local steps, and the seconds of a round, of a checkpoint, of the first; its megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTING | {"algo": "scaffold", "model": model, "local-steps": steps}
        settings |= {
            "data-dir": str(data.find()),
            "out-dir": folder,
            "name": "run",
            "threads": 1,
            "checkpoint-every": 10**6,
        }
        settings |= {"num-server-rounds": repetitions + 1, "fraction-train": 0.1}
        config = RunConfig.make(settings)
        task = load_task(config.task, num_clients=config.num_clients)
        fleet, log_book = LocalFleet(task), Logbook(config, {}, task.fingerprint)
        run = recorded_run.run_of(config.strategy, fleet, task, repetitions + 1)
        log_book.restore(run.session)
        run.begin()
        rounds, writes = list[float](), list[float]()
        for _ in range(repetitions + 1):
            began = time.perf_counter()
            trained = run.train_round()
            rounds.append(time.perf_counter() - began)
            if not writes:
                everyone(run, fleet)
            log_book.record(trained, lambda: None)
            began = time.perf_counter()
            log_book.checkpoint()
            writes.append(time.perf_counter() - began)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
    return [
        str(steps),
        spread(rounds[1:]),
        spread(writes[1:]),
        f"{writes[0]:.2f}",
        f"{size / 1e6:.0f}",
    ]


def everyone(run: Run, fleet: LocalFleet) -> None:
    """Give every client a state, as after many rounds."""
    store = fleet.store
    memory = store.load(store.clients()[0])
    assert memory is not None
    state = memory.latest.state
    for i in range(fleet.num_clients):
        own = map_vectors(lambda v: v.clone(), state)
        store.save(i, store.load(i) or Memory(Version(0, own)))
    run.state.accepted.fill_(0)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


# --- what tests count -----------------------------------------------------------------------------


def replies() -> Table:
    passed, of = tests("tests/server/test_bad_replies.py", "absence")
    greeted, asked = tests("tests/server/test_bad_replies.py", "hello")
    return [
        "## Bad replies, data, settings, kills",
        "",
        f"Kinds of bad reply, with four methods in turn: in {passed} of {of} the run continues bit "
        "for bit as if that client had been absent, with one line a round. Bad answers to the "
        "handshake: "
        f"{greeted} of {asked} affect only their node.",
    ]


def nasty_data() -> Table:
    passed, of = tests("tests/data/test_nasty_data.py", "usable_or_one_line")
    return [
        "Nasty data sets (npz files, image folders, partition files, caches of decoded data, "
        f"torchvision's files): {passed} of {of} are usable, or give a one-line error before any "
        "work is done."
    ]


def kills() -> Table:
    passed, of = tests("tests/engine/test_kills.py", "twenty")
    return [survived(passed, of, "a run in process")]


def flower() -> Table:
    return [survived(*tests("tests/faults/test_kills.py", "twenty"), "a run by `flwr run`")]


def survived(passed: int, of: int, what: str) -> str:
    return (
        f"SIGKILL at 20 random moments of {what}, each followed by a resume: {20 * passed} of "
        f"{20 * of} survived, with the result of an uninterrupted run, bit for bit."
    )


def tests(path: str, names: str) -> tuple[int, int]:
    """How many of the tests passed, and how many there are."""
    options = ["-q", "-o", "addopts=", "-p", "no:warnings", "-k", names]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, path],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    counts = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", process.stdout)
    }
    return counts.get("passed", 0), sum(counts.values())


# --- settings -------------------------------------------------------------------------------------

TRIED, SECONDS = 400, 60
NASTY: dict[type, list[Any]] = {
    bool: [True, False],
    int: [-1, 0, 1, 2, 3, 7, 50, 10**6, 2**31, 2**63, -(2**63), 10**30],
    float: [-1.0, 0.0, 1e-300, 1e-9, 0.3, 0.999, 1.0, 1.5, 1e30, 1e300, math.inf, math.nan],
    str: ["", "none", "auto", "nonsense", "\x1b[31m", "a" * 10_000, "../..", "/dev/null"],
}
ODD: list[Any] = ["1", 1.5, True, -0.0, 3, "off"]  # of another type, perhaps
LONG = ("num-server-rounds", "local-epochs", "local-steps", "gossip.steps")  # work that is meant
LEFT = ("out-dir", "name", "resume", "download", "data-dir", "wait-timeout")


def settings() -> Table:
    rng, ends = random.Random(0), Counter[str]()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(TRIED):
            chosen = draw(rng)
            end = child(chosen | {"out-dir": folder, "name": str(number)})
            ends[end.partition(":")[0]] += 1
            if end.partition(":")[0] not in GOOD_ENDS:
                wrong.append((chosen, end))
    for chosen, end in wrong:
        print(f"settings: {end[:300]} with {chosen}", file=sys.stderr)
    good = sum(ends[end] for end in GOOD_ENDS)
    counts = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    return [
        f"Runs with random settings, most of them invalid: {good} of {TRIED} survived ({counts})."
    ]


GOOD_ENDS = ("completed", "one line before round 1", "one line at the end")


def draw(rng: random.Random) -> dict[str, Any]:
    """A small run with a few settings that are mostly nonsense."""
    fields = {key: field for key, field in keys().items() if key not in LEFT}
    method = rng.choice([*METHODS])
    mine = [k for k in fields if "." not in k or k.startswith(f"{method}.") or rng.random() < 0.2]
    chosen: dict[str, Any] = {"algo": method, "num-clients": 4, "num-server-rounds": 2}
    chosen |= {"model": "linear", "local-steps": 2, "threads": 1, "device": "cpu"}
    for key in rng.sample(mine, rng.randint(1, 4)):
        field = fields[key]
        pool = [*NASTY[type(field.default)], *field.metadata["choices"]]
        value = rng.choice(pool if rng.random() < 0.9 else ODD)
        if key in LONG and isinstance(value, int) and value > 50:
            value = 3
        chosen[key] = value
    return chosen


def child(chosen: dict[str, Any]) -> str:
    """How a run ends in a process of its own."""
    return ended(*begun(chosen))


def begun(chosen: dict[str, Any]) -> tuple[int, int]:
    """A process that runs, and where to read how it ends."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        signal.alarm(SECONDS)
        os.write(write, outcome(chosen).encode()[:60_000])
        os._exit(0)
    os.close(write)
    return pid, read


def ended(pid: int, read: int) -> str:
    with os.fdopen(read, "rb") as file:
        text = file.read().decode()
    _, status = os.waitpid(pid, 0)
    return text or f"ended by signal {os.waitstatus_to_exitcode(status)}"


def outcome(chosen: dict[str, Any]) -> str:
    begun = False
    try:
        config = RunConfig.make(chosen)
        begun = True
        engine.run(config)
    except (ValueError, FileNotFoundError, FederationError) as error:
        if "\n" in str(error) or not str(error):
            return f"several lines: {error}"
        when = (
            "before round 1"
            if not begun or not isinstance(error, FederationError)
            else "at the end"
        )
        return f"one line {when}: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "completed"


# --- crash points ---------------------------------------------------------------------------------

CRASHES = 13  # changes of files of a kind of run, spread over all
KINDS: dict[str, dict[str, Any]] = {
    "fedavg": {"algo": "fedavg"},
    "scaffold": {"algo": "scaffold"},
    "scaffold, states on disk": {"algo": "scaffold", "client-state": "disk"},
    "fedcm with relaxed initialisation": {"algo": "fedcm", "relaxed-init.beta": 0.05},
    "dfedavg": {"algo": "dfedavg"},
}
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.truncate")  # beside files opened to write


def small_run(folder: str, kind: str, name: str, **more: Any) -> RunConfig:
    settings = {"out-dir": folder, "name": name, "num-clients": 4, "num-server-rounds": 4}
    settings |= {"model": "linear", "local-steps": 2, "threads": 1, "device": "cpu"}
    return RunConfig.make(settings | {"checkpoint-every": 1} | KINDS[kind] | more)


def crashed(config: RunConfig, at: int, half: bool) -> int:
    """The changes of files that a run made in a process of its own; it ends by SIGKILL at the
    change of number ``at``, with half of the file written or before it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        count, folder = 0, str(config.out_dir)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            opened = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
            if (opened or event in CHANGES) and str(arguments[0]).startswith(folder):
                count += 1
                if count == at:
                    if half and opened:
                        with open(arguments[0], f"{arguments[1][0]}b") as file:
                            file.write(bytes(100))
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        engine.run(config)
        os.write(write, str(count).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read()
    os.waitpid(pid, 0)
    return int(text or 0)


def same(one: Path, other: Path) -> bool:
    """Whether two runs have the same model and the same rows, but for seconds."""

    def rows(path: Path, name: str) -> list[dict[str, str]]:
        with (path / name).open(newline="") as file:
            return [{k: v for k, v in r.items() if k != "seconds"} for r in csv.DictReader(file)]

    tables = all(rows(one, n) == rows(other, n) for n in ("metrics.csv", "clients.csv"))
    models = [(path / "model.safetensors").read_bytes() for path in (one, other)]
    return tables and models[0] == models[1] and status(one) == "completed"


def crashes() -> Table:
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            whole, counted = Path(folder) / "whole", small_run(folder, kind, "whole")
            changes = crashed(counted, 0, half=False)
            good = tried = anew = 0
            for at in [1 + i * (changes - 1) // (CRASHES - 1) for i in range(CRASHES)]:
                for half in (False, True):
                    name = f"{at}-{half}"
                    crashed(small_run(folder, kind, name), at, half)
                    path = Path(folder) / name
                    if begun := any((path / "checkpoint").glob("[0-9]*.json")):
                        again = small_run(folder, kind, name, resume=True)
                    else:
                        shutil.rmtree(path, ignore_errors=True)
                        again = small_run(folder, kind, name)
                    anew += not begun
                    tried += 1
                    try:
                        engine.run(again)
                        good += same(path, whole)
                    except ValueError as error:
                        done = "rounds are done" in str(error) and same(path, whole)
                        good += done
                        if not done:
                            print(f"crashes: {kind}, {at}, {half}: {error}", file=sys.stderr)
                    shutil.rmtree(path)
            rows.append([kind, str(changes), str(tried), str(anew), f"{good} of {tried}"])
    return [
        "## Crash points",
        "",
        "SIGKILL before a change of a file of a run of four rounds with a checkpoint each, or with "
        f"the file half written, at {CRASHES} changes spread over all; then resumed, or restarted "
        "if there was no checkpoint yet. Good: "
        "model and tables are those of an uninterrupted run.",
        "",
        *table(["run", "changes", "crashes", "before a checkpoint", "good"], rows),
    ]


# --- locks ----------------------------------------------------------------------------------------

RACES = 10


def locks() -> Table:
    good = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = engine.run(small_run(folder, "scaffold", "whole", **{"num-server-rounds": 40})).path
        for race in range(RACES):
            name = f"race-{race}"
            engine.run(small_run(folder, "scaffold", name))
            more = {"resume": True, "num-server-rounds": 40}
            config = small_run(folder, "scaffold", name, **more)
            ends = Counter(both(config.flat))
            path = Path(folder) / name
            refused = sum(n for end, n in ends.items() if "writes here" in end)
            good += ends["completed"] == 1 and refused == 1 and same(path, whole)
    return [
        f"Two processes that resume one run at the same moment: in {good} of {RACES} races one is "
        "refused in one line and the other's model and tables are those of an uninterrupted run."
    ]


def both(chosen: dict[str, Any]) -> list[str]:
    """How two processes end that do the same at the same time."""
    return [ended(*process) for process in (begun(chosen), begun(chosen))]


def restarts() -> Table:
    passed, of = tests("tests/faults/test_restarts.py", "")
    return [
        "Servers that return to an earlier state (two resumes from one checkpoint, a backup that "
        f"is restored, a copied directory, late messages): {passed} of {of} cases end as an "
        "uninterrupted run."
    ]


PARTS: dict[str, Callable[[], Table]] = {
    "losses": losses,
    "checkpoints": checkpoints,
    "replies": replies,
    "data": nasty_data,
    "settings": settings,
    "kills": kills,
    "crashes": crashes,
    "locks": locks,
    "restarts": restarts,
    "flower": flower,
}
USUAL = [name for name in PARTS if name != "flower"]

if __name__ == "__main__":
    main()
