"""FedAdam, FedYogi, FedAdagrad - arXiv:2003.00295, Algorithm 2, in dense numpy: elementwise.

    m = 0, v = v_0
    for t = 0 .. T-1:
        w_{i,K} as in FedAvg for i in P^t
        Delta = w_bar^{t+1} - w^t
        m <- beta1 m + (1 - beta1) Delta
        "adam":     v <- beta2 v + (1 - beta2) Delta^2
        "yogi":     v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)
        "adagrad":  v <- v + Delta^2                                   (beta1 = 0 in the paper)
        w^{t+1} = w^t + server_lr m / (sqrt(v) + tau)

Decisions: no bias correction; v_0 = tau^2 (None) as in the paper, or any number, e.g. 0.
"""

import numpy as np

from .problem import Federation, History, reference


@reference
def run(
    f: Federation,
    rule: str = "adam",
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v_0: float | None = None,
    server_lr: float = 0.1,
) -> History:
    w, m, v = f.w0, np.zeros(f.d), np.full(f.d, tau**2 if v_0 is None else v_0)
    for t, active, _ in f.rounds(m=m, v=v):
        w_bar = f.mean({i: f.train(t, i, f.start(i, w)) for i in active})
        Delta = w_bar - w
        m = beta1 * m + (1 - beta1) * Delta
        v = {
            "adam": beta2 * v + (1 - beta2) * Delta**2,
            "yogi": v - (1 - beta2) * Delta**2 * np.sign(v - Delta**2),
            "adagrad": v + Delta**2,
        }[rule]
        w = w + server_lr * m / (np.sqrt(v) + tau)
        f.record(w, w_bar, m=m, v=v)
    return f.history()
