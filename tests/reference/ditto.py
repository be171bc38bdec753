"""Ditto - arXiv:2012.04221, Algorithm 1, in dense numpy: personal models beside FedAvg.

    v_i = w^0 for all i
    for t = 0 .. T-1:
        for i in P^t, from w_0 = w^t, for k = 0 .. K-1:
            w_{k+1} = w_k - lr_t (g_i(w_k) + wd w_k)
            v_i <- v_i - lr_t (g_i(v_i) + lam (v_i - w^t) + wd v_i)
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

Decisions: v_i takes K steps too, on the batches of w; both gradients are clipped, or SAM's, each at
its own point; v_i is pulled to w^t, with a relaxed start too (ri_center = "start": to the start).
"""

from .problem import Federation, History, reference

CASES = [{"own": {"lam": 0.7, "server_lr": 0.9}, "states": ("v",)}]
COST = (1, 1, 2, 1, 1)


@reference
def run(f: Federation, lam: float = 0.1, server_lr: float = 1.0) -> History:
    w, v = f.w0, f.copies(f.w0)
    for t, active, _ in f.rounds():
        w_K = {}
        for i in active:
            w_0 = f.start(i, w)
            center = f.center(w, w_0)
            w_K[i] = f.train(t, i, w_0)
            v[i] = f.steps(t, i, v[i], lambda v_k, g: g + lam * (v_k - center))
        w_bar = f.mean(w_K)
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar)
    return f.history(v=v)
