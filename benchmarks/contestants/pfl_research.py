"""pfl-research's FedAvg, set up as in its own CIFAR-10 benchmark: tensors in memory, one process.

Its evaluation on users is left out, and the test samples are evaluated when the others do it.
"""

from itertools import chain
from typing import Any

import torch
from common import Job, arrays, due, network, partition, prepared, read_job, report
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Sequential):
    """The network with what pfl asks of a model."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.eval()
        return {"accuracy": Weighted((self(x).argmax(1) == y).sum().item(), len(y))}


class Teller(TrainingProcessCallback[PyTorchModel]):
    def __init__(self, job: Job, test: Dataset) -> None:
        self.job, self.test = job, test

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        return self.tell(model, 0)

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        return False, self.tell(model, central_iteration + 1)

    def tell(self, model: PyTorchModel, round: int) -> Metrics:
        if due(self.job, round):
            params = NNEvalHyperParams(local_batch_size=1000)
            metrics = model.evaluate(self.test, eval_params=params)
            ((_, accuracy),) = metrics
            report(round, accuracy.overall_value)
        return Metrics()


class Averaging(FederatedAveraging):
    """FedAvg without the evaluation of the first round's users before and after their training."""

    def simulate_one_user(self, model: Any, user_dataset: Any, central_context: Any) -> Any:
        object.__setattr__(central_context, "do_evaluation", False)
        return super().simulate_one_user(model, user_dataset, central_context)


def main() -> None:
    job = read_job()
    data = arrays(job)
    x, y = prepared(job, data["x_train"]), torch.from_numpy(data["y_train"]).long()
    users = [(x[part], y[part]) for part in partition(job)]
    test = Dataset((prepared(job, data["x_test"]), torch.from_numpy(data["y_test"]).long()))
    turns = chain.from_iterable(job["cohorts"])
    federated = FederatedDataset.from_slices(users, lambda: next(turns))
    net = Classifier(*network(job))
    model = PyTorchModel(
        net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    Averaging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=len(job["cohorts"]),
            evaluation_frequency=len(job["cohorts"]),
            train_cohort_size=len(job["cohorts"][0]),
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(federated, federated, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=job["batch-size"],
            local_num_epochs=job["epochs"],
            local_learning_rate=job["lr"],
        ),
        callbacks=[Teller(job, test)],
    )


if __name__ == "__main__":
    main()
