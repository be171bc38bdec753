"""FedDyn - arXiv:2111.04263, Algorithm 1, in dense numpy, with the paper's signs.

    q_i = 0 for all i (the stored gradients), h = 0
    for t = 0 .. T-1:
        for i in P^t:
            K steps on  f_i(w) - <q_i, w> + (alpha/2) ||w - w^t||^2  from w_0 = w^t:
                w_{k+1} = w_k - lr_t (g_i(w_k) - q_i + alpha (w_k - w^t) + wd w_k)
            q_i <- q_i - alpha (w_{i,K} - w^t)
        h <- h - (alpha/C) sum_{i in P} (w_{i,K} - w^t)
        w^{t+1} = w_bar^{t+1} - h/alpha

Decisions: the step of h is divided by C, not P; lam_i = -q_i and lam_bar = -h are what the
family of primal-dual methods calls them. With ri_center="start" w_0 stands for w^t in the proximal
term and in the steps of q_i and h, as in the simulator of FedInit's authors: h remains the mean of
the q_i. With path_rho it is FedLESAM-D.
"""

from .problem import Federation, History, reference


@reference
def run(f: Federation, alpha: float = 0.1) -> History:
    w, q, h = f.w0, f.zeros(), 0 * f.w0
    for t, active, _ in f.rounds(lam_bar=-h):
        w_K, moves = {}, {}
        for i in active:
            w_0 = f.start(i, w)
            center = f.center(w, w_0)
            w_K[i] = f.train(t, i, w_0, lambda w_k, g: g - q[i] + alpha * (w_k - center))
            moves[i] = w_K[i] - center
            q[i] = q[i] - alpha * moves[i]
        h = h - alpha / f.C * sum(moves.values())
        w_bar = f.mean(w_K)
        w = w_bar - h / alpha
        f.record(w, w_bar, lam_bar=-h)
    return f.history(lam=-q)
