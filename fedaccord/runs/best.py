"""The best model of a run by an evaluated metric, which is kept beside the last one."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedaccord.config import RunConfig
from fedaccord.core.metrics import BROADCAST, NODES, PERSONAL, WORST
from fedaccord.core.options import did_you_mean
from fedaccord.federation.method import Method
from fedaccord.federation.round import Round
from fedaccord.federation.session import Session
from fedaccord.runs.metrics import METRIC, NAMED, best

BEST = "best.safetensors"  # in a run directory
LATER = (PERSONAL, NODES)  # in names of metrics that the untrained model does not have
ENDS = (WORST, BROADCAST)  # of names of metrics


class Best:
    """The model of the round with the best value of the metric ``keep-best``; of equal ones the
    first. Round 0 does not count. Without the setting it is the one that an earlier part of the run
    kept, if any."""

    def __init__(self, config: RunConfig, metrics: str = "") -> None:
        """metrics: the names of those that are measured beside the loss; empty: not known.

        Raises ValueError, in one line, for a name that is not a metric of a model, and for one that
        is not measured with these settings.
        """
        metric = self.metric = config.keep_best
        self._kept: dict[str, Any] = {}  # its facts; empty: no model yet
        self._vector: Tensor | None = None  # (d + d_b,), parameters and averaged buffers
        if not metric:
            return
        choices = [
            name for name, column in METRIC.items() if column.better and name != "train-loss"
        ]
        functions = {name.partition(":")[2].strip() for name in config.task.metrics.split(",")}
        if metric.partition("-")[2] in functions - {""}:
            raise ValueError(
                "keep-best: expected a metric whose better direction is known, e.g. test-accuracy "
                f"or client-loss, got {metric!r}, a function of your own"
            )
        if metric not in choices:
            near = did_you_mean(metric, choices)
            raise ValueError(
                "keep-best: expected an evaluated metric, e.g. test-accuracy or client-loss, got "
                f"{metric!r}{near}; `fedaccord run --list-columns` lists them"
            )
        self.check(config, metrics)

    def check(self, config: RunConfig, metrics: str) -> None:
        """Raises ValueError, in one line, if the run does not measure the metric."""
        if not self.metric:
            return
        if needs := _needs(config, self.metric, metrics):
            raise ValueError(
                f"keep-best: expected a metric that this run measures, got {self.metric!r}: choose "
                f"another or set {needs}"
            )

    def is_new(self, round: Round, session: Session) -> bool:
        """Whether the round has the best model so far, which is kept then.

        Raises ValueError before round 1 if the run does not measure the metric.
        """
        if not self.metric:
            return False
        value = round.metrics.get(self.metric, math.nan)
        if round.number == 0:
            self._check_measured(round)
            return False
        if not math.isfinite(value):
            return False
        before = self._kept.get("value")
        if before is not None and best(self.metric)([before, value]) == before:
            return False
        s = round.state
        w = session.method.averaged_output(s.w, s.server)
        vector = w if s.buffers is None else torch.cat([w, s.buffers])
        self._vector = vector.to("cpu", copy=True)
        self._kept = {"file": BEST, "metric": self.metric, "round": round.number, "value": value}
        return True

    def _check_measured(self, round: Round) -> None:
        if self.metric not in round.metrics and not any(part in self.metric for part in LATER):
            measured = [name for name in round.metrics if name in METRIC and METRIC[name].better]
            raise ValueError(
                f"keep-best: expected a metric that this run measures, {', '.join(measured)}, got "
                f"{self.metric!r}"
            )

    def vectors(self, session: Session) -> tuple[Tensor, Tensor | None]:
        """Parameters (d,) and averaged buffers (d_b,) of the model; after `is_new`."""
        assert self._vector is not None
        d = session.like.numel()
        buffers = self._vector[d:] if session.buffer_layout else None
        return self._vector[:d], buffers

    def facts(self) -> dict[str, Any]:
        """Its entry in the summary and a checkpoint, in JSON's types; empty: no model yet."""
        return self._kept

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors in a checkpoint."""
        return {} if self._vector is None else {f"best.{self._kept['round']}": self._vector}

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore it from a checkpoint with the same metric, or of any if this part of the run has
        none."""
        if facts and self.metric in ("", facts["metric"]):
            self._kept, self._vector = {**facts}, tensors[f"best.{facts['round']}"].clone()


def _needs(config: RunConfig, metric: str, metrics: str) -> str:
    """The settings that a run lacks to measure a metric; empty: it measures it."""
    method, (at, _, name) = config.strategy, metric.partition("-")
    graph, evaluation = method.topology, method.evaluation
    held_out = "validation" if config.task.validation else "test"
    for end in LATER[1:] + ENDS:
        name = name.removesuffix(end)
    if at == "personal" and not method.has_personal:
        return "a method whose clients have their own models, or local-parameters"
    if at == "client" and evaluation == "server":
        return "evaluation=clients or evaluation=both"
    if at in ("client", "personal") and evaluation != "server" and not method.fraction_evaluate:
        return "fraction-evaluate above 0"
    if at in ("test", "validation", "train") and evaluation == "clients":
        return "evaluation=server or evaluation=both"
    if at in ("test", "validation") and at != held_out:
        return "validation=0" if at == "test" else "validation above 0"
    if at == "train" and not config.eval_train:
        return "eval-train=true"
    if metric.endswith(NODES) and not (graph.is_decentralised and graph.eval_nodes):
        return "gossip.topology and gossip.eval-nodes=true"
    if metric.endswith(BROADCAST) and (
        graph.is_decentralised or type(method).output_model is Method.output_model
    ):
        return "a method that returns another model than the one it broadcasts"
    if metrics and name in NAMED and name not in map(str.strip, metrics.split(",")):
        return f"metrics={name}"
    return ""
