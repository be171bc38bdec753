"""FedDeper - arXiv:2210.03444, Algorithm 1, in dense numpy.

    v_i = w^0 for all i
    for t = 0 .. T-1:
        x = w^t
        for i in P^t:
            y_0 = x, v_0 = v_i
            for k = 0 .. K-1:
                y_{k+1} = y_k - lr_t (g_i(y_k) + wd y_k) - rho (v_k + y_k - 2x)
                v_{k+1} = v_k - lr_t (g_i(v_k) + wd v_k)
            v_i <- (1 - lam) v_K + lam y_K
        w^{t+1} = w^t + server_lr A_P[y_{i,K} - x]

Decisions: y uses the old v_k; both gradients see the same batch and are clipped separately; rho
is a step factor, not scaled by lr_t; weight decay acts on y and v alike; with sam_rho both are
SAM gradients; a relaxed start moves y_0 only (ri_center="server"), or stands for x in the line of y
("start"). v_i of inactive clients stays.
"""

from .problem import Federation, History, reference


@reference
def run(f: Federation, rho: float = 0.03, lam: float = 0.5, server_lr: float = 1.0) -> History:
    x, v_i = f.w0, f.copies(f.w0)
    for t, active, lr_t in f.rounds():
        y_K = {}
        for i in active:
            y, v = f.start(i, x), v_i[i]
            center = f.center(x, y)
            for k in range(f.K(i)):
                g_y, g_v = f.gradient(t, i, k, y), f.gradient(t, i, k, v)
                y = y - lr_t * (g_y + f.wd * y) - rho * (v + y - 2 * center)
                v = v - lr_t * (g_v + f.wd * v)
            v_i[i] = (1 - lam) * v + lam * y
            y_K[i] = f.end(i, y)
        w_bar = f.mean(y_K)
        x = x + server_lr * (w_bar - x)
        f.record(x, w_bar)
    return f.history(v=v_i)
