"""FedCM - arXiv:2106.10874, Algorithm 2, in dense numpy.

    Delta = 0
    for t = 0 .. T-1:
        for i in P^t:
            w_0 = w^t
            for k = 0 .. K-1:   w_{k+1} = w_k - lr_t (alpha g_i(w_k) + (1 - alpha) Delta + wd w_k)
        Delta <- A_P[(w_{i,0} - w_{i,K}) / (K_i lr_t)]
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

Decisions: weight decay outside the mixture, as in the authors' released simulator (it is then
amplified to wd/alpha, since Delta contains it); wd_mode="inside" is alpha (g_i + wd w_k)
instead. Steps of another optimiser do not add up to directions: there Delta is the mean over the
steps of alpha g_i(w_k) + (1 - alpha) Delta, and weight decay is beside it. server_lr multiplies
the mean displacement (the paper's multiplies Delta: K lr_t times as large). With a relaxed start
Delta takes true displacements w_{i,0} - w_{i,K}, the server rule w_bar - w^t. With `examples` both
means are weighted. With sam_rho it is MoFedSAM (arXiv:2206.02618).
"""

from .optimizers import SGD
from .problem import Federation, History, reference


@reference
def run(
    f: Federation, alpha: float = 0.1, wd_mode: str = "outside", server_lr: float = 1.0
) -> History:
    w, Delta = f.w0, 0 * f.w0
    less = {"outside": 0.0, "inside": (1 - alpha) * f.wd}[wd_mode]  # of the wd w_k in every step
    for t, active, lr_t in f.rounds(delta=Delta):
        w_K, direction = {}, {}
        for i in active:
            w_0 = f.start(i, w)
            w_K[i] = f.train(t, i, w_0, lambda w_k, g: alpha * g + (1 - alpha) * Delta - less * w_k)
            direction[i] = (w_0 - w_K[i]) / (f.K(i) * lr_t)
            if f.make is not SGD:
                direction[i] = alpha * f.mean_gradient[i] + (1 - alpha) * Delta
        Delta, w_bar = f.mean(direction), f.mean(w_K)
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar, delta=Delta)
    return f.history()
