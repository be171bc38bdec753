"""FedAvg - arXiv:1602.05629, Algorithm 1, in dense numpy.

    for t = 0 .. T-1:
        for i in P^t:
            w_{i,0} = w^t
            for k = 0 .. K-1:   w_{k+1} = w_k - lr_t (g_i(w_k) + wd w_k)
        w_bar^{t+1} = A_P[w_{i,K}]
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

With sam_rho it is FedSAM (arXiv:2206.02618): g_i(w_k) is g_i(w_k + r g_i(w_k) / ||g_i(w_k)||).
Decisions: lr_t = lr * lr_decay**t; with a relaxed start the server rule stays as written.
"""

from .problem import Federation, History, reference


@reference
def run(f: Federation, server_lr: float = 1.0) -> History:
    w = f.w0
    for t, active, _ in f.rounds():
        w_bar = f.mean({i: f.train(t, i, f.start(i, w)) for i in active})
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar)
    return f.history()
