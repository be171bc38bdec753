"""FedMuon - arXiv:2510.27403 - is fedpac.py with Muon.

A model whose only matrix is the output layer takes AdamW's steps; optimizers.py has `Muon` for
others.
"""

from .fedpac import run as run  # with its default, AdamW

CASES = [{"own": {"beta": 0.4}}]
COST = (4, 3, 1, 0, 4)
