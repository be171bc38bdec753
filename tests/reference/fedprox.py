"""FedProx - arXiv:1812.06127, Algorithm 2, in dense numpy.

    for t = 0 .. T-1:
        for i in P^t:
            K steps on  f_i(w) + (mu/2) ||w - w^t||^2  from w_0 = w^t:
                w_{k+1} = w_k - lr_t (g_i(w_k) + mu (w_k - w^t) + wd w_k)
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

Decision: with ri_center="start" the centre of the prox term is w_0, as in the simulator of
FedInit's authors.
"""

from .problem import Federation, History, reference


@reference
def run(f: Federation, mu: float = 0.1, server_lr: float = 1.0) -> History:
    w = f.w0
    for t, active, _ in f.rounds():
        w_K = {}
        for i in active:
            w_0 = f.start(i, w)
            center = f.center(w, w_0)
            w_K[i] = f.train(t, i, w_0, lambda w_k, g: g + mu * (w_k - center))
        w_bar = f.mean(w_K)
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar)
    return f.history()
