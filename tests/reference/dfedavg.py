"""DFedAvg and DFedAvgM - arXiv:2104.11375, Algorithm 1, in dense numpy.

    x_i = x^0 for all i
    for t = 0 .. T-1, for all i at once:
        y_{-1} = y_0 = x_i
        for k = 0 .. K-1:
            y_{k+1} = y_k - lr_t (g_i(y_k) + wd y_k) + theta (y_k - y_{k-1})
        z_i = y_K
        x_i <- sum_j (W^Q)_ij z_j

theta is the argument momentum, 0 for DFedAvg. With sam_rho it is DFedSAM, with Q > 1 mixes
DFedSAM-MGS (arXiv:2302.04083). Decisions: a round trains, then mixes, so x_i is what a node trains
from next; W is the round's own matrix, Q (gossip_steps) is one in the paper. The momentum starts
from rest in every round, at the relaxed start if there is one; weight decay enters the momentum, as
in torch's SGD without dampening; the clip acts on g_i alone. Relaxed start (ri_beta): y_0 = x_i +
ri_beta (x_i - l_i), l_i the z_i of the node's last round of training, x_i^0 before it.
ri_first_visit changes nothing: a node that has not trained yet still holds x_i^0.
"""

from .gossip import GossipHistory, Network, decentralised


@decentralised
def run(f: Network, momentum: float = 0.0) -> GossipHistory:
    x, theta = f.copies(f.w0), momentum
    for t, W, lr_t in f.rounds():
        z = x.copy()
        for i in f.working(t):
            y = y_old = f.start(i, x[i])
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, y)
                y, y_old = y - lr_t * (g + f.wd * y) + theta * (y - y_old), y
            z[i] = f.end(i, y)
        x = f.power(W, t) @ z
        f.record(x, z)
    return f.history()
