"""FedLESAM-D - arXiv:2405.18890: feddyn.py with the gradients g_i(w_k + e_i) of fedlesam.py."""

from .feddyn import run as run

CASES = [
    {"own": {"radius": r, "alpha": 0.3}, "theirs": {"path_rho": r}, "states": ("lam", "w_old")}
    for r in (0.2, 0.0)
]
COST = (1, 1, 1, 2, 2)
