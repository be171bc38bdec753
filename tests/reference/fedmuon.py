"""FedMuon - arXiv:2510.27403 - is fedpac.py with Muon.

A model whose only matrix is the output layer takes AdamW's steps; `Muon` is for others, with the
matrices that torch.optim.Muon makes orthogonal.
"""

import numpy as np
import torch

from .fedpac import run as run  # with its default, AdamW
from .optimizers import AdamW
from .problem import Array

CASES = [{"own": {"beta": 0.4}}]
COST = (4, 3, 1, 0, 4)


class Muon:
    """PyTorch's on the first entries, a matrix of that shape, and AdamW on the others."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.others, self.M = AdamW(), np.zeros(shape)

    def step(self, d: Array) -> Array:
        p = torch.nn.Parameter(torch.zeros(self.M.shape, dtype=torch.float64))
        p.grad = torch.from_numpy(d[: self.M.size].reshape(self.M.shape).copy())
        muon = torch.optim.Muon([p], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        muon.state[p]["momentum_buffer"] = torch.from_numpy(self.M.copy())
        muon.step()
        step = self.others.step(d)
        step[: self.M.size] = -p.detach().numpy().ravel()
        self.M = muon.state[p]["momentum_buffer"].numpy()
        return step

    def sent(self) -> list[Array]:
        return [*self.others.sent(), self.M]

    def start(self, m: Array, v: Array, M: Array) -> None:
        self.others.start(m, v)
        self.M = M
