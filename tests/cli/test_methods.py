"""`fedaccord methods`: every method with its paper and its cost."""

from pathlib import Path

from fedaccord.cli.about import about
from fedaccord.cli.methods import cost_note, methods_markdown
from fedaccord.strategies import METHODS, FedCM, FederatedStrategy, RelaxedInit
from tests.cli.shell import invoke, refusal, success

STRATEGIES: dict[str, FederatedStrategy] = {
    name: kind(fraction_train=1.0) for name, kind in METHODS.items()
}


def test_methods_lists_each_with_paper_and_cost_in_80_columns() -> None:
    result = success(invoke("methods"))
    lines, words = result.stdout.splitlines(), " ".join(result.stdout.split())
    assert max(map(len, lines)) <= 80
    for name, strategy in STRATEGIES.items():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        costs, buffered = [f"{x:g}" for x in strategy.cost], not strategy.why_synchronous
        assert line.split()[-6:] == [*costs, "yes" if buffered else "no"]
        assert cost_note(strategy) in words
        assert (f"{name} [" in line) == bool(cost_note(strategy))
        title = about(type(strategy)).title.partition(": ")[2]
        below = " ".join(" ".join(lines[lines.index(line) + 1 :]).split())
        assert below.startswith(title)
        assert about(type(strategy)).arxiv in line.split() or not about(type(strategy)).arxiv
    scaffold = next(line for line in lines if line.startswith("scaffold "))
    assert "1910.06378" in scaffold
    assert invoke("methods", "--markdown").stdout == methods_markdown()  # the table of the README


def test_two_forms_of_the_list_are_refused(tmp_path: Path) -> None:
    assert "got both" in refusal(tmp_path, invoke("methods", "--markdown", "--json"))


def test_a_note_has_the_extra_cost_of_the_first_message_and_the_methods_own() -> None:
    first = "w^0 once, with a client's first training message"
    assert cost_note(STRATEGIES["fedavg"]) == ""
    assert cost_note(STRATEGIES["fedinit"]) == first
    assert cost_note(STRATEGIES["fedcm"]) == FedCM.cost_note != ""
    relaxed = FedCM(plugins=(RelaxedInit(beta=0.1),))
    assert cost_note(relaxed) == f"{first}; {FedCM.cost_note}"
