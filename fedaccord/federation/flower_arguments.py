"""Arguments of Flower's strategies that have other names here."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedaccord.core.options import did_you_mean

HERE = {  # a name of Flower's strategies, of this interface or of its earlier one -> the name here
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
    "proximal_mu": "mu",
    "eta": "server_lr",
    "server_learning_rate": "server_lr",
    "server_momentum": "beta",
    "eta_l": "lr",
    "beta_1": "beta1",
    "beta_2": "beta2",
}
AT_START = {  # -> the argument of `start`
    "initial_parameters": "initial_arrays",
    "on_fit_config_fn": "train_config",
    "on_evaluate_config_fn": "evaluate_config",
    "evaluate_fn": "evaluate_fn",
    "train_config": "train_config",
    "num_rounds": "num_rounds",
}


def check_arguments(kind: type[Any], positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise TypeError, in one line, for an argument that a strategy does not have."""
    names = [field.name for field in fields(kind) if field.init]
    if positional:
        raise TypeError(
            f"{kind.__name__}: expected keyword arguments, got {positional[0]!r:.40}: e.g. "
            f"{kind.__name__}(fraction_train=0.5)"
        )
    for name, value in named.items():
        if name in names:
            continue
        if name in AT_START:
            near = f"give {AT_START[name]} to {kind.__name__}.start"
        elif HERE.get(name) in names:
            near = f"it is called {HERE[name]} here"
        else:
            near = f"help({kind.__name__}) lists the arguments{did_you_mean(name, names)}"
        raise TypeError(f"{kind.__name__}: unknown argument {name}={value!r:.40}: {near}")
