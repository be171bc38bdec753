"""FedLESAM - arXiv:2405.18890, in dense numpy: a perturbation from the global path.

    for t = 0 .. T-1:
        for i in P^t:
            e_i = r (w_i^old - w^t) / ||w_i^old - w^t||,   e_i = 0 at i's first activation
            w_0 = w^t
            for k = 0 .. K-1:   w_{k+1} = w_k - lr_t (g_i(w_k + e_i) + wd w_k)
            w_i^old <- w^t
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

r is the argument path_rho. Decisions: w_i^old is the model that i received when it was last
active (the released code takes the last round's global update for everybody); one global norm,
with 1e-12 added; w_i^old is the received model under a relaxed start too; g_i(w_k + e_i) is
clipped. w_i^old is w^0 in `clients` before the first activation.
"""

from .fedavg import run as run
