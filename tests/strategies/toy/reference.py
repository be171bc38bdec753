"""FedToy, in dense numpy: clients remember the mean direction of their last visit.

m_i = 0
for t = 0 .. T-1, for i in P^t:
    w_k = w_{i,0}; K times: w_k <- w_k - lr (g_i(w_k) + gamma m_i + wd w_k)
    m_i <- (w_{i,0} - w_{i,K}) / (K lr)
w^{t+1} = w^t + server_lr (w_bar - w^t)
"""

from tests.reference.problem import Federation, History, reference

CASES = [{"own": {"gamma": 0.2, "server_lr": 0.8}, "states": ("m",)}]
COST = (1, 1, 1, 1, 1)


@reference
def run(f: Federation, gamma: float = 0.1, server_lr: float = 0.5) -> History:
    w, m = f.w0, f.zeros()
    for t, active, lr_t in f.rounds():
        w_K = {}
        for i in active:
            w_0 = f.start(i, w)
            w_K[i] = f.train(t, i, w_0, lambda w_k, g: g + gamma * m[i])
            m[i] = (w_0 - w_K[i]) / (f.K(i) * lr_t)
        w_bar = f.mean(w_K)
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar)
    return f.history(m=m)
