"""What a whole round of every centralised method costs beside FedAvg's round.

    python benchmarks/methods.py                        # the tables
    python benchmarks/methods.py scaffold feddyn        # these methods only
    python benchmarks/methods.py --check                # exit 1 if a target is missed
    python benchmarks/methods.py --clock cpu --threads 1        # on a machine that others use too
    python benchmarks/methods.py --out out.json         # stopped and started again, it resumes

CIFAR-10, LeNet and ResNet-18 with GroupNorm; a few clients of 500 samples, all of them active in
every round, because FedPD requires it; batch 50, random crops and mirrored images. The first round,
in which the clients' states are created, is not measured. A round is one of the in-process engine:
messages, checks, aggregation and metrics included; evaluation not.

The methods take turns, each repetition in another order, and before and after every method FedAvg
takes a turn: a method's ratio is its time over the mean of these two, so that the noise of a
machine falls on both alike. FedAvg is measured once more as one of the methods: how far its ratio
is from 1 shows the noise.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import data
import timing
from timing import SETTING, OneRound, engine_round, seconds_of, spread

from fedaccord.config import RunConfig
from fedaccord.core.cost import Cost
from fedaccord.strategies import METHODS, DFedAvg
from fedaccord.task import Clients, load_task

BASELINE = "fedavg"


class Size(NamedTuple):
    """A round that takes a few seconds in one thread."""

    title: str
    clients: int
    steps: int


MODELS = {
    "lenet": Size("LeNet", clients=4, steps=10),
    "resnet18": Size("ResNet-18 with GroupNorm (ImageNet's stem)", clients=2, steps=10),
}
# Gradients per local step of a method -> its round in rounds of FedAvg.
ALLOWED = {1: 1.15, 2: 2.1}
OWN_ALLOWED = {  # and why
    "feddeper": (2.2, "steps two models"),
    "fedmuon": (1.8, "orthogonalises matrices in every step"),  # at the same cost for any batch
}
COMPARED = [  # with a server, and with as many steps as FedAvg: scaffnew draws their number
    name
    for name, kind in METHODS.items()
    if not issubclass(kind, DFedAvg) and "local_steps" not in kind.replaces
]

Pair = tuple[float, float]  # seconds of the method, mean seconds of FedAvg before and after it
Repetition = dict[str, Pair]  # by method
Measured = dict[str, list[Repetition]]  # by model


def main() -> None:
    options = arguments().parse_args()
    if unknown := [name for name in options.methods if name not in METHODS]:
        sys.exit(f"unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    options.methods = [name for name in METHODS if name in options.methods]
    timing.prepare(options)
    try:
        measured = earlier(options)
        for model in options.models:
            measure(model, measured, options)
            del measured[model][options.repetitions :]
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        sys.exit(str(error))

    for model in options.models:
        print(f"\n{table(model, measured[model], options)}")
    missed = missed_targets(measured, options)
    print("\n" + ("\n".join(missed) or "all targets met"))
    if options.markdown:
        timing.rewrite(options.markdown, page(measured, options))
    if options.check and missed:
        sys.exit(1)


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    every = f"default: all of {', '.join(COMPARED)}"
    parser.add_argument("methods", nargs="*", default=COMPARED, help=every)
    timing.add_options(parser)
    timing.add_device(parser)
    timing.add_out(parser)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--clients", type=int, help=f"active {said('clients')}")
    parser.add_argument("--steps", type=int, help=f"local steps of a client; {said('steps')}")
    return parser


def said(field: str) -> str:
    return "default: " + ", ".join(f"{getattr(size, field)} for {m}" for m, size in MODELS.items())


def size_of(model: str, options: argparse.Namespace) -> Size:
    overrides = {name: getattr(options, name) for name in ("clients", "steps")}
    return MODELS[model]._replace(**{name: n for name, n in overrides.items() if n is not None})


def cost(method: str) -> Cost:
    return METHODS[method](fraction_train=1.0).cost


def allowed(method: str) -> float:
    own, _ = OWN_ALLOWED.get(method, (0.0, ""))
    return own or ALLOWED[int(cost(method).gradients)]


# --- measuring ------------------------------------------------------------------------------------


def measure(model: str, measured: Measured, options: argparse.Namespace) -> None:
    """Repeat until there are as many repetitions as asked for; each is saved at once."""
    repetitions = measured.setdefault(model, [])
    if len(repetitions) >= options.repetitions:
        return
    clients = list(range(size_of(model, options).clients))
    tell(f"{model}: the first round of FedAvg and of every method, not measured")
    base = make(model, BASELINE, options)
    rounds = {name: make(model, name, options) for name in options.methods}
    for one_round in (base, *rounds.values()):
        one_round(clients)
    while len(repetitions) < options.repetitions:
        number = len(repetitions) + 1
        k = 5 * (number - 1) % len(rounds)  # by more than one, so that neighbours change sides
        order = options.methods[k:] + options.methods[:k]
        if number % 2 == 0:
            order.reverse()
        repetition: Repetition = {}
        before = seconds_of(base, clients, options)
        for name in order:
            own = seconds_of(rounds[name], clients, options)
            after = seconds_of(base, clients, options)
            repetition[name] = own, (before + after) / 2
            tell(
                f"{model} {number}/{options.repetitions} {name} {own:.2f} s, "
                f"{own / repetition[name][1]:.3f} x {BASELINE}"
            )
            before = after
        repetitions.append(repetition)
        save(measured, options)


def make(model: str, method: str, options: argparse.Namespace) -> OneRound:
    size = size_of(model, options)
    settings = SETTING | {
        "model": model,
        "algo": method,
        "data-dir": str(data.find()),
        "device": options.device,
        "local-steps": size.steps,
        "fraction-train": 1.0,
    }
    whole = load_task(RunConfig.make(settings).task, num_clients=SETTING["num-clients"])
    assert isinstance(whole.clients, Clients)
    few = Clients(whole.clients.x, whole.clients.y, (whole.clients.parts or [])[: size.clients])
    if len(few) < size.clients:
        raise ValueError(f"--clients: expected at most {len(few)}, got {size.clients}")
    config = RunConfig.make(settings | {"num-clients": size.clients})
    return engine_round(replace(whole, clients=few), config)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- results --------------------------------------------------------------------------------------


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """What two runs must share for their numbers to stand in one table."""
    sizes = {model: size_of(model, options)._asdict() for model in MODELS}
    return {"setting": SETTING, "sizes": sizes, "methods": options.methods} | timing.machine(
        options
    )


def earlier(options: argparse.Namespace) -> Measured:
    """What --out holds already. Raises ValueError where that was made in another setting."""
    if not options.out or not options.out.exists():
        return {}
    content = json.loads(options.out.read_text())
    measured: Measured = content.pop("seconds", {})
    if content != json.loads(json.dumps(setting(options))):
        raise ValueError(
            f"{options.out} holds results of other options or another machine: give the same "
            "ones, choose another --out, or move it away"
        )
    return measured


def save(measured: Measured, options: argparse.Namespace) -> None:
    if options.out:
        text = json.dumps(setting(options) | {"seconds": measured}, indent=2)
        options.out.write_text(text + "\n")


def ratios(repetitions: list[Repetition], method: str) -> list[float]:
    return [own / base for own, base in (repetition[method] for repetition in repetitions)]


def missed_targets(measured: Measured, options: argparse.Namespace) -> list[str]:
    lines = []
    for model in options.models:
        for name in options.methods:
            ratio = statistics.median(ratios(measured[model], name))
            if ratio > allowed(name):
                lines.append(
                    f"missed: {name} with {model} takes {ratio:.3f} x {BASELINE}, "
                    f"allowed {allowed(name):.2f}"
                )
    return lines


def table(model: str, repetitions: list[Repetition], options: argparse.Namespace) -> str:
    size = size_of(model, options)
    lines = [
        f"## {size.title}",
        "",
        timing.conditions(size.clients, size.steps, options),
        "",
        "| method | gradients a step | seconds a round: median (min to max) | "
        f"ratio to {BASELINE}, likewise | allowed |",
        "| --- | --: | --: | --: | --: |",
    ]
    for name in options.methods:
        ratio = ratios(repetitions, name)
        missed = ", **missed**" if statistics.median(ratio) > allowed(name) else ""
        lines.append(
            f"| {name} | {cost(name).gradients:g} | "
            f"{spread([each[name][0] for each in repetitions], 2)} | {spread(ratio, 3)} | "
            f"{allowed(name):.2f}{missed} |"
        )
    if others := [name for name in COMPARED if name not in options.methods]:
        lines += ["", f"Not measured yet: {', '.join(others)}."]
    return "\n".join(lines)


def page(measured: Measured, options: argparse.Namespace) -> str:
    """The tables with what was measured, for docs/results."""
    missed = missed_targets(measured, options)
    lines = [
        "# What a round of each method costs",
        "",
        "A whole round of the in-process engine, without evaluation, against FedAvg's. CIFAR-10, "
        f"clients of 500 samples (the first of {SETTING['num-clients']} of a Dirichlet partition "
        f"with alpha {SETTING['dirichlet-alpha']:g}), weight decay, clipping, random crops and "
        "mirrored images. All clients are active in every round, because FedPD requires it; the "
        f"first round, in which the clients' states are created, is not measured. Hardware: "
        f"{timing.hardware(options)}.",
        "",
        "The methods alternate, each repetition in another order, with FedAvg before and after "
        "each of them: a ratio is the method's time over the mean of these two. FedAvg is "
        "also measured as one of the methods; the distance of its ratio from 1 shows the noise.",
        "",
        "With all clients active A-FedPD has no missed dual to send. Few local steps show a "
        "method's overhead at its largest: it falls with the number of steps a round.",
        "",
    ]
    for model in options.models:
        lines += [table(model, measured[model], options), ""]
    lines += [
        "## Targets",
        "",
        "Medians, of the methods measured: methods with one gradient a step at most "
        f"{ALLOWED[1]:.2f} x FedAvg, with two at most {ALLOWED[2]:.2f} x, "
        + ", ".join(f"{n}, which {why}, at most {x:.2f} x" for n, (x, why) in OWN_ALLOWED.items())
        + f": {'; '.join(missed) or 'all met'}.",
        "",
        f"Made by `{timing.command(arguments(), options)}`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
