"""FedLESAM-S - arXiv:2405.18890: scaffold.py with the gradients g_i(w_k + e_i) of fedlesam.py."""

from .scaffold import run as run

CASES = [
    {"own": {"radius": r, "server_lr": lr}, "theirs": {"path_rho": r}, "states": ("c_i", "w_old")}
    for r, lr in ((0.2, 0.8), (0.0, 1.0))
]
COST = (2, 2, 1, 2, 2)
