"""Local training, each client alone, in dense numpy.

for t = 0 .. T-1:
    for i in P^t:
        w_{i,0} = w_i                      (w^0 before its first round)
        for k = 0 .. K-1:   w_{k+1} = w_k - lr_t (g_i(w_k) + wd w_k)
        w_i = w_{i,K}
    w^{t+1} = w_bar^{t+1} = A_P[w_{i,K}]
"""

from .problem import Federation, History, reference


@reference
def run(f: Federation) -> History:
    w = f.copies(f.w0)
    for t, active, _ in f.rounds():
        for i in active:
            w[i] = f.steps(t, i, w[i])
        w_bar = f.mean({i: w[i] for i in active})
        f.record(w_bar, w_bar)
    return f.history(w=w)
