"""SCAFFOLD, option II - arXiv:1910.06378, Algorithm 1, in dense numpy.

    c_i = 0 for all i, c = 0
    for t = 0 .. T-1:
        for i in P^t:
            w_0 = w^t
            for k = 0 .. K_i-1:   w_{k+1} = w_k - lr_t (g_i(w_k) - c_i + c + wd w_k)
            c_i^+ = c_i - c + (w_0 - w_{K_i}) / (K_i lr_t)
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)
        c <- c + (1/C) sum_{i in P} (c_i^+ - c_i)            (C, not P)
        c_i <- c_i^+ for i in P, unchanged otherwise

Decisions: all start at zero; every client of a round uses the c of its start; with a relaxed
start c_i^+ takes the true displacement w_{i,0} - w_{i,K}, the
server rule w_bar - w^t. Steps of another optimiser do not add up to gradients: there c_i^+ is the
mean over the steps of g_i(w_k). With sam_rho it is FedGamma (IEEE 10269141), with path_rho
FedLESAM-S.
"""

from .optimizers import SGD
from .problem import Federation, History, reference


@reference
def run(f: Federation, server_lr: float = 1.0) -> History:
    w, c, c_i = f.w0, 0 * f.w0, f.zeros()
    for t, active, lr_t in f.rounds(c=c):
        w_K, c_plus = {}, c_i.copy()
        for i in active:
            w_0 = f.start(i, w)
            w_K[i] = f.train(t, i, w_0, lambda w_k, g: g - c_i[i] + c)
            c_plus[i] = c_i[i] - c + (w_0 - w_K[i]) / (f.K(i) * lr_t)
            if f.make is not SGD:
                c_plus[i] = f.mean_gradient[i]
        w_bar = f.mean(w_K)
        w = w + server_lr * (w_bar - w)
        c = c + (c_plus - c_i).sum(axis=0) / f.C
        c_i = c_plus
        f.record(w, w_bar, c=c)
    return f.history(c_i=c_i)
