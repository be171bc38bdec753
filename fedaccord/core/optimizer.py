"""Local optimisers, which turn a direction into a step, and rates that fall within a round.

A method declares d_k = scale g(w_k) + shift + rho (w_k - anchor). Weight decay is decoupled for
every optimiser: w <- w - lr wd w.

    sgd       w <- w - lr d
    momentum  b <- mu b + d;   w <- w - lr b,   nesterov: w <- w - lr (d + mu b)
    adamw     m <- beta1 m + (1 - beta1) d;   v <- beta2 v + (1 - beta2) d^2
              w <- w - lr m_hat / (sqrt(v_hat) + eps),   m_hat = m / (1 - beta1^n), v_hat likewise
    muon      M <- mu M + (1 - mu) d;   w <- w - lr s O(M),   nesterov: O((1 - mu) d + mu M)

Muon: Jordan and others, https://kellerjordan.github.io/posts/muon/. O is the orthogonal factor of a
matrix by five Newton-Schulz iterations, as in torch.optim.Muon, which rounds them to bfloat16: here
they are in the run's precision. Parameters of more than two dimensions are flattened to matrices.
Embeddings, the output layer (the last matrix of the model) and whatever has fewer than two
dimensions are updated by AdamW.

Everything holds for one client, vectors (d,), and for a cohort, vectors (n, d).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fedaccord.core import named
from fedaccord.core.options import option, options
from fedaccord.core.rule import LocalConfig, Registered, Stateless
from fedaccord.core.vectors import Vector, sum_dtype, to_device

Rate = float | Tensor  # eta_k, or (n, 1) on the host for clients with rates of their own

SCHEDULES = ("constant", "linear", "cosine")
STATES = ("reset", "keep", "average")
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of an iteration of Muon: a, b, c
ITERATIONS = 5
LONG = 64  # a matrix with as many rows and twice as many columns is long


class Schedule(NamedTuple):
    """The rates of a round, eta_k = eta (floor + (1 - floor) s(k / K)) of step k, from 0."""

    name: str = "constant"  # of SCHEDULES: s(x) = 1, 1 - x, or (1 + cos(pi x)) / 2
    floor: float = 0.0  # share of eta towards which a rate falls

    @property
    def falls(self) -> bool:
        return self.name != "constant"

    def rate(self, k: int, config: LocalConfig) -> Rate:
        if not self.falls:
            return config.lr
        x: Rate = k / config.steps
        if self.name == "linear":
            s = 1 - x
        else:
            cosine = torch.cos(math.pi * x) if isinstance(x, Tensor) else math.cos(math.pi * x)
            s = (1 + cosine) / 2
        return config.lr * (self.floor + (1 - self.floor) * s)

    def total(self, steps: Any, lr: float) -> Any:
        """The sum of a round's rates, over ``steps`` K; a falling s sums to (K + 1) / 2."""
        if not self.falls:
            return steps * lr
        return (self.floor * steps + (1 - self.floor) * (steps + 1) / 2) * lr


CONSTANT = Schedule()


@dataclass(frozen=True)
class Optimizer(Registered):
    """Takes local steps; a message carries its short name and its options."""

    sends: ClassVar[Any] = Stateless  # NamedTuple type of what `average` sends: vectors or None

    @property
    def is_stateless(self) -> bool:
        """Whether it has no vectors."""
        return type(self).init is Optimizer.init

    def init(self, w: Vector) -> Any:
        """The vectors before the first step, as a NamedTuple; `step` changes them in place."""
        return Stateless()

    def step(
        self, w: Vector, d: Vector, own: Any, lr: Rate, decay: float, config: LocalConfig
    ) -> None:
        """Update w in place along d, which may be overwritten; own: the vectors of `init`."""
        raise NotImplementedError("it has no method step")

    def upload(self, own: Any, config: LocalConfig) -> Any:
        """The vectors that the server averages, after the last step; of type `sends`."""
        return Stateless()

    def resume(self, mean: Any) -> Any:
        """The vectors at the start of a round, from the server's mean, of type `sends`."""
        return Stateless()


@dataclass(frozen=True)
class SGD(Optimizer):
    """w <- w - lr d. `rounds.descend` folds it with the direction's constants."""

    def __init_subclass__(cls, **more: Any) -> None:
        raise TypeError(f"{cls.__name__}: expected a subclass of Optimizer, got one of SGD")

    def step(
        self, w: Vector, d: Vector, own: Any, lr: Rate, decay: float, config: LocalConfig
    ) -> None:
        shrink_(w, lr, decay)
        add_(w, d, -lr)


class Buffer(NamedTuple):
    b: Vector  # (..., d)


class SentBuffer(NamedTuple):
    optimizer_b: Vector | None = None


@dataclass(frozen=True)
class Momentum(Optimizer):
    sends = SentBuffer

    mu: float = option(0.9, "share of the last step's buffer in the next one", low=0, high=1)
    nesterov: bool = option(False, "Nesterov's form: a step looks ahead along the buffer")

    def init(self, w: Vector) -> Buffer:
        return Buffer(torch.zeros_like(w))

    def step(
        self, w: Vector, d: Vector, own: Buffer, lr: Rate, decay: float, config: LocalConfig
    ) -> None:
        shrink_(w, lr, decay)
        own.b.mul_(self.mu).add_(d)
        add_(w, d.add_(own.b, alpha=self.mu) if self.nesterov else own.b, -lr)

    def upload(self, own: Buffer, config: LocalConfig) -> SentBuffer:
        return SentBuffer(own.b)

    def resume(self, mean: SentBuffer) -> Buffer:
        assert mean.optimizer_b is not None
        return Buffer(mean.optimizer_b.clone())


class Moments(NamedTuple):
    m: Vector  # (..., d)
    v: Vector  # (..., d)
    n: Tensor  # (..., 1) float32, the number of steps


class SentMoments(NamedTuple):
    """The bias-corrected moments: means of them count clients equally, whatever their steps."""

    optimizer_m: Vector | None = None
    optimizer_v: Vector | None = None


@dataclass(frozen=True)
class AdamW(Optimizer):
    sends = SentMoments

    beta1: float = option(0.9, "decay of the first moment", low=0, high=0.999999)
    beta2: float = option(0.999, "decay of the second moment", low=0, high=0.999999)
    eps: float = option(1e-8, "added to the root of the second moment", above=0)

    def init(self, w: Vector) -> Moments:
        count = torch.zeros(*w.shape[:-1], 1, dtype=torch.float32, device=w.device)
        return Moments(torch.zeros_like(w), torch.zeros_like(w), count)

    def step(
        self, w: Vector, d: Vector, own: Moments, lr: Rate, decay: float, config: LocalConfig
    ) -> None:
        self._step([w], [d], own, [own.m], [own.v], lr, decay)

    def _step(
        self,
        w: list[Vector],
        d: list[Vector],
        own: Moments,
        m: list[Vector],
        v: list[Vector],
        lr: Rate,
        decay: float,
    ) -> None:
        """PyTorch's fused step for some parameters (..., p), with a step count per client."""
        counts = [own.n, *(own.n.clone() for _ in w[1:])]  # PyTorch raises each by one
        w, d, m, v, steps = ([row for x in xs for row in _rows(x)] for xs in (w, d, m, v, counts))
        lrs = [lr] if isinstance(lr, float) else lr.flatten().tolist()
        for i, own_lr in enumerate(lrs):
            some = slice(i, None, len(lrs))
            adamw(
                w[some],
                d[some],
                m[some],
                v[some],
                [],
                steps[some],
                fused=True,
                amsgrad=False,
                beta1=self.beta1,
                beta2=self.beta2,
                lr=own_lr,
                weight_decay=decay,
                eps=self.eps,
                maximize=False,
            )

    def upload(self, own: Moments, config: LocalConfig) -> SentMoments:
        return self._corrected(own.m, own.v, own.n)

    def _corrected(self, m: Vector, v: Vector, n: Tensor) -> SentMoments:
        n = n.to(sum_dtype(n.device))
        m_share, v_share = ((1 - beta**n).to(m.dtype) for beta in (self.beta1, self.beta2))
        return SentMoments(optimizer_m=m / m_share, optimizer_v=v / v_share)

    def resume(self, mean: SentMoments) -> Moments:
        m, v = mean.optimizer_m, mean.optimizer_v
        assert m is not None
        assert v is not None
        count = torch.full_like(m[..., :1], math.inf, dtype=torch.float32)  # nothing to correct
        return Moments(m.clone(), v.clamp(min=0), count)


@dataclass(frozen=True)
class Muon(AdamW):
    """m holds M for matrices and AdamW's m for the rest; v is AdamW's, zero for matrices."""

    mu: float = option(0.95, "momentum of matrices", low=0, high=0.999999)
    nesterov: bool = option(True, "Nesterov's form of that momentum")
    rate: str = option(
        "match-rms-adamw",
        "s of a matrix (a, b): 0.2 sqrt(max(a, b)), which moves it as far as AdamW would at that "
        "rate, or sqrt(max(1, a / b))",
        choices=("match-rms-adamw", "original"),
    )

    def step(
        self, w: Vector, d: Vector, own: Moments, lr: Rate, decay: float, config: LocalConfig
    ) -> None:
        pieces = [pieces_of(x, config) for x in (w, d, own.m, own.v)]
        for i in config.hidden:
            w_i, d_i, m_i, _ = (_as_matrix(piece[i], config.shapes[i]) for piece in pieces)
            m_i.lerp_(d_i, 1 - self.mu)
            update = orthogonal(d_i.lerp_(m_i, self.mu) if self.nesterov else m_i)
            a, b = w_i.shape[-2:]
            original = self.rate == "original"
            scale = math.sqrt(max(1, a / b)) if original else 0.2 * math.sqrt(max(a, b))
            own_lr = lr if isinstance(lr, float) else lr[..., None]
            shrink_(w_i, own_lr, decay)
            add_(w_i, update, -(own_lr * scale))
        rest = [i for i in range(len(config.shapes)) if i not in config.hidden]
        if rest:
            w_s, d_s, m_s, v_s = ([piece[i] for i in rest] for piece in pieces)
            self._step(w_s, d_s, own, m_s, v_s, lr, decay)
        else:
            own.n.add_(1)

    def upload(self, own: Moments, config: LocalConfig) -> SentMoments:
        sent = self._corrected(own.m, own.v, own.n)
        assert sent.optimizer_m is not None
        theirs, ours = (pieces_of(x, config) for x in (sent.optimizer_m, own.m))
        for i in config.hidden:  # O does not depend on the scale of M
            theirs[i].copy_(ours[i])
        return sent


OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.registered_name(): kind for kind in (SGD, Momentum, AdamW, Muon)
}
FUNCTIONS = named.Functions("fedaccord.optimizers")  # classes, or functions that return an object


def made(name: str) -> Optimizer:
    """The optimiser of a setting, with its default options: of `OPTIMIZERS`, or the user's own.

    Raises ValueError, in one line, if that cannot be imported, called or used.
    """
    if kind := OPTIMIZERS.get(name):
        return kind()
    own = named.call("optimizer", FUNCTIONS.path(name), {})
    if not isinstance(own, Optimizer):
        raise ValueError(
            "optimizer: expected a subclass of Optimizer, or a function without arguments that "
            f"returns an object of one, {name} returned a {type(own).__name__}"
        )
    try:
        options(type(own))
    except TypeError as error:
        raise ValueError(f"optimizer: {error}") from None
    return own


def setting_of(optimizer: Any) -> str:
    """The setting that names the class of an optimiser. Raises ValueError for another class."""
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"local_optimizer: expected an object, e.g. AdamW(beta1=0.8), got a {kind.__name__}; "
            "optimizer='adamw' sets one by name, a subclass of Optimizer is your own"
        )
    name = kind.registered_name()
    return name if OPTIMIZERS.get(name) is kind else f"{kind.__module__}:{kind.__name__}"


def pieces_of(v: Vector, config: LocalConfig) -> tuple[Vector, ...]:
    """A view (..., p) of each parameter."""
    return torch.split(v, [math.prod(shape) for shape in config.shapes], dim=-1)


def _as_matrix(piece: Vector, shape: Any) -> Tensor:
    return piece.view(*piece.shape[:-1], shape[0], -1)


def orthogonal(x: Tensor) -> Tensor:
    """About U V^T of each matrix x = U S V^T (..., a, b): singular values of 0.5 to 1.5.

    An iteration is y <- M y, M = a I + b A + c A^2, A = y y^T, from y = x / |x|.
    """
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    rows, columns = y.shape[-2:]
    if LONG <= rows <= columns / 2 and not _rounds_products():
        y = _all_iterations(y @ y.mT) @ y
    else:
        a, b, c = COEFFICIENTS
        for _ in range(ITERATIONS):
            gram = y @ y.mT
            y = _sum(a, y, 1.0, _sum(b, gram, c, gram, gram), y)
    return y.mT if tall else y


def _all_iterations(gram: Tensor) -> Tensor:
    """M_5 ... M_1, from the first A: each M commutes with its A, and the next A is M A M.

    Only square matrices are multiplied, which saves the more the longer y is. An eigenvalue
    of A that rounding makes negative grows by a^2 per iteration: with float32 M_5 ... M_1 y is
    still right to about 1e-3 of its largest number, with TF32 and bfloat16 it can be unbounded.
    """
    total = m = _factor(gram)
    for _ in range(ITERATIONS - 1):
        gram = m @ gram @ m
        m = _factor(gram)
        total = m @ total
    return total


def _factor(gram: Tensor) -> Tensor:
    """M, of A."""
    a, b, c = COEFFICIENTS
    m = _sum(b, gram, c, gram, gram)
    m.diagonal(dim1=-2, dim2=-1).add_(a)
    return m


def _sum(beta: float, x: Tensor, alpha: float, y: Tensor, z: Tensor) -> Tensor:
    """beta x + alpha y z."""
    return (torch.addmm if x.ndim == 2 else torch.baddbmm)(x, y, z, beta=beta, alpha=alpha)


def _rounds_products() -> bool:
    """Whether PyTorch may round the factors of products of float32, on a CPU or on a GPU."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # newer flags are set to different values
        return True


def shrink_(w: Vector, lr: Rate, decay: float) -> None:
    """w <- (1 - lr decay) w, in place."""
    if decay:
        w.mul_(1 - _like(lr, w) * decay)


def add_(w: Vector, v: Vector, factor: Rate) -> None:
    """w <- w + factor v, in place."""
    if isinstance(factor, float):
        w.add_(v, alpha=factor)
    else:
        w.addcmul_(v, _like(factor, w))


def _like(factor: Rate, w: Vector) -> Any:
    return factor if isinstance(factor, float) else to_device(factor.to(w.dtype), w.device)


def _rows(v: Vector) -> tuple[Vector, ...]:
    """The vectors of v (..., p), a view for each client."""
    return v.unbind(0) if v.ndim > 1 else (v,)
