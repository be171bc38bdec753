"""FedNova - arXiv:2007.07481, in dense numpy: normalised averaging of unequal local work.

    for t = 0 .. T-1:
        for i in P^t:
            w_0 = w^t, u_0 = 0
            for k = 0 .. K_i-1:   u_{k+1} = mu u_k + g_i(w_k) + wd w_k
                                  w_{k+1} = w_k - lr_t u_{k+1}
            a_i = [K_i - mu (1 - mu^K_i) / (1 - mu)] / (1 - mu)        (mu = 0: a_i = K_i)
            d_i = (w_{i,0} - w_{i,K_i}) / a_i
        tau_eff = sum_P p_i a_i
        w^{t+1} = w^t - server_lr tau_eff sum_P p_i d_i

`local_steps` may be a sequence: K_i of every client. Decisions: p_i = 1/P, or with `examples` n_i
over the sum of n_j of the active clients; lr_t is left in d_i; the momentum buffer u starts at zero
each round.

Under a relaxed start d_i takes the true displacement. At mu = 0 the steps add up to
w_{i,0} - w_{i,K_i} = lr_t sum_k (g_i(w_k) + wd w_k), so d_i / lr_t is the mean gradient of the K_i
steps, whatever K_i and w_{i,0} are, and the server takes tau_eff steps of the mean of these. From
w^t instead, d_i would hold -ri_beta (w^t - l_i) / a_i, which is no step, and after the product with
tau_eff a client with few steps would give its jump the weight tau_eff / a_i. At equal a_i the
server rule is w^t + server_lr A_P[w_{i,K} - w_{i,0}]: at server_lr = 1 FedInit's with
ri_server="updates".
"""

from .problem import Federation, History, reference


@reference
def run(f: Federation, momentum: float = 0.0, server_lr: float = 1.0) -> History:
    w, mu = f.w0, momentum
    for t, active, lr_t in f.rounds():
        w_K, a, d = {}, {}, {}
        for i in active:
            w_k = w_0 = f.start(i, w)
            u, K_i = 0 * w, f.K(i)
            for k in range(K_i):
                u = mu * u + f.gradient(t, i, k, w_k) + f.wd * w_k
                w_k = w_k - lr_t * u
            a[i] = (K_i - mu * (1 - mu**K_i) / (1 - mu)) / (1 - mu)
            d[i] = (w_0 - w_k) / a[i]
            w_K[i] = f.end(i, w_k)
        p = f.shares(active)
        tau_eff = sum(p[i] * a[i] for i in active)
        w = w - server_lr * tau_eff * sum(p[i] * d[i] for i in active)
        f.record(w, f.mean(w_K))
    return f.history()
