"""The example of one's own tensors, model and loss."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "examples" / "own-data" / "compare.py"


def test_every_method_learns_from_the_same_start() -> None:
    spec = importlib.util.spec_from_file_location("compare", FILE)
    assert spec
    assert spec.loader
    compare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compare)

    clients, (x, _) = compare.samples()
    assert len(clients) == compare.CLINICS
    assert sum(len(y) for _, y in clients) + len(x) == 569
    shares = [float(y.mean()) for _, y in clients]  # of one diagnosis
    assert sum(share < 0.2 or share > 0.8 for share in shares) > compare.CLINICS / 2

    losses = compare.compare(["fedavg", "scaffold"], rounds=3)
    assert list(losses) == ["fedavg", "scaffold"]
    assert losses["fedavg"][0] == losses["scaffold"][0]
    assert (losses.loc[3] < 0.5 * losses.loc[0]).all()
