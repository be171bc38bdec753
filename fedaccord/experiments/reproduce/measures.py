"""The papers' measures besides accuracy, and ours: of a run, as ratios, or of a method."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedaccord.config import RunConfig
from fedaccord.experiments.analysis.costs import reached, with_costs
from fedaccord.runs.reader import StoredRun

TO_TARGET = {  # costs up to the first evaluation at the target
    "rounds-to-target": "round",
    "gradients-to-target": "gradients",
    "bytes-to-target": "bytes",
    "seconds-to-target": "seconds",
}
OF_RUN = {  # columns of the results, in their order
    "consistency": "consistency Delta",
    "train-accuracy": "train accuracy, %",
    "generalisation-gap": "train less test accuracy, %",
    "rounds-to-target": "rounds to the target",
    "gradients-to-target": "gradients to it",
    "bytes-to-target": "bytes to it",
    "seconds-to-target": "seconds to the target",
    "seconds-a-round": "seconds a round",
}
RATIOS = {  # heading, measure, whether FedAvg's is divided by the method's
    "rounds-speed": ("speed in rounds", "rounds-to-target", True),
    "seconds-speed": ("speed in seconds", "seconds-to-target", True),
    "seconds-ratio": ("seconds a round / FedAvg's", "seconds-a-round", False),
}
COSTS = {
    "communication": "communication",
    "gradients-a-step": "gradients a step",
    "storage": "storage",
}
NAMES = {**OF_RUN, **{name: ratio[0] for name, ratio in RATIOS.items()}, **COSTS}
ACCURACY = "test-accuracy"
PERCENT = ("train-accuracy", "generalisation-gap")
BASELINE = "fedavg"


def of_run(run: StoredRun, target: float | None) -> dict[str, float]:
    """The measures of a run; ``target``: accuracy in percent. Missing ones are absent."""
    rounds, values = with_costs(run), dict[str, float]()
    for name in ("consistency", *PERCENT):
        if name in rounds and (series := rounds[name].dropna()).size:
            values[name] = float(series.iloc[-1]) * (100 if name in PERCENT else 1)
    if count := int((rounds["round"] > 0).sum()):
        values["seconds-a-round"] = float(rounds["seconds"].iloc[-1]) / count
    if target is not None and (row := reached(rounds, ACCURACY, target / 100)) is not None:
        values |= {name: float(row[column]) for name, column in TO_TARGET.items()}
    return {name: round(value, 4) for name, value in values.items()}


def of_method(settings: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, float]:
    """The sizes of a method's messages and states, as multiples of those of ``baseline``."""
    own, base = (RunConfig.make(each).strategy.cost for each in (settings, baseline))
    return {
        "communication": (own.down + own.up) / (base.down + base.up),
        "gradients-a-step": own.gradients,
        "storage": 1 + own.client,
    }


def ratio(name: str, own: pd.DataFrame, fedavg: pd.DataFrame) -> float:
    """The ratio of the means over the seeds of two cells' results; NaN if a seed has no value, or
    their seeds, or for seconds their devices, differ."""
    _, measure, is_speed = RATIOS[name]
    alike = ["seed", "device"] if measure.startswith("seconds") else ["seed"]
    if any({*own[column]} != {*fedavg[column]} for column in alike):
        return math.nan
    one, other = (float(cell[measure].mean(skipna=False)) for cell in (own, fedavg))
    return other / one if is_speed else one / other
