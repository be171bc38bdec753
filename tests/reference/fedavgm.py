"""FedAvgM - arXiv:1909.06335, in dense numpy: momentum on the server.

    v = 0
    for t = 0 .. T-1:
        w_{i,K} as in FedAvg for i in P^t
        v <- beta v + (w_bar^{t+1} - w^t)
        w^{t+1} = w^t + server_lr v

Decisions: heavy ball, not Nesterov's form w + server_lr (Delta + beta v).
"""

from .problem import Federation, History, reference


@reference
def run(f: Federation, beta: float = 0.9, server_lr: float = 1.0) -> History:
    w, v = f.w0, 0 * f.w0
    for t, active, _ in f.rounds(v=v):
        w_bar = f.mean({i: f.train(t, i, f.start(i, w)) for i in active})
        v = beta * v + (w_bar - w)
        w = w + server_lr * v
        f.record(w, w_bar, v=v)
    return f.history()
