"""The rows and checkpoints that a run writes, and how it resumes from them."""

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from fedaccord.config import RunConfig, affecting, defaults, in_use, keys, settings_of, toml
from fedaccord.core.client_half import state_like
from fedaccord.core.rounds import RoundState
from fedaccord.core.vectors import fill, leaves
from fedaccord.federation.budget import OR_END, check_left
from fedaccord.federation.checkpoint import Pace, pack, privacy_of, unpack
from fedaccord.federation.fleet import DEVICES, IN_PROCESS, SIMULATED
from fedaccord.federation.metrics import with_evaluations
from fedaccord.federation.partition_ids import PartitionIds
from fedaccord.federation.round import Round
from fedaccord.federation.session import Book, Session
from fedaccord.runs import COMPLETED, RUNNING, RunDirectory, named_contents, place, status
from fedaccord.runs.best import Best
from fedaccord.runs.checkpoint import Checkpoint, Checkpoints
from fedaccord.runs.directory import CONTENTS, SAMPLES
from fedaccord.runs.lock import Lock
from fedaccord.storage.files import read_json, replace
from fedaccord.storage.mapped import release

log = logging.getLogger("flwr")
T = TypeVar("T")

FOLDER = "checkpoint"  # in a run directory
ATTEMPT = "attempt.json"  # in a run directory
PARTITION = "partition"  # in `Task.fingerprint`
SPENT = "privacy.json"  # in a run directory: releases of a deployment


class Logbook(Book):
    """The run directory and the checkpoints of one run."""

    def __init__(
        self,
        config: RunConfig,
        used: Mapping[str, Any],
        data: Mapping[str, Any],
        at: int | None = None,
        in_process: bool = True,
        metrics: str = "",
    ) -> None:
        """The logbook of a new or a resumed run; at: the round of the checkpoint to resume from;
        None: the last one. Raises ValueError, in one line, if the run cannot resume.

        used: see `RunDirectory`. data: checksums of the samples, as `Task.fingerprint`. in_process:
        the clients are in this process or its workers. metrics: as of `Best`.
        """
        self.config, self._data = config, named_contents.of_run(config, data)
        self.best = Best(config, metrics)
        self._begun: Checkpoint | None = None  # what the run resumes from
        if config.resume:
            self._resume(used, at, in_process)
        else:
            used = {**used, **self._contents}
            self.directory = RunDirectory(config.out_dir, config.name, in_use(config), used)
            self.checkpoints = Checkpoints(self.directory.path / FOLDER)
        begun, path = self._begun, self.directory.path
        self.after = begun.number if begun else 0  # rounds that were done before
        self._saved: int | None = begun.number if begun else None
        self._pace = Pace(config.checkpoint_every)
        self._recorded: RoundState | None = None  # of the last row of the tables
        self._session: Session | None = None
        self._durable: Sequence[int] | None = None  # of every client
        # its name is unique: clients remember federations, and runs may have equal names
        federation = begun.facts["federation"] if begun else f"{path.name}-{uuid4().hex[:8]}"
        try:
            super().__init__(federation, _next_attempt(path), path)
        except (OSError, ValueError):
            self.directory.close()
            raise

    def _resume(self, used: Mapping[str, Any], at: int | None, in_process: bool) -> None:
        config, path = self.config, check_directory(self.config)
        self.checkpoints = Checkpoints(path / FOLDER)
        with ExitStack() as stack:
            lock = Lock(path)
            stack.callback(lock.release)
            begun = self._begun = self.checkpoints.load(at)
            check_resumed(config, begun.facts["settings"])
            self._data = with_earlier_code(self._data, begun.facts, in_use(config))
            if in_process:
                check_states(config, begun)
            _check_rounds(config, begun, path)
            if _is_complete(path):  # else it may have ended without a summary
                check_budget(config, begun, path)
            self.directory = RunDirectory.reopen(
                path,
                in_use(config) | {"resume": False},  # config.toml makes the run anew
                {**used, **self._contents},
                number=begun.number,
                position=begun.facts["position"],
                lock=lock,
                before_cut=lambda: self.checkpoints.resume_from(begun.number),
            )
            stack.pop_all()

    @property
    def _contents(self) -> dict[str, str]:
        digests = {name: digest for name, digest in self._data.items() if name != PARTITION}
        return {f"{CONTENTS}{name}": digest for name, digest in digests.items()}

    def close(self) -> None:
        """Let other processes write the run's directory; the session has this book: frees both."""
        self.directory.close()
        self._session = None

    def restore(self, session: Session) -> RoundState | None:
        """The state from which the run of ``session`` resumes, after the clients' states were
        restored; None: it is a new run."""
        self._session = session
        if self._begun is None:
            return None
        now, before = self.best.metric, self._begun.facts["settings"].get("keep-best")
        kept = self._begun.facts.get("best", {})
        self.best.restore(kept, self._begun.server)
        if before and not now:
            log.warning("resume: without keep-best=%s the best model stays as it is", before)
        elif now and now != kept.get("metric", before):
            log.warning("resume: keep-best=%s keeps the best model of the rounds from now on", now)
        state, self._begun = restore(session, self._begun), None
        if state.privacy and session.is_deployed:
            releases = _releases(self.directory.path, state.privacy.releases)
            if state.privacy.local:  # clients may have sent uploads of the round that was cut off
                releases += 1
            state = state._replace(privacy=state.privacy._replace(releases=releases))
            self.spend(releases)
        self._set_durable(state)
        return state

    def durable(self, client: int) -> int:
        """The client's last accepted round in the last checkpoint, if that lacks its state."""
        return -1 if self._durable is None else self._durable[client]

    def _set_durable(self, s: RoundState) -> None:
        if self._session and self._session.fleet.place != IN_PROCESS:
            self._durable = s.accepted.tolist()

    def spend(self, releases: int) -> None:
        """Store the releases: a deployment draws new noise after a crash, so they count."""
        if self._session and self._session.is_deployed:
            content = json.dumps({"releases": releases}).encode()
            replace(self.directory.path / SPENT, content, durable=True)

    def partition_ids(self) -> PartitionIds:
        """The ids that the server assigned to nodes; nodes.json stores them with the run."""
        file = self.directory.path / "nodes.json"

        def keep(of: Mapping[int, int]) -> None:
            replace(file, json.dumps(of).encode())

        def read(numbers: Any) -> dict[int, int]:
            return {int(node): int(client) for node, client in numbers.items()}

        of = _stored(file, read, dict[int, int](), "client numbers by node id")
        return PartitionIds(self.config.num_clients, of, keep)

    def record(self, round: Round, save: Callable[[], None]) -> None:
        """The rows of a round, and a checkpoint if one is due, with what ``save`` writes."""
        rows = with_evaluations(round.number, round.clients, round.evaluations)
        self.directory.record({"round": round.number, **round.metrics}, rows)
        self._recorded = round.state
        if round.number > 0 and self._pace.is_due(round.number):
            with self._pace.timed():
                self.checkpoint()
                save()

    def checkpoint(self) -> None:
        """Write down the last round that the tables have."""
        s, session = self._recorded, self._session
        if s is None or session is None or s.t == self._saved:
            return
        server, facts = pack(s)
        server |= self.best.tensors()
        facts["best"] = self.best.facts()
        facts |= {
            "federation": self.federation,
            "settings": in_use(self.config) | {"num-clients": s.num_clients},
            "data": self._data,
            "clients": session.fleet.place,
            "position": self.directory.position,
            "shapes": session.shapes,
        }
        states = session.fleet.client_states(s.accepted.numpy().data)
        clients = {i: (round, dict(leaves(state))) for i, (round, state) in states.items()}
        clients = {i: (round, state) for i, (round, state) in clients.items() if state}
        self.checkpoints.save(s.t, facts, server, clients)
        for vector in server.values():
            release(vector)
        self.directory.summarise(RUNNING, clients=s.num_clients)
        self._saved = s.t
        self._set_durable(s)


def check_resumed(
    config: RunConfig, begun: Mapping[str, Any], besides: Collection[str] = ()
) -> None:
    """Raise ValueError, which names the key, if a run cannot resume with other settings.

    begun: those that it began with, as of `in_use`. besides: keys to leave out, as those unread.
    """
    now, usual, fixed = in_use(config), defaults(), affecting("numbers")
    if begun.keys() <= keys().keys():  # of this version: compare the values behind "auto"
        earlier = RunConfig.make(begun)
        besides = {*besides, *earlier.unread_keys().keys() & config.unread_keys().keys()}
        begun, now = {**begun, **settings_of(earlier.strategy)}, now | settings_of(config.strategy)
    for key in [key for key in {**begun, **now} if key not in besides]:
        before, after = begun.get(key, usual.get(key)), now.get(key, usual.get(key))
        if (key in fixed or key not in usual) and before != after:
            raise is_changed(key, before, after)


def with_earlier_code(
    now: Mapping[str, Any], facts: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """``now`` with the earlier hashes of a run's code, as 1a2b3c4d+5e6f7a8b, and a warning if the
    code has changed, which may compute the same. Raises ValueError, in one line, if data or files
    are not those that the run began with.

    now: as `named_contents.of_run`. facts: of the run's checkpoint; earlier versions wrote fewer.
    settings: of `now`; a setting that has changed, as metrics may, is not compared.
    """
    digests, files = dict(now), {key for key, field in keys().items() if field.metadata["path"]}
    for what, before in facts.get("data", {}).items():
        if what not in now or type(now[what]) is not type(before):
            continue
        if settings.get(what) != facts["settings"].get(what):
            continue
        if now[what] == before or str(before).endswith(f"+{now[what]}"):
            digests[what] = before
            continue
        if what in (SAMPLES, PARTITION, *files):
            raise ValueError(
                f"resume: expected the {what} of the run's start, got other content: files of "
                "data-dir, or a file that the settings name, have changed; restore them, or start "
                "another run"
            )
        log.warning(
            "resume: the code of %s=%s has changed since the run began: its earlier rounds used "
            "the earlier code",
            what,
            facts["settings"][what],
        )
        digests[what] = f"{before}+{now[what]}"
    return digests


def is_changed(key: str, before: Any, after: Any) -> ValueError:
    return ValueError(
        f"resume: expected {key}={toml(before)}, as at the run's start, got {toml(after)}; do not "
        "change it, or start another run"
    )


def is_done(what: object, number: int, key: str) -> ValueError:
    return ValueError(f"{what}: all {number} rounds are done; for more set {key} above {number}")


def _check_rounds(config: RunConfig, begun: Checkpoint, path: Path) -> None:
    """Raise ValueError, in one line, if no round is left."""
    rounds, before = config.num_server_rounds, begun.facts["settings"]["num-server-rounds"]
    if begun.number > rounds or (begun.number == rounds and _is_complete(path)):
        raise is_done(path, begun.number, "num-server-rounds")
    if config.strategy.anneals and before != rounds:
        log.warning(
            "resume: %s anneals over num-server-rounds=%d: the result differs from a run "
            "that began with %d",
            config.algo,
            before,
            rounds,
        )


def _is_complete(path: Path) -> bool:
    return status(path) == COMPLETED and (path / "model.safetensors").exists()


def check_budget(config: RunConfig, begun: Checkpoint, path: Path) -> None:
    """Raise ValueError, in one line, if the privacy budget has no round left."""
    guarantee, privacy = config.strategy.guarantee, privacy_of(begun.facts)
    if guarantee and privacy and config.num_server_rounds > begun.number:
        spent = _releases(path, privacy.releases)
        check_left(guarantee, privacy._replace(releases=spent), config.num_clients, OR_END)


def check_states(config: RunConfig, begun: Checkpoint) -> None:
    """Raise ValueError, in one line, if a run cannot be resumed in process, because its clients'
    data or states are elsewhere."""
    where = begun.facts.get("clients", IN_PROCESS)
    half, shapes = config.strategy.client_half(), tuple(map(tuple, begun.facts["shapes"]))
    stateful = any(True for _ in leaves(state_like(half, shapes)))
    if where == IN_PROCESS or (where == SIMULATED and not stateful):
        return
    folder = begun.facts["settings"]["state-dir"]
    location = f"in state-dir={folder}" if folder else "in the memory of Flower's clients"
    reason = (
        "its clients are devices with their own data"
        if where == DEVICES
        else f"{config.algo} has clients with states, which are {location}, not in the checkpoint"
    )
    raise ValueError(
        f"resume: this run began by `flwr run`, and {reason}; resume it by `flwr run` with "
        f"resume=true name={config.name!r} and the same settings"
        + ("" if folder or not stateful else "; clients that lost their state start afresh")
    )


def _next_attempt(path: Path) -> int:
    """The number of this start of a run, stored before the first message is sent.

    Clients refuse messages of a smaller number than the largest they have seen, so each start needs
    a larger one than every start before it, of this directory and of copies of it. The clock (ns)
    orders starts of copies and backups, which cannot see each other; the stored number orders
    those of one directory, even after the clock was set back.
    Raises ValueError, in one line, if the stored number is damaged.
    """
    file = path / ATTEMPT
    what, advice = "the number of the run's last start", "; remove it"
    last = _stored(file, lambda content: int(content["attempt"]), -1, what, advice)
    attempt = max(last + 1, time.time_ns())
    replace(file, json.dumps({"attempt": attempt}).encode())
    return attempt


def _releases(path: Path, least: int) -> int:
    """Noisy sums that devices may have received: rounds after the last checkpoint count too.

    A simulation draws the same noise again. Raises ValueError, in one line, for a damaged file.
    """
    what = "how many rounds of the privacy budget are spent"
    return max(least, _stored(path / SPENT, lambda content: int(content["releases"]), 0, what))


def _stored(file: Path, read: Callable[[Any], T], default: T, expected: str, advice: str = "") -> T:
    """The result of ``read`` for a JSON file; ``default`` without a file. Raises ValueError, in
    one line with the advice, if it is damaged."""
    try:
        return read(read_json(file)) if file.exists() else default
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{file}: expected {expected}, got a damaged file{advice}") from None


def run_of(config: RunConfig) -> Path:
    """The directory of a run. Raises ValueError as `place`, and if one to resume has no name."""
    if config.resume and not config.name:
        raise ValueError("resume: expected name=..., the run's directory below out-dir, got none")
    return place(config.out_dir, config.name, config.flat)


def check_directory(config: RunConfig) -> Path:
    """As `run_of`. Raises FileNotFoundError, in one line, if there is none to resume."""
    path = run_of(config)
    if config.resume and not path.is_dir():
        raise FileNotFoundError(f"{path}: expected the directory of a run, found none")
    return path


def with_its_clients(config: RunConfig) -> RunConfig:
    """The configuration of a resumed run under Flower, with the number of its clients."""
    if config.resume:
        begun = Checkpoints(run_of(config) / FOLDER).facts().get("settings", {})
        number = begun.get("num-clients", config.num_clients)
        return config.having("num-clients", number)
    return config


def as_begun(config: RunConfig, at: int | None = None) -> str:
    """``vectorize``; if a resumed run leaves it open, the choice at its beginning."""
    if not config.resume or config.vectorize != "auto":
        return config.vectorize
    return vectorize_of(Checkpoints(run_of(config) / FOLDER).facts(at))


def vectorize_of(facts: Mapping[str, Any]) -> str:
    """Whether the run of a checkpoint vectorised its clients: on or off.

    Flower's runtimes train one at a time, and earlier versions left "auto" in their settings.
    """
    return "on" if facts.get("settings", {}).get("vectorize") == "on" else "off"


def restore(session: Session, checkpoint: Checkpoint) -> RoundState:
    """The state of a checkpoint, after the clients' states were restored."""
    state = unpack(session.method, checkpoint.server, checkpoint.facts)
    like = state_like(session.half, tuple(map(tuple, checkpoint.facts["shapes"])))
    session.fleet.restore(
        (i, (round, fill(like, tensors))) for i, (round, tensors) in checkpoint.clients.items()
    )
    return state
