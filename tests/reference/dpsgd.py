"""D-PSGD - arXiv:1705.09056, Algorithm 1, in dense numpy.

    x_i = x^0 for all i
    for t = 0 .. T-1, for all i at once:
        "lian":  x_i <- sum_j W_ij x_j - lr_t (g_i(x_i) + wd x_i)        (the paper)
        "atc":   z_i = x_i - lr_t (g_i(x_i) + wd x_i),   x_i <- sum_j W_ij z_j

Decisions: in "lian" the gradient is at the model before the mix, and the step itself is not mixed
in this round; "atc" (adapt, then combine) is what comparisons with DFedAvg mean. z_i of "lian" is
also x_i after its own step, so x_i <- sum_j W_ij x_j + (z_i - x_i). That is how more than one
local step is read (local_steps > 1, not in the paper), and gossip_steps = Q takes W^Q for W. A
failed node takes no step.

Relaxed start (ri_beta), not in the paper: g_i and the step are at y_i = x_i + ri_beta (x_i - l_i),
l_i the z_i of the node's last round, and z_i = y_i - lr_t (g_i(y_i) + wd y_i). In "lian" what is
mixed stays x_j, so the relaxation, too, is a node's own until the next mix.
"""

from .gossip import GossipHistory, Network, decentralised


@decentralised
def run(f: Network, variant: str = "lian") -> GossipHistory:
    x = f.copies(f.w0)
    for t, W, _ in f.rounds():
        z = x.copy()
        for i in f.working(t):
            z[i] = f.train(t, i, f.start(i, x[i]))
        M = f.power(W, t)
        x = {"lian": M @ x + (z - x), "atc": M @ z}[variant]
        f.record(x, z)
    return f.history()
