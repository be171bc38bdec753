"""A method with the settings of its trials, named by a hash of those that affect the numbers."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fedaccord import config
from fedaccord.config import RunConfig
from fedaccord.data import datasets
from fedaccord.data.datasets import kind_of
from fedaccord.data.kind import ReadOptions
from fedaccord.experiments.sweep.records import naming_defaults
from fedaccord.runs.named_contents import functions, of_code
from fedaccord.storage.files import contents


@dataclass(frozen=True, eq=False)
class Configuration:
    """A method with a choice for each key of its space."""

    algo: str
    point: dict[str, Any]  # the keys of the space
    settings: dict[str, Any]  # run-config keys, but for seed and place
    usual: Mapping[str, Any] | None = None  # of a folder, see `naming_defaults`; None: today's
    choice: Mapping[str, Any] = field(default_factory=dict)  # `point` before `fair` changed it

    @cached_property
    def config(self) -> RunConfig:
        return RunConfig.make(self.settings)

    @cached_property
    def name(self) -> str:
        """Method and hash of the settings that affect its numbers and are not defaults, as later
        versions may have more keys. The hash includes contents of files, samples of the user's
        data, and code of functions and of other packages' methods. Raises
        ValueError, in one line, if one cannot be read or imported.
        """
        used, usual = config.in_use(self.config), self.usual or naming_defaults()
        deciding = {k: v for k, v in used.items() if k in usual and v != usual[k] and k != "seed"}
        for key in config.paths(deciding):
            deciding[key] = contents(Path(deciding[key]))
        for key, digest in self.code.items():
            deciding[key] = f"{used[key]} {digest}"
        if kind_of(used["dataset"]).origin in ("user", "function"):
            task = self.config.task
            samples = _samples(task.dataset, task.data_dir, task.reading)
            deciding["dataset"] = f"{task.dataset} {samples}"
        digest = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()
        return f"{self.algo}-{digest[:10]}"

    def run_name(self, seed: int) -> str:
        """The name of its run with this seed."""
        return f"{self.name}-seed{seed}"

    @cached_property
    def code(self) -> dict[str, str]:
        """Hashes of the code of functions, by key. Raises as `name`."""
        return {key: of_code(key, paths) for key, paths in functions(self.config).items()}

    @property
    def rounds(self) -> int:
        return self.config.num_server_rounds

    @property
    def gradients(self) -> float:
        """Gradient evaluations per local step."""
        return self.config.strategy.cost.gradients


@cache
def _samples(dataset: str, data_dir: str, reading: ReadOptions) -> str:
    """The checksum of a data set's samples, which are read or made once."""
    return datasets.load(dataset, data_dir, reading).checksum
