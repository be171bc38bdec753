"""DiLoCo - arXiv:2311.08105, Algorithm 1, in dense numpy.

    m = 0
    for t = 0 .. T-1:
        for i in P^t:   K steps of AdamW along g_i(w_k) from w^t, with weight decay beside them
        D = (1/P) sum_{i in P} (w^t - w_{i,K})
        m <- mu m + D
        w^{t+1} = w^t - server_lr (D + mu m)

Decisions: AdamW's moments begin anew every round, or stay with the client (state = "keep"); the
server's Nesterov is torch.optim.SGD's.
"""

from .optimizers import SGD, AdamW
from .problem import Federation, History, reference

CASES = [{"own": {"mu": 0.6, "server_lr": 0.5}}]
COST = (1, 1, 1, 0, 2)


@reference
def run(f: Federation, mu: float = 0.9, server_lr: float = 0.7, inner: str = "adamw") -> History:
    f.make = {"adamw": AdamW, "sgd": SGD}[inner]
    w, m = f.w0, 0 * f.w0
    for t, active, _ in f.rounds(m=m):
        w_bar = f.mean({i: f.train(t, i, f.start(i, w)) for i in active})
        D = w - w_bar
        m = mu * m + D
        w = w - server_lr * (D + mu * m)
        f.record(w, w_bar, m=m)
    return f.history()
