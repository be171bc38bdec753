"""BlazeFL's FedAvg with its pool of processes; data sets as in its examples, read from memory."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgPartitionType
from blazefl.contrib import FedAvgProcessPoolClientTrainer as Trainer
from blazefl.core import FilteredDataset, IPCMode, ModelSelector, PartitionedDataset
from common import Job, arrays, network, partition, read_job, report, transform
from torch import Generator, nn
from torch.utils.data import DataLoader


class Selector(ModelSelector):
    def __init__(self, job: Job) -> None:
        self.job = job

    def select_model(self, model_name: str) -> nn.Module:
        return network(self.job)


class Images(PartitionedDataset[FedAvgPartitionType]):
    def __init__(self, job: Job) -> None:
        self.job = job

    def get_dataset(self, type_: FedAvgPartitionType, cid: int | None) -> FilteredDataset:
        key = tuple(sorted((name, self.job[name]) for name in ("data", "partition")))
        data, parts = kept(key)
        train = type_ == FedAvgPartitionType.TRAIN
        x, y = (data[f"{name}_{'train' if train else 'test'}"] for name in "xy")
        rows = parts[cid] if cid is not None else list(range(len(y)))
        return FilteredDataset(rows, x, y.tolist(), transform=transform(self.job))

    def set_dataset(self, *_: Any, **__: Any) -> None:
        """Nothing changes in it."""

    def get_dataloader(
        self,
        type_: FedAvgPartitionType,
        cid: int | None,
        batch_size: int | None = None,
        generator: Generator | None = None,
    ) -> Any:
        dataset = self.get_dataset(type_, cid)
        return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator)


@cache
def kept(key: tuple[tuple[str, str], ...]) -> tuple[dict[str, Any], list[list[int]]]:
    """Images and partition, read once per process."""
    job = dict(key)
    return arrays(job), partition(job)


def main() -> None:
    job = read_job()
    dataset, selector = Images(job), Selector(job)
    clients, rounds = len(job["cohorts"][0]), len(job["cohorts"])
    common = {
        "model_selector": selector,
        "model_name": "",
        "dataset": dataset,
        "num_clients": clients,
        "device": "cpu",
        "seed": 0,
        "batch_size": job["batch-size"],
    }
    handler = FedAvgBaseServerHandler(global_round=rounds, sample_ratio=1.0, **common)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            share_dir=Path(folder, "share"),
            state_dir=Path(folder, "state"),
            epochs=job["epochs"],
            lr=job["lr"],
            num_parallels=job["processes"],
            ipc_mode=IPCMode.SHARED_MEMORY,
            **common,
        )
        report(0, handler.get_summary()["server_acc"])
        while not handler.if_stop():
            trainer.local_process(handler.downlink_package(), handler.sample_clients())
            for package in trainer.uplink_package():
                handler.load(package)
            report(handler.round, handler.get_summary()["server_acc"])


if __name__ == "__main__":
    mp.set_start_method("spawn")
    main()
