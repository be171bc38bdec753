"""Mutants of the package: small mistakes in its mathematics, each of which the tests must notice.

    python tools/mutants.py                  # all of them
    python tools/mutants.py --list           # what there is
    python tools/mutants.py -k FedDyn        # those whose name or file holds the text
    python tools/mutants.py --jobs 4         # so many at a time
    python tools/mutants.py --all-tests      # the whole fast suite for each, not only its own tests

A mutant is one change of one file. It is made in a temporary copy of the tree, never in place; its
tests run there and must fail. The same tests must pass in the copy without the change first. A
mutant that survives is a hole in the suite: write the test that kills it. A mutant whose old text
is not in its file exactly once does not apply any more: carry it to where the line went, its name
says what is wrong. Exit code 0: every mutant was killed; 1: one survived, or does not apply; 2:
tests fail without any mutant.
"""

import argparse
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (".venv", ".hypothesis", ".*_cache", "__pycache__", "*.log")
FAST_SUITE = 'tests -m "not flower and not data"'
# imported once, before the processes that run the tests are forked: none of it is the package
PRELOADED = [
    *("pytest", "hypothesis", "numpy", "pandas", "sklearn.datasets", "torch", "torchvision"),
    *("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.supercore.run", "tomli_w", "typer"),
]
KILLED, SURVIVED, NOT_APPLICABLE = "killed", "SURVIVED", "not applicable"
ANOTHER_PACKAGE = 70  # exit code: the tests would have imported another fedaccord than the copy's
# of pytest, and what it says of a mutant; None: the process was stopped at the time limit
OUTCOMES = {0: SURVIVED, 1: KILLED, 2: "killed at import", None: "killed by time"}


class Mutant(NamedTuple):
    name: str  # what is wrong, in words
    file: str  # below the root of the repository
    old: str  # occurs in it exactly once
    new: str
    tests: str  # arguments of pytest that kill it in seconds


def of(file: str, tests: str, *changes: tuple[str, ...]) -> list[Mutant]:
    """Mutants of one file; changes: (name, old, new), and tests where they are others."""
    return [Mutant(name, file, old, new, *(own or (tests,))) for name, old, new, *own in changes]


def tests_of(path: str, case: str) -> str:
    return f'tests/{path} -k "{case}"'


def dense(case: str) -> str:
    """A method against its dense reference: partial participation, with and without RI."""
    return tests_of("strategies/test_references.py", f"test_equals and {case} and some-full-batch")


def dense_sam(case: str) -> str:
    """The same with SAM, on mini-batches."""
    return tests_of("strategies/test_references.py", f"with_sam and {case} and some")


def unequal(case: str) -> str:
    """The same with another K_i for each client."""
    return tests_of("strategies/test_references.py", f"unequal_local_steps and {case}")


def centre(case: str) -> str:
    """The same with the relaxed start as the anchor."""
    return tests_of("strategies/test_references.py", f"may_be_the_anchor and {case}")


def first_visit(case: str) -> str:
    """The same with late first visits, from w^0 and from w^t."""
    return tests_of("strategies/test_references.py", f"a_first_visit and {case}")


def weighted(case: str) -> str:
    """The same with weighting=examples."""
    return tests_of("strategies/test_weighting.py", f"weighted_methods and {case}")


def nodes(case: str) -> str:
    """A method without a server against its dense reference."""
    return tests_of("strategies/test_decentralised.py", f"test_equals and {case}")


def stacks(case: str) -> str:
    """Clients in a stack against each of them alone."""
    return tests_of("strategies/test_stacks.py", f"round_of_a_stack and {case}")


CORE, PLUGINS = "fedaccord/core/", "fedaccord/plugins/"
METHODS, FEDERATION = "fedaccord/strategies/", "fedaccord/federation/"
TASK, CLIENT, WIRE = "fedaccord/task/", "fedaccord/client/", "fedaccord/wire/"

FEDINIT = tests_of("strategies/test_references.py", "fedinit_equals")
FEDPD = tests_of("strategies/test_references.py", "test_fedpd_equals")
AFEDPD = "tests/strategies/test_afedpd.py"
RADIUS_0 = tests_of("strategies/test_identities.py", "radius_0")
NO_GRADIENT = tests_of("strategies/test_identities.py", "gradient_is_zero")
DISPFL = tests_of("strategies/test_dispfl.py", "equals_the and ring and all-full-batch")
ABSENT = nodes("DFedAvg and ring and failures")
GRAPHS = tests_of("plugins/test_graphs.py", "every_matrix")
RESTRICTED = tests_of("plugins/test_graphs.py", "restricted")
KNOWN_GRAPHS = tests_of("strategies/test_decentralised.py", "graphs_are")
COHORT = "tests/core/test_cohort.py"
STEP = tests_of("core/test_rounds.py", "folded_step")
INPUTS = tests_of("core/test_rounds.py", "changes_nothing")
COUNTS = tests_of("client/test_train.py", "epochs_or_steps")
BATCHES = "tests/task/test_task.py"
METRICS = tests_of("server/test_strategy.py", "metrics_are")
COMPOSITION = "tests/plugins/test_composition.py"
MISTAKES = "tests/strategies/test_mistakes.py"
FORGOTTEN = tests_of("core/test_rounds.py", "forgotten or begin_anew")
VECTORIZED = tests_of("engine/test_vectorize.py", "every_method and (scaffold or fednova)")


MUTANTS = [
    # --- primal methods ---------------------------------------------------------------------------
    *of(
        METHODS + "fedavg.py",
        dense("FedAvg-0.7"),
        (
            "FedAvg's server goes away from the average",
            "torch.lerp(w, w_bar, self.server_lr)",
            "torch.lerp(w, w_bar, -self.server_lr)",
        ),
        (
            "FedAvg's server ignores server_lr",
            "torch.lerp(w, w_bar, self.server_lr)",
            "w_bar",
        ),
    ),
    *of(
        METHODS + "fedinit.py",
        FEDINIT,
        (
            "FedInit relaxes in the other direction by default",
            "        0.1,\n",
            "        -0.1,\n",
        ),
    ),
    *of(
        METHODS + "fedprox.py",
        dense("FedProx"),
        (
            "FedProx pushes away from w^t",
            "Direction(rho=self.mu, anchor=down.w)",
            "Direction(rho=-self.mu, anchor=down.w)",
        ),
        (
            "FedProx pulls towards zero instead of w^t",
            "Direction(rho=self.mu, anchor=down.w)",
            "Direction(rho=self.mu, anchor=None)",
        ),
    ),
    *of(
        METHODS + "fedavgm.py",
        dense("FedAvgM"),
        (
            "FedAvgM damps the new displacement by 1 - beta, as FedAdam does",
            "+ (cohort.mean(ups.w) - w)",
            "+ (1 - self.beta) * (cohort.mean(ups.w) - w)",
        ),
        (
            "FedAvgM keeps server_lr in its momentum",
            "ServerState(v)",
            "ServerState(self.server_lr * v)",
        ),
        (
            "FedAvgM steps along the momentum of the round before",
            "w + self.server_lr * v",
            "w + self.server_lr * state.v",
        ),
    ),
    *of(
        METHODS + "fedadam.py",
        dense("FedAdam"),
        (
            "FedAdam swaps beta1 and 1 - beta1",
            "self.beta1 * state.m + (1 - self.beta1) * D",
            "(1 - self.beta1) * state.m + self.beta1 * D",
        ),
        ("FedAdam adds tau below the root", "(v.sqrt() + self.tau)", "(v + self.tau).sqrt()"),
        (
            "FedAdam divides by the second moment of the round before",
            "m / (v.sqrt()",
            "m / (state.v.sqrt()",
        ),
        ("FedAdam starts v at tau instead of tau^2", "self.tau**2 if", "self.tau if"),
        (
            "FedAdam's second moment is a sum, without 1 - beta2",
            "(1 - self.beta2) * D**2",
            "D**2",
        ),
        (
            "FedAdam's second moment is that of m, not of D",
            "self.second_moment(state.v, D)",
            "self.second_moment(state.v, m)",
        ),
        (
            "FedAdam never stores its first moment",
            "None if state.m is None else m, v)",
            "None if state.m is None else state.m, v)",
        ),
    ),
    *of(
        METHODS + "fedyogi.py",
        dense("FedYogi"),
        ("FedYogi's sign is flipped", "torch.sign(v - D**2)", "torch.sign(D**2 - v)"),
    ),
    *of(
        METHODS + "fedadagrad.py",
        dense("FedAdagrad"),
        ("FedAdagrad sums |D| instead of D^2", "return v + D**2", "return v + D.abs()"),
        (
            "FedAdagrad has momentum by default",
            "beta1: float = option(0.0,",
            "beta1: float = option(0.9,",
        ),
    ),
    *of(
        METHODS + "fednova.py",
        unequal("FedNova"),
        (
            "FedNova's tau weighs clients uniformly with weighting=examples",
            "p = [weight / sum(cohort.weights) for weight in cohort.weights]",
            "p = [1 / len(cohort.weights) for _ in cohort.weights]",
            weighted("FedNova"),
        ),
        (
            "FedNova's tau is the largest K_i",
            "sum(p_i * K_i for p_i, K_i in zip(p, cohort.steps, strict=True))",
            "max(cohort.steps)",
        ),
        ("FedNova does not normalise by K_i", "[(w_i0 - w_K) / K_i for", "[(w_i0 - w_K) / 1 for"),
        (
            "FedNova takes the mean K for every K_i of d_i",
            "[(w_i0 - w_K) / K_i for",
            "[(w_i0 - w_K) / tau for",
        ),
        (
            "FedNova's d_i ignore weighting=examples",
            "tau * cohort.mean(d), state",
            "tau * sum(d) / len(d), state",
            weighted("FedNova"),
        ),
        (
            "FedNova's d_i are measured from w^t, not from w_{i,0}",
            "zip(cohort.starts, ups.w,",
            "zip([w] * len(p), ups.w,",
        ),
    ),
    # --- SAM and the methods on it ----------------------------------------------------------------
    *of(
        PLUGINS + "sam.py",
        dense_sam("FedSAM"),
        (
            "SAM descends to the visited point",
            "torch.addcmul(point, g, self.rho / (norm(g) + EPS), out=buffers.ascended)",
            "torch.addcmul(\n"
            "                point, g, self.rho / (norm(g) + EPS), value=-1, out=buffers.ascended\n"
            "            )",
        ),
        (
            "SAM divides by the squared norm",
            "self.rho / (norm(g) + EPS)",
            "self.rho / (norm(g) ** 2 + EPS)",
        ),
        (
            "SAM's norm is the largest coordinate",
            "self.rho / (norm(g) + EPS)",
            "self.rho / (g.abs().amax(-1, keepdim=True) + EPS)",
        ),
        (
            "SAM takes a norm per coordinate instead of one over all parameters",
            "self.rho / (norm(g) + EPS)",
            "self.rho / (g.abs() + EPS)",
        ),
        (
            "SAM takes one norm over all clients of a stack",
            "self.rho / (norm(g) + EPS)",
            "self.rho / (torch.linalg.vector_norm(g) + EPS)",
            stacks("fedavg and sam"),
        ),
        (
            "SAM divides by zero where the gradient is zero",
            "(norm(g) + EPS)",
            "norm(g)",
            NO_GRADIENT,
        ),
        (
            "SAM's training loss is that of the visited point",
            "        at(buffers.ascended)\n",
            "        loss = at(buffers.ascended)\n",
            tests_of("task/test_solver.py", "a_seat_takes"),
        ),
        (
            "SAM swaps mix and 1 - mix",
            "torch.mul(g, 1 - self.mix, out=buffers.share)",
            "torch.mul(g, self.mix, out=buffers.share)",
            dense_sam("FedSpeed"),
        ),
    ),
    *of(
        CORE + "plugin.py",
        dense_sam("FedSAM"),
        (
            "The gradient of a plug-in never reaches the method",
            "            at = partial(plugin.gradient, at, g=g, buffers=own)\n",
            "            partial(plugin.gradient, at, g=g, buffers=own)\n",
        ),
        (
            "SAM leaves the inner rule's gradients alone: FedDeper's at v is a plain one",
            "            at = partial(plugin.gradient, at, g=g, buffers=own)\n",
            "            plain, sharp = at, partial(plugin.gradient, at, g=g, buffers=own)\n"
            "            at = lambda point, a=plain, b=sharp: (b if point is w else a)(point)\n",
            dense_sam("FedDeper"),
        ),
        (
            "SAM drops the inner gradient seat: DFedAvgM loses its momentum",
            "        return self.rule.gradient(w, g, buffers, at, config)\n",
            "        rule = LocalRule if self.plugins else type(self.rule)\n"
            "        return rule.gradient(self.rule, w, g, buffers, at, config)\n",
            nodes("DFedAvgM and sam-ring"),
        ),
        (
            "SAM clips the gradient of the ascent too",
            "            at = partial(plugin.gradient, at, g=g, buffers=own)\n",
            "            from fedaccord.core.vectors import clip_\n\n"
            "            def clipped(point: Vector, at: GradientAt = at) -> Tensor:\n"
            "                loss = at(point)\n"
            "                clip_(g, config.clip_norm)\n"
            "                return loss\n\n"
            "            at = partial(plugin.gradient, clipped, g=g, buffers=own)\n",
            dense_sam("FedSpeed"),
        ),
        (
            "SAM does not clip the gradient at the visited point",
            "        return self.rule.gradient(w, g, buffers, at, config)\n",
            "        free = config._replace(clip_norm=0.0) if self.plugins else config\n"
            "        return self.rule.gradient(w, g, buffers, at, free)\n",
        ),
        (
            "SAM clips before the ascent only",
            "            at = partial(plugin.gradient, at, g=g, buffers=own)\n",
            "            from fedaccord.core.vectors import clip_\n\n"
            "            def clipped(\n"
            "                point: Vector, at: GradientAt = at, bound: float = config.clip_norm\n"
            "            ) -> Tensor:\n"
            "                loss = at(point)\n"
            "                clip_(g, bound if point is w else 0.0)\n"
            "                return loss\n\n"
            "            config = config._replace(clip_norm=0.0)\n"
            "            at = partial(plugin.gradient, clipped, g=g, buffers=own)\n",
        ),
    ),
    *of(
        METHODS + "fedsam.py",
        tests_of("strategies/test_identities.py", "limits_that_are and FedSAM"),
        ("FedSAM comes without SAM", "(SAM(rho=self.rho),)", "()"),
    ),
    *of(
        METHODS + "fedgamma.py",
        RADIUS_0,
        ("FedGamma comes without SAM", "(SAM(rho=self.rho),)", "()"),
    ),
    *of(
        METHODS + "mofedsam.py",
        RADIUS_0,
        ("MoFedSAM comes without SAM", "(SAM(rho=self.rho),)", "()"),
    ),
    *of(
        METHODS + "afedpdsam.py",
        RADIUS_0,
        ("A-FedPDSAM comes without SAM", "(SAM(rho=self.radius),)", "()"),
    ),
    *of(
        METHODS + "fedlesam.py",
        dense("FedLESAM"),
        (
            "FedLESAM perturbs along the path backwards",
            "path = state.w_old - down.w",
            "path = down.w - state.w_old",
        ),
        (
            "FedLESAM does not normalise the path",
            "path.mul_(self.radius / (norm(path) + EPS))",
            "path.mul_(self.radius)",
        ),
        (
            "FedLESAM divides by the 1-norm",
            "(norm(path) + EPS)",
            "(path.abs().sum(-1, keepdim=True) + EPS)",
        ),
        (
            "FedLESAM divides by the sum of the layers' norms, as the released code",
            "(norm(path) + EPS)",
            "(\n"
            "            sum(\n"
            "                norm(layer)\n"
            "                for layer in path.split(\n"
            "                    [torch.Size(s).numel() for s in config.shapes], dim=-1\n"
            "                )\n"
            "            )\n"
            "            + EPS\n"
            "        )",
            MISTAKES,
        ),
        (
            "FedLESAM divides by zero at the first visit",
            "(norm(path) + EPS)",
            "norm(path)",
        ),
        (
            "FedLESAM remembers the local model, not the one received",
            "ClientState(w_old=down.w)",
            "ClientState(w_old=w_K)",
        ),
        (
            "FedLESAM remembers the first model received for good",
            "Model(w_K), ClientState(w_old=down.w)",
            "Model(w_K), state",
        ),
        (
            "FedLESAM remembers w_{i,0} instead of w^t",
            "ClientState(w_old=down.w)",
            "ClientState(w_old=result.w_i0)",
        ),
        (
            "FedLESAM perturbs at the first visit too, along the way from the origin",
            "return ClientState(w_old=w)",
            "return ClientState(w_old=w * 0)",
        ),
    ),
    # --- control variates and client momentum -----------------------------------------------------
    *of(
        METHODS + "scaffold.py",
        dense("Scaffold"),
        (
            "SCAFFOLD's correction has the wrong sign",
            "Direction(shift=down.c - state.c_i)",
            "Direction(shift=state.c_i - down.c)",
        ),
        (
            "SCAFFOLD measures the displacement from w^t, not from w_{i,0}",
            "(result.w_i0 - w_K).div_(",
            "(down.w - w_K).div_(",
        ),
        (
            "SCAFFOLD forgets K in c_i",
            "div_(result.steps * result.config.lr)",
            "div_(result.config.lr)",
        ),
        (
            "SCAFFOLD divides the step of c by P instead of C",
            "div_(cohort.num_clients)",
            "div_(len(cohort.clients))",
        ),
        ("SCAFFOLD's c_i forgets what it was", "c_i=state.c_i + dc_i", "c_i=dc_i"),
        ("SCAFFOLD's c_i moves twice", "c_i=state.c_i + dc_i", "c_i=state.c_i + 2 * dc_i"),
        (
            "SCAFFOLD's c_i is never stored",
            "Up(w_K, dc_i), ClientState(c_i=state.c_i + dc_i)",
            "Up(w_K, dc_i), state",
        ),
        ("SCAFFOLD's c_i+ leaves out -c", ".sub_(down.c)", ""),
        ("SCAFFOLD's c forgets what it was", ".add_(state.c)", ""),
    ),
    *of(
        METHODS + "fedcm.py",
        dense("FedCM"),
        (
            "FedCM weighs delta by alpha",
            "(1 - self.alpha) * down.delta",
            "self.alpha * down.delta",
        ),
        ("FedCM does not scale the gradient", "scale=self.alpha,", "scale=1.0,"),
        (
            "FedCM divides by the longest K instead of each client's own",
            "(w_i0 - w_K) / K_lr for",
            "(w_i0 - w_K) / max(cohort.lengths) for",
            unequal("FedCM"),
        ),
        (
            "FedCM's delta is measured from w^t, not from w_{i,0}",
            "zip(cohort.starts, ups.w,",
            "zip([w] * len(ups.w), ups.w,",
        ),
        (
            "FedCM does not ask relaxed initialisation for w_{i,0}",
            "reads_starts = True",
            "reads_starts = False",
        ),
        (
            "FedCM swaps weight decay inside and outside",
            'self.decay == "outside" else',
            'self.decay == "inside" else',
        ),
        ("FedCM's delta has the wrong sign", "(w_i0 - w_K) / K_lr", "(w_K - w_i0) / K_lr"),
        ("FedCM's delta is never stored", "ServerState(delta)", "state"),
    ),
    # --- a personal model -------------------------------------------------------------------------
    *of(
        METHODS + "feddeper.py",
        dense("FedDeper"),
        (
            "FedDeper's y uses the new v",
            "        g.add_(v, alpha=self.rho / lr)  # rho v of the y line, with the old v\n"
            "        v.copy_(v_next)\n",
            "        v.copy_(v_next)\n        g.add_(v, alpha=self.rho / lr)\n",
        ),
        (
            "FedDeper swaps lam and 1 - lam",
            "torch.lerp(result.gradient, w_K, self.lam)",
            "torch.lerp(w_K, result.gradient, self.lam)",
        ),
        ("FedDeper pulls from w^t instead of 2 w^t", "anchor=2 * down.w", "anchor=down.w"),
        ("FedDeper's v starts at w^t instead of w^0", "ClientState(v=w_init)", "ClientState(v=w)"),
        ("FedDeper scales rho v by lr", "alpha=self.rho / lr)", "alpha=self.rho)"),
        (
            "FedDeper's v has no weight decay",
            "1 - lr * config.weight_decay",
            "1.0",
        ),
        (
            "FedDeper does not clip the gradient at v",
            "        at(v)\n        clip_(g, config.clip_norm)\n",
            "        at(v)\n",
        ),
        (
            "FedDeper's v steps with the gradient at y",
            "        at(v)\n",
            "        at(w)\n",
        ),
        (
            "FedDeper does not store v",
            "ClientState(v=torch.lerp(result.gradient, w_K, self.lam))",
            "state",
        ),
        (
            "FedDeper's v walks in the client's state, not in a copy of it",
            "Buffers(state.v.clone(),",
            "Buffers(state.v,",
            INPUTS,
        ),
    ),
    # --- primal-dual methods ----------------------------------------------------------------------
    *of(
        METHODS + "fedpd.py",
        FEDPD,
        (
            "FedPD's server looks at this round's coin instead of the last one's",
            "is_silent(self.p, self.seed, last)",
            "is_silent(self.p, self.seed, client.round)",
        ),
        (
            "FedPD's server takes the coin of a round that failed",
            "last = client.last_round",
            "last = client.round - 1",
            tests_of("strategies/test_references.py", "fedpd_goes_on_after"),
        ),
        (
            "FedPD forms the anchor with the old dual",
            "anchor = w_K + lam / self.rho",
            "anchor = w_K + state.lam / self.rho",
        ),
        (
            "FedPD's dual step has the wrong sign",
            "lam = state.lam + self.rho",
            "lam = state.lam - self.rho",
        ),
        (
            "FedPD's local-init=own starts from the client's anchor",
            'return state.w if self.local_init == "own"',
            'return state.anchor if self.local_init == "own"',
        ),
        (
            "FedPD's dual steps from w_{i,0} instead of the anchor",
            "(w_K - self.anchor(down, state))",
            "(w_K - result.w_i0)",
        ),
        (
            "FedPD counts a round that lost a reply",
            "return num_clients  # a round that lost a reply does not count",
            "return self.min_replies",
            tests_of("server/test_strategy.py", "fedpd_does_not_count"),
        ),
    ),
    *of(
        METHODS + "fedadmm.py",
        dense("FedADMM"),
        (
            "FedADMM divides the changes by P instead of C",
            "cohort.sum(ups.w_hat) / cohort.num_clients",
            "cohort.sum(ups.w_hat) / len(cohort.clients)",
        ),
        (
            "FedADMM's w_hat starts at w^t instead of w^0",
            "w_hat=w_init)",
            "w_hat=w)",
        ),
        (
            "FedADMM's w_hat takes the old dual",
            "w_hat = w_K + lam / self.rho",
            "w_hat = w_K + state.lam / self.rho",
        ),
        (
            "FedADMM's dual steps from w_{i,0} instead of w^t",
            "self.rho * (w_K - down.w)",
            "self.rho * (w_K - result.w_i0)",
        ),
        (
            "FedADMM never stores w_hat",
            "return up, ClientState(lam, w_hat)",
            "return up, ClientState(lam, state.w_hat)",
        ),
        ("FedADMM's dual has the wrong sign", "shift=state.lam,", "shift=-state.lam,"),
    ),
    *of(
        METHODS + "feddyn.py",
        dense("FedDyn"),
        (
            "FedDyn's dual steps from w_{i,0} instead of w^t",
            "(w_K - down.w).mul_(self.alpha)",
            "(w_K - result.w_i0).mul_(self.alpha)",
        ),
        (
            "FedDyn moves lam_bar by the mean over the active clients, without P/C",
            ".mul_(cohort.participation)",
            "",
        ),
        (
            "FedDyn subtracts lam_bar / alpha",
            "(lam_bar / rho).add_(w_bar)",
            "(-lam_bar / rho).add_(w_bar)",
        ),
        (
            "FedDyn adds the lam_bar of the round before",
            "    lam_bar = mean_step.mul_(rho).add_(lam_bar)\n"
            "    return (lam_bar / rho).add_(w_bar), lam_bar\n",
            "    return (lam_bar / rho).add_(w_bar), mean_step.mul_(rho).add_(lam_bar)\n",
        ),
        ("FedDyn's dual forgets what it was", ".add_(state.lam)", ""),
        ("FedDyn's dual has the wrong sign", "shift=state.lam,", "shift=-state.lam,"),
        (
            "FedDyn's server measures from w^t where center=start moves the anchor",
            "(w_bar - cohort.anchor)",
            "(w_bar - cohort.w)",
            centre("FedDyn"),
        ),
        (
            "FedSpeed multiplies lam_bar by rho, as do FedDyn and FedSMOO",
            "(lam_bar / rho)",
            "(lam_bar * rho)",
            dense_sam("FedSpeed"),
        ),
    ),
    *of(
        METHODS + "fedspeed.py",
        dense_sam("FedSpeed"),
        (
            "FedSpeed's paper variant normalises the ascent",
            'normalised = self.variant == "authors"',
            "normalised = True",
        ),
        ("FedSpeed swaps mix and 1 - mix", "mix=self.mix", "mix=1 - self.mix"),
        (
            "FedSpeed's paper variant sends changes",
            'FedADMMClient(self.rho, "active")',
            'FedADMMClient(self.rho, "tracking")',
        ),
    ),
    *of(
        METHODS + "fedsmoo.py",
        dense("FedSMOO"),
        ("FedSMOO adds mu_i to the ascent", "g.sub_(climbed)", "g.add_(climbed)"),
        (
            "FedSMOO's ascent leaves out s",
            ".addcmul_(s, taken)",
            ".addcmul_(s, taken + 1)",
        ),
        (
            "FedSMOO takes s off mu_i once a round",
            "buffers.taken + 1, value=-1)",
            "torch.ones_like(buffers.taken), value=-1)",
        ),
        (
            "FedSMOO clips the gradient of the ascent",
            "        loss = at(w)\n",
            "        loss = at(w)\n        clip_(g, config.clip_norm)\n",
        ),
        (
            "FedSMOO's s has norm 1",
            "self.radius / (norm(mu_bar) + EPS)",
            "1 / (norm(mu_bar) + EPS)",
        ),
        ("FedSMOO's s has the wrong sign", "s = mu_bar *", "s = -mu_bar *"),
        (
            "FedSMOO never stores mu_i",
            "ClientState(lam, mu=result.gradient)",
            "ClientState(lam, mu=state.mu)",
        ),
        (
            "FedSMOO's dual steps from w_{i,0} instead of w^t",
            "lam = (w_K - down.w)",
            "lam = (w_K - result.w_i0)",
        ),
        (
            "FedSMOO takes a norm per layer instead of one over all parameters",
            "        length = self.radius / (norm(u) + EPS)\n",
            "        layers = u.split([torch.Size(s).numel() for s in config.shapes], dim=-1)\n"
            "        lengths = [(self.radius / (norm(v) + EPS)).expand_as(v) for v in layers]\n"
            "        length = torch.cat(lengths, dim=-1)\n",
            MISTAKES,
        ),
        (
            "FedSMOO's server measures from w^t where center=start moves the anchor",
            "        w, lam_bar = primal_dual_step(",
            "        cohort.anchor = w\n        w, lam_bar = primal_dual_step(",
            centre("FedSMOO"),
        ),
        (
            "FedSMOO does not ask for the starts where they are the anchor",
            "reads_anchors = True",
            "reads_anchors = False",
            centre("FedSMOO"),
        ),
        (
            "FedSMOO climbs in the client's state, not in a copy of it",
            "Buffers(state.mu.clone(),",
            "Buffers(state.mu,",
            INPUTS,
        ),
    ),
    *of(
        METHODS + "afedpd.py",
        dense("AFedPD"),
        (
            "A-FedPD tells a first visit nothing of the virtual steps",
            "return Down(w, state.lam_bar)",
            "return Down(w, None)",
        ),
        (
            "A-FedPD's lam_bar moves by P/C",
            ".mul_(self.rho).add_(state.lam_bar)",
            ".mul_(self.rho * cohort.participation).add_(state.lam_bar)",
        ),
        (
            "A-FedPD remembers lam_bar before the round instead of after it",
            "after[cohort.round] = lam_bar",
            "after[cohort.round] = state.lam_bar",
        ),
        (
            "A-FedPD's newest vectors lie in files",
            "for t in sorted(after)[: -max(",
            "for t in sorted(after, reverse=True)[: -max(",
            AFEDPD + ' -k "oldest"',
        ),
        (
            "A-FedPD never forgets a last-seen round",
            " if clients[t + 1]}",
            "}",
            AFEDPD + ' -k "distinct"',
        ),
        (
            "A-FedPD sends zeros to clients that missed nothing",
            "if client.last_round == client.round - 1:",
            "if client.last_round == client.round:",
            AFEDPD + ' -k "missed"',
        ),
        (
            "A-FedPD's headline is w^t instead of w_bar",
            "return w - state.lam_bar / self.rho",
            "return w",
            AFEDPD + ' -k "headline"',
        ),
        (
            "A-FedPD takes the missed steps off",
            "state.lam + down.missed",
            "state.lam - down.missed",
        ),
        (
            "A-FedPD's client does not keep the steps that it missed",
            ".mul_(self.rho).add_(self.dual(down, state))",
            ".mul_(self.rho).add_(state.lam)",
        ),
        (
            "A-FedPD's dual steps from w_{i,0} instead of w^t",
            "(w_K - down.w).mul_",
            "(w_K - result.w_i0).mul_",
        ),
    ),
    # --- without a server -------------------------------------------------------------------------
    *of(
        METHODS + "dpsgd.py",
        nodes("DPSGD and none-ring"),
        (
            "D-PSGD's lian mixes the gradient step too",
            "network.mix(w).add_(z - w)",
            "network.mix(z)",
        ),
        (
            "D-PSGD adds the gradient step twice",
            "network.mix(w).add_(z - w)",
            "network.mix(z).add_(z - w)",
        ),
        (
            "D-PSGD takes two steps a round",
            "        self.local_steps = 1\n",
            "        self.local_steps = 2\n",
        ),
    ),
    *of(
        METHODS + "dfedavg.py",
        nodes("DFedAvg and none-ring"),
        (
            "DFedAvg mixes what the nodes had before training",
            "return cohort.mean(ups.w), state",
            "return w.clone(), state",
        ),
    ),
    *of(
        METHODS + "dfedavgm.py",
        nodes("DFedAvgM and none-ring"),
        (
            "DFedAvgM damps the gradient by 1 - momentum",
            ".add_(g).add_(w",
            ".add_(g, alpha=1 - self.momentum).add_(w",
        ),
        ("DFedAvgM decays weights twice", "Direction(decay=0.0)", "Direction()"),
        (
            "DFedAvgM's weight decay stays outside the momentum",
            ".add_(w, alpha=config.weight_decay)",
            ".add_(w, alpha=0.0)",
        ),
        (
            "DFedAvgM clips the momentum too",
            "alpha=config.weight_decay))\n",
            "alpha=config.weight_decay))\n        clip_(g, config.clip_norm)\n",
        ),
    ),
    *of(
        METHODS + "dfedsam.py",
        tests_of("strategies/test_decentralised.py", "multiple_gossip"),
        ("DFedSAM comes without SAM", "(SAM(rho=self.rho), Gossip())", "(Gossip(),)"),
    ),
    *of(
        METHODS + "dfedsam_mgs.py",
        tests_of("strategies/test_decentralised.py", "multiple_gossip"),
        (
            "DFedSAM-MGS takes Q + 1 gossip steps",
            "Gossip(steps=self.steps)",
            "Gossip(steps=self.steps + 1)",
        ),
    ),
    *of(
        METHODS + "dispfl.py",
        DISPFL,
        (
            "DisPFL draws one first mask for all nodes",
            '_generator("mask", seed, client)',
            '_generator("mask", seed)',
            tests_of("strategies/test_dispfl.py", "different_masks"),
        ),
        (
            "DisPFL anneals one round too early",
            "config.round / config.rounds",
            "(config.round + 1) / config.rounds",
        ),
        ("DisPFL moves twice the share", "self.prune / 2 * (1 +", "self.prune * (1 +"),
        (
            "DisPFL prunes the largest weights",
            "values.abs().masked_fill(",
            "(-values.abs()).masked_fill(",
        ),
        (
            "DisPFL prunes the most negative weights",
            "values.abs().masked_fill(",
            "values.masked_fill(",
        ),
        (
            "DisPFL regrows where the gradient is smallest",
            "(-scores).masked_fill(",
            "scores.masked_fill(",
        ),
        (
            "DisPFL regrows by the signed gradient",
            "return g.abs()",
            "return g.clone()",
        ),
        (
            "DisPFL divides by the number of neighbours instead of the masks' count",
            "network.total(masks)",
            "network.total(torch.ones_like(masks))",
        ),
        ("DisPFL trains outside the mask", "g.mul_(buffers.mask)", "g.mul_(1)"),
        (
            "DisPFL starts from the unmasked average",
            "return state.mask * down.w",
            "return down.w",
        ),
        (
            "DisPFL sends the next mask with the model",
            "return Up(w_K, state.mask), ",
            "return Up(w_K, mask), ",
        ),
        (
            "DisPFL gives every layer the same density",
            "[sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]",
            "[1.0 for _ in sizes]",
            tests_of("strategies/test_dispfl.py", "erdos"),
        ),
        (
            "DisPFL counts a byte per parameter for the masks",
            "1 / (8 * w.element_size())",
            "1 / w.element_size()",
            tests_of("strategies/test_dispfl.py", "peers_send"),
        ),
        (
            "DisPFL regrows at random alike in every round",
            '_generator("regrow", config.seed, config.round, client)',
            '_generator("regrow", config.seed, client)',
        ),
        (
            "DisPFL cuts a stack of masks into clients instead of layers",
            "torch.split(v, sizes, dim=-1)",
            "torch.split(v, sizes, dim=0)",
            stacks("dispfl"),
        ),
        (
            "DisPFL looks for the smallest weights over clients instead of parameters",
            "x.kthvalue(n, dim=-1, keepdim=True)",
            "x.kthvalue(n, dim=0, keepdim=True)",
            stacks("dispfl"),
        ),
        (
            "DisPFL puts the layers of a stack below each other",
            "torch.cat(moved, dim=-1)",
            "torch.cat(moved, dim=0)",
            stacks("dispfl"),
        ),
        (
            "DisPFL counts equals over clients instead of parameters",
            "ties.cumsum(-1)",
            "ties.cumsum(0)",
            stacks("dispfl"),
        ),
    ),
    *of(
        PLUGINS + "graphs.py",
        KNOWN_GRAPHS,
        (
            "The directed graph is transposed",
            "circulant(m, hops).T ",
            "circulant(m, hops) ",
            tests_of("strategies/test_decentralised.py", "graphs_are and directed"),
        ),
        (
            "Metropolis weights look at one end of an edge: rows sum to 1, columns do not",
            "torch.maximum(degree[:, None], degree[None, :])",
            "(degree[:, None] + 0 * degree[None, :])",
            GRAPHS,
        ),
        (
            "Metropolis weights leave no weight at home",
            "graph / (1.0 + torch.maximum",
            "graph / (0.0 + torch.maximum",
        ),
        (
            "The weights of absent nodes are lost",
            "    if torch.equal(W, W.T):\n        return W + torch.diag(1 - W.sum(1))\n",
            "    if torch.equal(W, W.T):\n        return W\n",
            ABSENT,
        ),
        (
            "Without absent nodes' rows are scaled to 1, columns are not",
            "    if torch.equal(W, W.T):\n        return W + torch.diag(1 - W.sum(1))\n",
            "    if torch.equal(W, W.T):\n        return W / W.sum(1, keepdim=True)\n",
            RESTRICTED,
        ),
        (
            "What is left of a directed graph is row stochastic only",
            "        kept /= kept.sum(0, keepdim=True)\n",
            "",
            RESTRICTED,
        ),
        (
            "The exponential graph lacks its longest hop",
            "range(math.ceil(math.log2(m)))",
            "range(math.floor(math.log2(m)))",
        ),
        (
            "The torus does not wrap",
            "            graph[node, beside] = True\n",
            "            last = node.shape[axis] - 1\n"
            "            graph[node.narrow(axis, 0, last), beside.narrow(axis, 0, last)] = True\n",
        ),
        (
            "Random graphs are the same in every round",
            'random.Random(f"gossip {seed} {t}")',
            'random.Random(f"gossip {seed}")',
            tests_of("plugins/test_graphs.py", "random_graphs"),
        ),
        (
            "A random edge needs both ends to draw it",
            "return graph | graph.T\n",
            "return graph & graph.T\n",
            tests_of("plugins/test_graphs.py", "random_graphs"),
        ),
        (
            "The spectral gap is taken of W, whose largest singular value is 1",
            "torch.linalg.matrix_norm(W - 1 / len(W), ord=2)",
            "torch.linalg.matrix_norm(W, ord=2)",
            tests_of("plugins/test_graphs.py", "the_gaps"),
        ),
    ),
    *of(
        PLUGINS + "gossip.py",
        nodes("DFedAvg and none-ring"),
        (
            "Gossip takes one step whatever Q says",
            "torch.linalg.matrix_power(W, steps)",
            "torch.linalg.matrix_power(W, 1)",
        ),
        (
            "Links are counted where they arrive instead of where they leave",
            "self.links.double().sum(0)",
            "self.links.double().sum(1)",
            tests_of("plugins/test_gossip.py", "peers_send"),
        ),
        (
            "The consensus distance is a sum over the nodes",
            ".double().square().mean()",
            ".double().square().sum()",
        ),
        (
            "DisPFL's sums leave the node itself out",
            "(self.links | torch.eye(len(x), dtype=torch.bool)).double()",
            "self.links.double()",
            DISPFL,
        ),
        (
            "Nodes mix their models, not the memory of their servers",
            "return network.mix(w), map_vectors(network.mix, state)",
            "return network.mix(w), state",
            nodes("Scaffold and none-ring"),
        ),
        (
            "A node's own federation has m clients: SCAFFOLD's c moves by 1/m",
            "num_clients=1,",
            "num_clients=info.num_clients,",
            nodes("Scaffold and none-ring"),
        ),
        (
            "Every node is sent the memory of the first node's server",
            "map_vectors(lambda v: v[client], server)",
            "map_vectors(lambda v: v[0], server)",
            nodes("Scaffold and none-ring"),
        ),
        (
            "The anchor of a node's server stays at w^t with center=start",
            "anchor=starts if info.anchored_at_starts else w,",
            "anchor=w,",
            tests_of("strategies/test_decentralised.py", "feddyn_without_a_server"),
        ),
        (
            "consensus-before leaves absent nodes out",
            "[local.get(i, w[i]) for i in range(m)]",
            "list(local.values())",
            ABSENT,
        ),
        (
            "Absent nodes lose their model",
            "before.clone().index_copy_(",
            "torch.zeros_like(before).index_copy_(",
            ABSENT,
        ),
        (
            "Absent nodes' neighbours mix with them all the same",
            "            W = restricted(W, nodes)\n",
            "            W = W[nodes][:, nodes]\n",
            ABSENT,
        ),
        (
            "peer-bytes counts elements",
            "* w[0].numel() * w.element_size())",
            "* w[0].numel())",
            tests_of("plugins/test_gossip.py", "metrics_of"),
        ),
    ),
    # --- relaxed initialisation -------------------------------------------------------------------
    *of(
        PLUGINS + "relaxed_init.py",
        FEDINIT,
        (
            "Relaxed initialisation goes towards the last local model",
            "w_i0 + self.beta * (w_i0 - state.last)",
            "w_i0 + self.beta * (state.last - w_i0)",
        ),
        (
            "The relaxed start is not applied",
            "return w_i0 + self.beta * (w_i0 - state.last)",
            "return w_i0",
        ),
        (
            "Relaxed initialisation remembers its start instead of w_{i,K}",
            "RelaxedState(result.w_K, base)",
            "RelaxedState(result.w_i0, base)",
        ),
        (
            "Relaxed initialisation never updates l_i",
            "RelaxedState(result.w_K, base)",
            "RelaxedState(state.last, base)",
        ),
        (
            "first-visit is the other one",
            'RelaxedState(w_init if self.first_visit == "initial" else w, base)',
            'RelaxedState(w if self.first_visit == "initial" else w_init, base)',
        ),
        (
            "first-visit=current starts from w^0 where the method asks for w^0 too",
            'RelaxedState(w_init if self.first_visit == "initial" else w, base)',
            "RelaxedState(w_init, base)",
            first_visit("FedADMM"),
        ),
        (
            "first-visit=initial is not sent w^0",
            'return self.first_visit == "initial"',
            "return False",
        ),
        (
            "center=start does not tell the server",
            "return Received(kind(*up), w_i0)",
            "return Received(kind(*up))",
            centre("FedDyn"),
        ),
        (
            "The start is not sent to servers that read starts",
            "sends = method.reads_starts or reads_anchor or",
            "sends = reads_anchor or",
            dense("FedCM"),
        ),
        (
            "The start is not sent to servers that read anchors",
            "sends = method.reads_starts or reads_anchor or",
            "sends = method.reads_starts or",
            centre("FedDyn"),
        ),
        (
            "center=start leaves the anchor at w^t",
            "return down._replace(w=w_i0) if self.moves_anchor else down",
            "return down",
            centre("FedProx"),
        ),
        (
            "server=updates adds the relaxation instead of taking it off",
            "w_K - (w_i0 - cohort.w)",
            "w_K + (w_i0 - cohort.w)",
        ),
    ),
    *of(
        CORE + "plugin.py",
        centre("FedADMM"),
        (
            "first-visit=current takes w^0 from methods that need it",
            "return self.rule.needs_w_init or any(plugin.needs_w_init for plugin in self.plugins)",
            "return any(part.needs_w_init for part in self.plugins or (self.rule,))",
            first_visit("FedADMM"),
        ),
        (
            "first-visit=current gives the method w^t for w^0",
            "state = self.rule.init(w, w_init, config)",
            "current = any(not plugin.needs_w_init for plugin in self.plugins)\n"
            "        state = self.rule.init(w, w if current else w_init, config)",
            first_visit("FedADMM"),
        ),
        (
            "first-visit=current gives FedDeper w^t for w^0",
            "state = self.rule.init(w, w_init, config)",
            "current = any(not plugin.needs_w_init for plugin in self.plugins)\n"
            "        state = self.rule.init(w, w if current else w_init, config)",
            first_visit("FedDeper"),
        ),
        (
            "center=start is ignored in FedSMOO, though its server takes the starts",
            "            down = plugin.received(down, w_i0)\n",
            '            if type(self.rule).__name__ != "FedSMOOClient":\n'
            "                down = plugin.received(down, w_i0)\n",
            centre("FedSMOO"),
        ),
        (
            "center=start is ignored in FedPD",
            "            down = plugin.received(down, w_i0)\n",
            '            if type(self.rule).__name__ != "FedPDClient":\n'
            "                down = plugin.received(down, w_i0)\n",
            centre("FedPD"),
        ),
        (
            "center=start is ignored in FedPD after a silent round",
            "            down = plugin.received(down, w_i0)\n",
            "            if down.w is not None:\n"
            "                down = plugin.received(down, w_i0)\n",
            FEDPD,
        ),
        (
            "center=start is ignored in FedDeper",
            "            down = plugin.received(down, w_i0)\n",
            '            if type(self.rule).__name__ != "FedDeperClient":\n'
            "                down = plugin.received(down, w_i0)\n",
            centre("FedDeper"),
        ),
        (
            "center=start is ignored in FedSpeed's paper variant and FedADMM",
            "            down = plugin.received(down, w_i0)\n",
            '            if type(self.rule).__name__ != "FedADMMClient":\n'
            "                down = plugin.received(down, w_i0)\n",
        ),
    ),
    *of(
        CORE + "rounds.py",
        centre("FedDyn"),
        (
            "center=start moves the local anchor, not that of the dual step",
            "    down = half.received(down, w_i0)\n"
            "    direction = half.direction(down, state, config)\n",
            "    direction = half.direction(half.received(down, w_i0), state, config)\n",
        ),
        (
            "center=start moves the anchor of the dual step, not the local one",
            "    down = half.received(down, w_i0)\n"
            "    direction = half.direction(down, state, config)\n",
            "    direction = half.direction(down, state, config)\n"
            "    down = half.received(down, w_i0)\n",
        ),
    ),
    *of(
        CORE + "topology.py",
        centre("FedDyn"),
        (
            "The server's anchor stays at w^t with center=start",
            "cohort.anchor = cohort.mean(starts)",
            "cohort.anchor = w",
        ),
    ),
    # --- plug-ins around a method -----------------------------------------------------------------
    *of(
        CORE + "plugin.py",
        COMPOSITION,
        (
            "A method's own plug-in wins over the caller's",
            "[instead.pop(type(plugin), plugin) for plugin in own]",
            "[(instead.pop(type(plugin), plugin), plugin)[1] for plugin in own]",
            tests_of("plugins/test_composition.py", "takes_its_place"),
        ),
        (
            "A caller's plug-ins are left out where the method has none of their kind",
            "return (*plugins, *instead.values())",
            "return tuple(plugins)",
            tests_of("plugins/test_composition.py", "add_to_a_methods_own"),
        ),
        (
            "Uploads are decoded from the inside out",
            "zip(reversed(self.plugins), reversed(kinds[:-1]), strict=True)",
            "zip(self.plugins, kinds[:-1], strict=True)",
            tests_of("plugins/test_upload.py", "beside_the_upload"),
        ),
        (
            "The gradient's buffers outlive the round",
            "        return self.half.gradient_init(w, self.down, self.state, self.config)\n",
            "        new = self.half.gradient_init(w, self.down, self.state, self.config)\n"
            "        kept = GradientSeat.init.__dict__\n"
            "        return kept.setdefault(f'{self.config.client}', new)\n",
            nodes("DFedAvgM and none-ring"),
        ),
        (
            "The method's gradient seat is left out",
            "        return self.half.gradient(w, g, buffers, at, self.config)\n",
            "        return LocalRule().gradient(w, g, buffers, at, self.config)\n",
            dense_sam("FedSAM"),
        ),
    ),
    *of(
        FEDERATION + "strategy.py",
        FEDINIT,
        (
            "Relaxed initialisation and SAM are not put around the rule",
            "return ClientHalf(self.rule(), tuple(inside))",
            "return ClientHalf(self.rule())",
        ),
        (
            "A server step is linear unless it says otherwise",
            "linear: ClassVar[bool] = False",
            "linear: ClassVar[bool] = True",
            MISTAKES,
        ),
        (
            "A server step takes weights unless it says otherwise",
            "takes_weights: ClassVar[bool] = False",
            "takes_weights: ClassVar[bool] = True",
            tests_of("strategies/test_weighting.py", "refuse_weights"),
        ),
    ),
    # --- the local loop ---------------------------------------------------------------------------
    *of(
        CORE + "rounds.py",
        STEP,
        (
            "Weight decay is missing",
            "lr * (direction.rho + direction.decay * config.weight_decay)",
            "lr * direction.rho",
        ),
        (
            "A method's factor on the weight decay is ignored",
            "direction.decay * config.weight_decay",
            "config.weight_decay",
        ),
        (
            "The clip counts the shift in the norm",
            "        losses.append(seat.gradient(w, g, buffers, at))\n",
            "        losses.append(seat.gradient(w, g, buffers, at))\n"
            "        if config.clip_norm and direction.shift is not None:\n"
            "            length = (g + direction.shift).norm(dim=-1, keepdim=True)\n"
            "            g.mul_((config.clip_norm / length).clamp_(max=1.0))\n",
        ),
        (
            "The clip counts the prox term in the norm",
            "        losses.append(seat.gradient(w, g, buffers, at))\n",
            "        losses.append(seat.gradient(w, g, buffers, at))\n"
            "        if config.clip_norm and direction.anchor is not None:\n"
            "            pull = direction.rho * (w - direction.anchor)\n"
            "            length = (g + pull).norm(dim=-1, keepdim=True)\n"
            "            g.mul_((config.clip_norm / length).clamp_(max=1.0))\n",
        ),
        (
            "The scale of the gradient is ignored",
            "alpha=-lr * direction.scale)",
            "alpha=-lr)",
        ),
        (
            "The anchor enters with the wrong sign",
            "constant = -rho * anchor",
            "constant = rho * anchor",
        ),
        (
            "The prox term acts after the gradient step",
            "    if shrink != 1.0:\n"
            "        w.mul_(shrink)\n"
            "    w.add_(g, alpha=-lr * direction.scale)\n",
            "    w.add_(g, alpha=-lr * direction.scale)\n"
            "    if shrink != 1.0:\n"
            "        w.mul_(shrink)\n",
        ),
        (
            "The training loss is a sum over the steps",
            "torch.stack(losses).mean(0, ",
            "torch.stack(losses).sum(0, ",
        ),
        (
            "w_{i,0} is reported to be the received model",
            "LocalResult(w_i0, ",
            "LocalResult(w_i0 if down.w is None else down.w, ",
            dense("Scaffold"),
        ),
    ),
    *of(
        FEDERATION + "settings.py",
        "tests/strategies/test_centralised.py",
        (
            "Centralised training takes the steps of all clients together",
            "math.ceil(examples / (clients * batch_size))",
            "math.ceil(examples / batch_size)",
        ),
    ),
    *of(
        FEDERATION + "clock.py",
        "tests/server/test_clock.py",
        (
            "The time that is left counts the rounds of before",
            "done, left = number - self.begun, ",
            "done, left = number, ",
        ),
    ),
    *of(
        "fedaccord/client/cohort.py",
        tests_of("engine/test_vectorize.py", "seconds"),
        (
            "Every client of a call is told to have taken the whole call",
            "/ sum(steps)",
            "",
        ),
    ),
    *of(
        CORE + "rule.py",
        STEP,
        (
            "The clip counts weight decay in the norm",
            "        clip_(g, config.clip_norm)\n",
            "        if config.clip_norm:\n"
            "            length = (g + config.weight_decay * w).norm(dim=-1, keepdim=True)\n"
            "            g.mul_((config.clip_norm / length).clamp_(max=1.0))\n",
        ),
        (
            "The clip bounds every layer apart",
            "        clip_(g, config.clip_norm)\n",
            "        from math import prod\n\n"
            "        for layer in g.split([prod(shape) for shape in config.shapes], dim=-1):\n"
            "            clip_(layer, config.clip_norm)\n",
        ),
    ),
    *of(
        CORE + "vectors.py",
        STEP,
        (
            "Short gradients are scaled up to the bound",
            ".clamp_(max=1.0)",
            "",
            dense("FedAvg-0.7"),
        ),
        (
            "The clip bounds the gradients of a stack together",
            "(bound / norm(g))",
            "(bound / torch.linalg.vector_norm(g))",
            stacks("fedavg-none"),
        ),
        (
            "Nothing is clipped in a stack where one gradient is short",
            "float(scale.min()) == 1.0",
            "float(scale.max()) == 1.0",
            "tests/core/test_vectors.py",
        ),
        (
            "The norm of a stack is one for all its clients",
            "torch.linalg.vector_norm(v, dim=-1, keepdim=True)",
            "torch.linalg.vector_norm(v)",
            stacks("fedlesam-none"),
        ),
        (
            "A stack has its clients in the other order",
            "torch.stack(tuple(values))",
            "torch.stack(tuple(reversed(values)))",
            nodes("DFedAvg and none-ring"),
        ),
        (
            "Every row of a stack is its first client's",
            "map_vectors(lambda v: v[i], value)",
            "map_vectors(lambda v: v[0], value)",
            stacks("scaffold-none"),
        ),
        (
            "A stack of clients draws what its first client draws",
            "[draw(i) for i in client]",
            "[draw(client[0]) for _ in client]",
            stacks("dispfl"),
        ),
        (
            "Long vectors are taken for infinite ones",
            "math.isfinite(total) or bool(torch.isfinite(v).all())",
            "math.isfinite(total)",
            tests_of("server/test_replies.py", "finite_vectors"),
        ),
        (
            "A state nested twice loses its outer name",
            'path = f"{prefix}.{name}" if prefix else str(name)',
            "outer = prefix.rpartition('.')[2]\n"
            '            path = f"{outer}.{name}" if prefix else str(name)',
            MISTAKES,
        ),
    ),
    *of(
        TASK + "cache.py",
        tests_of("task/test_nasty_data.py", "parents or cache"),
        (
            "A link to a folder above is walked without an end",
            "                folders.clear()  # which ends the walk here\n",
            "                pass\n",
            tests_of("task/test_nasty_data.py", "links and parents"),
        ),
        (
            "A cache file is not compared with its checksum",
            'if metadata["checksum"] != _checksum(metadata["facts"], tensors):',
            'if not metadata["checksum"]:',
        ),
    ),
    *of(
        "fedaccord/runs/reader.py",
        "tests/runs/test_reader.py",
        (
            "A run whose process is gone is shown as running",
            '        summary["status"] = status(path)',
            "        status(path)",
        ),
    ),
    *of(
        "fedaccord/engine/fleet.py",
        "tests/engine/test_fleet.py",
        (
            "In process a round has no deadline",
            "late = time.monotonic() > deadline",
            "late = False",
        ),
    ),
    *of(
        "fedaccord/cli/submit.py",
        "tests/cli/test_submit.py",
        (
            "What flwr says of nothing ends in a traceback",
            "problem = said[-1] if said else",
            "problem = said[-1] if True else",
        ),
    ),
    *of(
        TASK + "npz.py",
        tests_of("task/test_nasty_data.py", "usable_or_one_line"),
        (
            "Names that are no UTF-8 become one",
            '"utf-8", "backslashreplace")',
            '"utf-8", "replace")',
        ),
        (
            "Float images with channels last are features",
            "x.ndim >= 2 and not channels_last",
            "x.ndim >= 2",
        ),
        ("Images without a pixel are images", " and min(x.shape):", ":"),
    ),
    *of(
        TASK + "image_folder.py",
        tests_of("task/test_nasty_data.py", "hidden"),
        (
            "A hidden folder is a class",
            'if not entry.name.startswith(".")',
            "if entry.name",
        ),
    ),
    *of(
        TASK + "partition_file.py",
        "tests/task/test_partition_file.py",
        (
            "Of a client that is there twice the last counts",
            ", object_pairs_hook=_each_once)",
            ")",
        ),
    ),
    *of(
        TASK + "solver.py",
        tests_of("task/test_solver.py", "a_seat_takes"),
        (
            "Gradients of batches add up",
            "torch._foreach_copy_(model.gradients",
            "torch._foreach_add_(model.gradients",
        ),
        (
            "A gradient away from w sees another batch: SAM's two gradients differ in it",
            "        def gradient_at(point: Vector) -> Tensor:\n",
            "        def gradient_at(point: Vector) -> Tensor:\n"
            "            if point is not model.w:\n"
            "                with model.at(point):\n"
            "                    return self._backward(inputs[1:], targets[1:])\n",
        ),
        (
            "The gradient is always taken at w, wherever it is asked for",
            "with model.at(point):",
            "with model.at(model.w):",
        ),
        (
            "The model trains in evaluation mode",
            "model.module.train()",
            "model.module.eval()",
            tests_of("task/test_solver.py", "training_mode"),
        ),
        (
            "Epochs are one too many",
            "else range(epochs)))",
            "else range(epochs + 1)))",
            COUNTS,
        ),
        (
            "Local steps are one too many",
            "steps or None))",
            "steps + 1 if steps else None))",
            COUNTS,
        ),
        (
            "Large batches too are cut ahead of the steps",
            "AHEAD // max(1, first[0].numel()) - 1",
            "AHEAD - 1",
            tests_of("task/test_solver.py", "ahead"),
        ),
        (
            "Samples are counted in every pass",
            "            if first:\n",
            "            if first or seen:\n",
            COUNTS,
        ),
    ),
    *of(
        CLIENT + "train.py",
        tests_of("client/test_train.py", "state_is_written or state_of_one_round"),
        (
            "The state is written before the round is over",
            "    answer, state = local_round(visit, state, data)\n",
            "    begun = first_state(visit, CPU) if state is None else state\n"
            "    own.save(store.remember(memory, asked, own.pack(asked.round, begun)))\n"
            "    answer, state = local_round(visit, state, data)\n",
        ),
        (
            "The state is never written",
            "    own.save(store.remember(memory, asked, own.pack(asked.round, state)))\n",
            "",
        ),
        (
            "A client that lost its state begins anew without a word",
            "        return Message(write_answer(Lost(asked.accepted)), reply_to=message)\n",
            "        state = None\n",
            tests_of("client/test_train.py", "says_so"),
        ),
        (
            "A client that is sent w^0 takes w^t for it",
            "w_init = w if visit.w_init is None else",
            "w_init = w if visit.instruction.round >= 0 else",
            tests_of("strategies/test_references.py", "through_messages and FedAvg-0.7"),
        ),
    ),
    *of(
        CLIENT + "cohort.py",
        VECTORIZED,
        (
            "A client keeps the state of another row",
            "map_vectors(_to_host, row(done.state, j))",
            "map_vectors(_to_host, row(done.state, 0))",
        ),
        (
            "A client uploads the vectors of another row",
            "Answer(row(up, j), task",
            "Answer(row(up, 0), task",
        ),
        (
            "A client's state keeps those of its cohort in memory",
            'v.to("cpu", copy=True,',
            'v.to("cpu",',
            tests_of("engine/test_vectorize.py", "memory_of_its_own"),
        ),
        (
            "A client that diverged takes its cohort with it",
            "if is_finite(w_K[j], found[j]):",
            "if is_finite(w_K):",
            tests_of("engine/test_vectorize.py", "concerns_itself"),
        ),
        (
            "Clients of a cohort count the samples of the first one",
            "row(up, j), task.num_examples(client)",
            "row(up, j), task.num_examples(clients[0])",
        ),
        (
            "A client's first visit goes together with a later one",
            "return tuple(name for name, _ in leaves(visit.down)), kept",
            "return tuple(name for name, _ in leaves(visit.down)), ()",
            tests_of("engine/test_vectorize.py", "do_go_together"),
        ),
    ),
    *of(
        TASK + "cohort_batches.py",
        "tests/task/test_cohort_batches.py",
        (
            "A stack's samples are dealt column by column",
            "part.view(*rows.shape, *part.shape[1:])",
            "part.view(*rows.mT.shape, *part.shape[1:]).transpose(-2, -1)",
        ),
    ),
    *of(
        TASK + "task.py",
        BATCHES,
        (
            "Batches are the same in every round",
            "(seed, round, client), dtype",
            "(seed, 0, client), dtype",
        ),
        (
            "Batches are the same at every client",
            "(seed, round, client), dtype",
            "(seed, round, 0), dtype",
        ),
        (
            "Batches ignore the seed",
            "(seed, round, client), dtype",
            "(0, round, client), dtype",
        ),
        (
            "batch-size 0 shuffles the client's samples",
            "            yield self.task.prepare(x, self.dtype), y\n            return\n",
            "            rows = torch.randperm(len(y), generator=self.generator)\n"
            "            yield self.task.prepare(x[rows], self.dtype), y[rows]\n"
            "            return\n",
        ),
    ),
    *of(
        TASK + "evaluation.py",
        "tests/task/test_evaluation.py",
        (
            "The test loss adds up the means of batches, whatever their size",
            "loss(predictions, targets) * len(targets)",
            "loss(predictions, targets)",
        ),
        (
            "Evaluation is in training mode",
            "model.module.eval()",
            "model.module.train()",
        ),
        (
            "Threads that evaluate share a model",
            "(deepcopy(model) for _",
            "(model for _",
        ),
        (
            "Threads evaluate on, where one of them failed",
            "others end too\n            numbered = iter(())",
            "others end too\n            pass",
        ),
    ),
    *of(
        TASK + "models.py",
        tests_of("task/test_models.py", "dropout"),
        (
            "Dropout keeps what it is to drop",
            ">= round(256 * self.p)",
            "< round(256 * self.p)",
        ),
        (
            "Dropout does not make up for what it drops",
            "mul_(1 / (1 - self.p))",
            "mul_(1)",
        ),
    ),
    # --- cohort, round loop, metrics --------------------------------------------------------------
    *of(
        CORE + "cohort.py",
        COHORT,
        (
            "Weights of the mean are not normalised",
            ".div_(sum(self.weights))",
            ".div_(len(self.weights))",
        ),
        (
            "The mean forgets the weight of the first client",
            "total = weight * x if total is None",
            "total = x.clone() if total is None",
            weighted("FedAvg-0.7"),
        ),
        (
            "The mean is taken in place of its first vector",
            "total = weight * x if total is None",
            "total = x.mul_(weight) if total is None",
        ),
        (
            "The plain sum is weighted: SCAFFOLD's c under weighting=examples",
            "[1.0] * len(self.weights))",
            "self.weights)",
        ),
        (
            "P/C counts weights: FedDyn's lam_bar under weighting=examples",
            "return len(self.weights) / self.num_clients",
            "return sum(self.weights) / self.num_clients",
        ),
    ),
    *of(
        CORE + "topology.py",
        weighted("FedAvg"),
        (
            "weighting=examples is uniform",
            "float(reply.examples) if info.weighted else 1.0",
            "1.0",
        ),
        (
            "Uniform weighting counts examples and the other way round",
            "if info.weighted else 1.0",
            "if not info.weighted else 1.0",
        ),
    ),
    *of(
        CORE + "rounds.py",
        'tests/core/test_rounds.py -k "accepted or failed_round or w_init"',
        (
            "The server takes the rate of round 1 for every round's",
            "lr=method.rate(s.t),",
            "lr=method.rate(0),",
            dense("FedCM"),
        ),
        (
            "Failed rounds add up over good ones",
            "step.server, accepted)",
            "step.server, accepted, s.failed)",
            tests_of("server/test_strategy.py", "forgotten"),
        ),
        (
            "A round that fails has its number again",
            "return s._replace(t=s.t + 1, ",
            "return s._replace(",
        ),
        (
            "The last accepted round is off by one",
            "index_fill(0, clients, s.t)",
            "index_fill(0, clients, s.t + 1)",
        ),
        (
            "The server remembers a client's first round for its last",
            "accepted = s.accepted.index_fill(0, clients, s.t)",
            "accepted = s.accepted.index_fill(0, clients[s.accepted[clients] < 0], s.t)",
            dense("AFedPD"),
        ),
        (
            "w^0 is forgotten with the first visit",
            "s.w_init if half.needs_w_init else None",
            "s.w_init if half.needs_w_init and not (accepted >= 0).any() else None",
        ),
        (
            "w^0 is kept where no client reads it",
            "s.w_init if half.needs_w_init else None",
            "s.w_init",
        ),
        (
            "A client that lost its part of the server's sum is forgotten alone",
            "if not begins_anew(method, half):",
            "if begins_anew(method, half) is not None:",
            FORGOTTEN,
        ),
        (
            "All begin anew at the broadcast model, not at the headline",
            "    w = method.headline(s.w, s.server)\n",
            "    w = s.w\n",
            FORGOTTEN,
        ),
        (
            "Who begins anew is sent the first w^0",
            "w=w, w_init=centre,",
            "w=w,",
            FORGOTTEN,
        ),
        (
            "Where all begin anew, clients go on from the states that they have",
            "server=server, accepted=nobody)",
            "server=server)",
            FORGOTTEN,
        ),
        (
            "Where clients remember nothing of the method, a lost plug-in state begins all anew",
            "method.tied and not half.rule.is_stateless",
            "method.tied",
            FORGOTTEN,
        ),
    ),
    *of(
        FEDERATION + "session.py",
        tests_of("server/test_strategy.py", "a_message_holds"),
        (
            "The local rate decays before round 1",
            "lr=method.rate(s.t),",
            "lr=method.rate(s.t + 1),",
            tests_of("server/test_strategy.py", "callers_own_keys"),
        ),
        (
            "w^0 is not sent to first visits of round 2",
            "self.half.needs_w_init and s.t > 0",
            "self.half.needs_w_init and s.t > 1",
        ),
        (
            "Clients are told the last round as the one that they were accepted in",
            "common._replace(client=i, accepted=accepted)\n",
            "common._replace(client=i, accepted=s.t - 1 if accepted >= 0 else -1)\n",
            tests_of("strategies/test_references.py", "through_messages and Scaffold"),
        ),
    ),
    *of(
        FEDERATION + "fleet.py",
        tests_of("server/test_bad_replies.py", "second_and_forged"),
        (
            "A client's second reply takes the place of its first",
            "        elif i in heard:\n"
            '            log.info("ignored a second reply of client %d", i)\n',
            "",
        ),
        (
            "A node may answer for another one",
            "elif not _is_sender(reply, asked[i]):",
            "elif asked[i] is None:",
        ),
        (
            "One reply of a dead worker ends the run",
            "for reason in errors) > 1:",
            "for reason in errors) > 0:",
            tests_of("server/test_bad_replies.py", "dead_worker"),
        ),
        (
            "Clients that do not answer are left out of the round's outcome",
            "_read(heard[i], read) if i in heard else LATE for i in sorted(self._sent)}",
            "_read(heard[i], read) for i in sorted(heard)}",
            tests_of("server/test_bad_replies.py", "late_reply"),
        ),
    ),
    *of(
        TASK + "task.py",
        "tests/task/test_clients.py",
        (
            "Samples never lie on a GPU",
            "if size > SHARE * free:",
            "if size:",
        ),
        (
            "Samples lie on a GPU however little room is left",
            "if size > SHARE * free:",
            "if size > free:",
        ),
        (
            "The test samples go to a GPU at every evaluation",
            "return self.clients.to(device), test and (test[0].to(device), test[1].to(device))",
            "return self.clients.to(device), test",
        ),
    ),
    *of(
        TASK + "graphs.py",
        tests_of("task/test_graphs.py", "cohort or clients"),
        (
            "A larger cohort's graphs work on the buffers of a smaller one",
            "            self.recorded.clear()  # they use the old ones\n",
            "",
        ),
        (
            "A cohort's graphs take every point for its models",
            "at_w = point.is_set_to(self.w[:m])",
            "at_w = True",
        ),
        (
            "Rows from elsewhere than the first on are taken for those",
            "if not g.is_set_to(self.g[:m]):",
            "if not len(g):",
        ),
    ),
    *of(
        TASK + "layers.py",
        "tests/task/test_layers.py",
        ("A layer's hooks are passed over", "return not any(hooks) and", "return"),
        (
            "A method that was put into a layer is passed over",
            ' and "forward" not in vars(module)',
            "",
        ),
        (
            "A bias's gradient is that of the last sample",
            "torch.sum(dy, -2, out=g_bias)",
            "g_bias.copy_(dy.select(-2, -1))",
        ),
        (
            "The way back ends a layer early",
            "range(len(left) - 1, self._end - 1, -1)",
            "range(len(left) - 1, self._end, -1)",
        ),
        (
            "A stack's filling counts",
            "counted = (targets != IGNORED).sum(1)",
            "counted = (targets == targets).sum(1)",
        ),
        (
            "A stack's gradient is of the sum, not of the mean",
            ".div_(counted[:, None]).flatten()",
            ".flatten()",
        ),
        (
            "Images are not put channels last",
            "if self.channels_last else inputs",
            "if False else inputs",
        ),
        (
            "Mixtures of classes are taken for classes",
            "known = targets.dim() == 1 + many and",
            "known =",
        ),
        (
            "A stack goes through layers that take one client",
            "return known and (self._takes_many or not many)",
            "return known",
        ),
        (
            "A convolution forgets its groups on the way back",
            "False, [0, 0], conv.groups),",
            "False, [0, 0], 1),",
        ),
        ("Rows of pixels are taken for samples", "(dims and layer.dims not in (0, dims))", "False"),
    ),
    *of(
        TASK + "cohort_solver.py",
        tests_of("task/test_graphs.py", "outlast"),
        (
            "A cohort's models are in the buffers of the next round",
            "return done._replace(w_K=w.clone())",
            "return done",
        ),
    ),
    *of(
        "fedaccord/engine/fleet.py",
        tests_of("engine/test_waits.py", "states"),
        (
            "A state is written to disk before it came from the GPU",
            "            read(answer.loss for _, answer, _ in made)\n",
            "            pass\n",
        ),
        (
            "A GPU is waited for after every client whose state goes to disk",
            "len(self._made) * size > PENDING:",
            "len(self._made) * size > 0:",
        ),
    ),
    *of(
        "fedaccord/client/train.py",
        tests_of("engine/test_waits.py", "waits_once and fedavg"),
        (
            "A GPU is waited for after every client",
            'if data.home.type == "cuda":',
            'if data.home.type == "cudas":',
        ),
    ),
    *of(
        CORE + "vectors.py",
        tests_of("engine/test_waits.py", "waits_once and fedavg"),
        (
            "What goes to a GPU waits for it",
            "        pinned = v.pin_memory()\n",
            "        pinned = v\n",
        ),
        (
            "Work does not wait for the state that it needs",
            "    here.wait_stream(lane)\n",
            "",
            tests_of("core/test_vectors.py", "large"),
        ),
        (
            "What comes from a GPU waits for it",
            "v.to(device, non_blocking=v.is_cuda)",
            "v.to(device)",
            tests_of("engine/test_waits.py", "waits_once and scaffold"),
        ),
    ),
    *of(
        FEDERATION + "round.py",
        "tests/server/test_round.py",
        (
            "All that the server keeps is looked at in every round",
            "if id(v) not in before and not in_file(v)}",
            "if not in_file(v)}",
        ),
        (
            "What is moved to a file is looked at again",
            " and not in_file(v)}",
            "}",
            tests_of("strategies/test_afedpd.py", "moved_to_a_file"),
        ),
        (
            "A round with just enough replies fails",
            "if len(good) >= needed:",
            "if len(good) > needed:",
            tests_of("server/test_strategy.py", "failed_round"),
        ),
        (
            "A failed round moves the model by the replies that came",
            "        after, w_bar = rounds.failed_round(s), method.topology.average(s.w)\n",
            "        after, w_bar = rounds.failed_round(s), method.topology.average(s.w)\n"
            "        if replies := [it.reply for it in good.values()]:\n"
            "            moved = rounds.server_round(method, session.half, s, replies).state\n"
            "            after = after._replace(w=moved.w)\n",
            tests_of("server/test_strategy.py", "failed_round"),
        ),
        (
            "A server state that is not finite is kept",
            '{"w": after.w, **dict(leaves(after.server))}',
            '{"w": after.w}',
            tests_of("server/test_round.py", "not_finite"),
        ),
        (
            "A reply that spoils the server's step is never found",
            "    if most < 1 or not fits(most):\n",
            "    if most >= 0:\n",
            "tests/server/test_bounds.py",
        ),
        (
            "More clients than needed are dropped with the one that spoils a step",
            "    return order[: 1 + bisect_left(range(1, most), True, key=fits)]\n",
            "    return order[:most]\n",
            "tests/server/test_bounds.py",
        ),
        (
            "max-client-norm bounds nothing",
            "        outcome |= _too_large(sizes, outcome, method.max_client_norm)\n",
            "",
            "tests/server/test_bounds.py",
        ),
        (
            "max-update-norm bounds nothing",
            "    if far > most:\n",
            "    if far > most > far:\n",
        ),
        (
            "What a GPU had not told of a reply is not looked at",
            "outcome |= {i: settled(it, found[i]) for i, it in good.items()}",
            "pass",
            tests_of("engine/test_waits.py", "late"),
        ),
        (
            "A reply that turned out to be bad stays in the model",
            "if all(isinstance(outcome[i], Accepted) for i in good):",
            "if good:",
            tests_of("engine/test_waits.py", "late"),
        ),
        (
            "Who lost its state is asked for it again and again",
            "        after = rounds.forget(method, session.half, after, lost)\n",
            "",
            tests_of("engine/test_faults.py", "what_was_done"),
        ),
        (
            "A round in which a client lost its state does not count",
            "rounds.forget(method, session.half, after, lost)",
            "rounds.forget(method, session.half, s, lost)",
            tests_of("engine/test_faults.py", "what_was_done"),
        ),
    ),
    *of(
        FEDERATION + "checkpoint.py",
        tests_of("engine/test_resume.py", "with_plugins or feddyn or earlier_checkpoint"),
        (
            "The server's state has the names of other vectors",
            'f"server.{name}": vector',
            "f\"server.{name.partition('.')[0]}\": vector",
            tests_of("engine/test_resume.py", "every_method and afedpd"),
        ),
        (
            "w^0 is not in the checkpoint",
            "if s.w_init is not None:",
            "if s.w_init is None:",
        ),
        (
            "A run that goes on forgets the rounds that failed before",
            'failed=facts["failed"],',
            "failed=0,",
            "tests/server/test_checkpoint.py",
        ),
    ),
    *of(
        FEDERATION + "metrics.py",
        METRICS,
        (
            "Consistency and spread are swapped",
            '"consistency": _mean_square(from_w),',
            '"consistency": _mean_square(from_w_bar),',
        ),
        (
            "Drift is a sum over the clients",
            "for distance in far) / len(far)",
            "for distance in far)",
        ),
        (
            "The training loss weighs clients uniformly",
            'weights = [m["num-examples"] for m in rows]',
            "weights = [1 for _ in rows]",
            MISTAKES,
        ),
        (
            "The training loss is a sum over the clients",
            "sum(losses) / sum(weights)",
            "sum(losses)",
            MISTAKES,
        ),
        ("down-bytes counts elements", "sum(b for _, b in down)", "sum(n for n, _ in down)"),
        (
            "up-vectors is a mean over the clients",
            '"up-vectors": sum(m["up-vectors"] for m in rows)',
            '"up-vectors": sum(m["up-vectors"] for m in rows) / len(rows)',
        ),
    ),
    *of(
        FEDERATION + "strategy.py",
        tests_of("server/test_strategy.py", "evaluation_every"),
        (
            "What is evaluated is the broadcast model, not the headline",
            "            headline = self.headline(s.w, s.server)\n",
            "            headline = s.w\n",
        ),
        (
            "What start() returns is the broadcast model, not the headline",
            "return self.topology.average(self.headline(s.w, s.server))",
            "return self.topology.average(s.w)",
            AFEDPD + ' -k "headline"',
        ),
        (
            "The last round is not evaluated",
            "if number % self.eval_every == 0 or number == self.num_rounds:",
            "if number % self.eval_every == 0:",
        ),
    ),
    *of(
        FEDERATION + "sampling.py",
        "tests/server/test_sampling.py",
        (
            "Cohort sizes are rounded down",
            "round(fraction * num_clients)",
            "int(fraction * num_clients)",
            MISTAKES,
        ),
        (
            "Every round draws the same cohort",
            'random.Random(f"cohort {seed} {t}")',
            'random.Random(f"cohort {seed}")',
        ),
        (
            "Bernoulli cohorts may be empty",
            "while here and not drawn:",
            "if here and not drawn:",
        ),
        (
            "NumPy's generator takes another place than Python's",
            "dtype=np.uint32), position, 0, 0.0))",
            "dtype=np.uint32), position - 1, 0, 0.0))",
        ),
    ),
    *of(
        FEDERATION + "replies.py",
        tests_of("server/test_replies.py", "bad_reply and nan"),
        (
            "Replies with NaN are accepted",
            "    if not is_finite(vector, total):\n",
            "    if not vector.numel():\n",
        ),
        (
            "Bytes are counted as elements",
            "sum(v.nbytes for v in carried)",
            "sum(v.numel() for v in carried)",
            METRICS,
        ),
        (
            "A client may lose a state that the server does not know of",
            "if asked.accepted < 0 or lost.accepted != asked.accepted:",
            "if asked.accepted < -1:",
            tests_of("server/test_bad_replies.py", "bad_reply and loss"),
        ),
    ),
    *of(
        FEDERATION + "roster.py",
        tests_of("server/test_roster.py", "most_nodes_say"),
        (
            "The number of clients is what the first node says",
            "max(votes, key=lambda c: (votes[c], c))",
            "next(iter(votes))",
        ),
    ),
    *of(
        FEDERATION + "evaluation.py",
        tests_of("server/test_evaluation.py", "personal_model"),
        (
            "Personal metrics are a sum over the clients",
            "fmean(row[name] for row in rows)",
            "sum(row[name] for row in rows)",
        ),
    ),
    # --- records, engine, runs --------------------------------------------------------------------
    *of(
        WIRE + "messages.py",
        tests_of("strategies/test_references.py", "through_messages and AFedPD"),
        (
            "All clients are sent what the first one is sent",
            "if packed is None or any(a is not b for a, b in zip(packed[0], down, strict=True)):",
            "if packed is None:",
        ),
    ),
    *of(
        FEDERATION + "replies.py",
        METRICS,
        (
            "The drift is the length of the model",
            "far = float(distances([vector], w))",
            "far = float(length(vector))",
        ),
    ),
    *of(
        FEDERATION + "round.py",
        METRICS,
        (
            "The spread is the consistency",
            "from_w_bar = distances(ups.w, w_bar)",
            "from_w_bar = distances(ups.w, after.w)",
        ),
    ),
    *of(
        WIRE + "tensor_array.py",
        "tests/wire/test_tensor_array.py",
        (
            "A client's memory stays in Ray's",
            "KeptArray(torch.from_numpy(array.copy()))",
            "KeptArray(torch.from_numpy(array))",
        ),
        (
            "A message is copied out of Ray's memory",
            "return TensorArray(torch.from_numpy(array))",
            "return TensorArray(torch.from_numpy(array.copy()))",
        ),
    ),
    *of(
        WIRE + "records.py",
        tests_of("wire/test_records.py", "does_not_fit"),
        (
            "A vector of another precision is accepted",
            "(value.shape != like.shape or value.dtype != like.dtype)",
            "value.shape != like.shape",
        ),
        (
            "A vector of another shape is accepted",
            "(value.shape != like.shape or value.dtype != like.dtype)",
            "value.dtype != like.dtype",
        ),
    ),
    *of(
        WIRE + "codec.py",
        tests_of("wire/test_codec.py", "imports_nothing and untouched"),
        (
            "A class is imported because a message names it",
            "    kind = Registered.known.get(name)\n",
            '    module, _, own = name.partition(":")\n'
            '    kind = getattr(__import__(module, fromlist=["_"]), own, None)\n',
        ),
    ),
    *of(
        CLIENT + "store.py",
        "tests/client/test_store.py",
        (
            "A state says another round than it was saved in",
            "rounds = [version.round for",
            "rounds = [version.round + 1 for",
        ),
        (
            "The version before is dropped",
            "            self.records[BEFORE] = before.state\n",
            "            pass\n",
        ),
        (
            "A visit begins with the latest state, accepted or not",
            "    found = version(memory, asked.accepted)\n",
            "    found = memory and memory.latest\n",
        ),
        (
            "A client keeps its latest state instead of the accepted one",
            "version(memory, asked.accepted), asked.attempt)",
            "memory and memory.latest, asked.attempt)",
        ),
        (
            "A message of an earlier round is answered",
            "asked.round < memory.latest.round:",
            "asked.round < 0:",
        ),
        (
            "A message that comes twice is refused",
            "asked.round < memory.latest.round:",
            "asked.round <= memory.latest.round:",
        ),
        (
            "A server that begins again is taken for one that is late",
            "asked.attempt <= memory.attempt and",
            "asked.attempt >= 0 and",
        ),
        (
            "A client forgets how often the server began",
            "version(memory, asked.accepted), asked.attempt)",
            "version(memory, asked.accepted))",
        ),
        (
            "A plug-in's lost state is not missed",
            "if is_stateless(asked.half, asked.shapes):",
            "if asked.half.rule.is_stateless:",
        ),
        (
            "A lost state is a first visit",
            "    raise LostState\n",
            "    return None\n",
        ),
    ),
    *of(
        CLIENT + "disk.py",
        "tests/client/test_disk.py",
        (
            "The files of the last memory go before the new index is written",
            "        replace(self.folder / INDEX, json.dumps(content).encode())\n"
            "        named = {INDEX, *(version.state.name for version in versions)}\n"
            "        for path in self.folder.iterdir():\n"
            "            if path.name not in named:\n"
            "                path.unlink(missing_ok=True)\n",
            "        named = {INDEX, *(version.state.name for version in versions)}\n"
            "        for path in self.folder.iterdir():\n"
            "            if path.name not in named:\n"
            "                path.unlink(missing_ok=True)\n"
            "        replace(self.folder / INDEX, json.dumps(content).encode())\n",
        ),
        (
            "Clients of one node share a memory",
            "self.folder = folder / name / str(int(asked.client))",
            "self.folder = folder / name / str(0)",
        ),
        (
            "Files of older versions stay",
            "            if path.name not in named:\n"
            "                path.unlink(missing_ok=True)\n",
            "            assert path.name\n",
        ),
    ),
    *of(
        "fedaccord/engine/grid.py",
        tests_of("engine/test_grid.py", "that_fails"),
        (
            "The state of a client that failed is kept",
            "            context.state = RecordDict(before)\n",
            "",
        ),
    ),
    *of(
        "fedaccord/engine/fleet.py",
        tests_of("engine/test_faults.py", "goes_back"),
        (
            "A client in process goes on from a state that was not accepted",
            "reached.append((visit, store.recall(self.memories.get(asked.client), asked)))",
            "memory = self.memories.get(asked.client)\n"
            "                reached.append((visit, memory and memory.latest.state))",
        ),
        (
            "A client in process keeps no version before its last",
            "store.remember(memory, asked, state)",
            "store.remember(None, asked, state)",
        ),
        (
            "A checkpoint holds states that were not accepted",
            "{i: store.version(memory, accepted[i]) for i, memory in",
            "{i: memory.latest for i, memory in",
            "tests/engine/test_fleet.py",
        ),
        (
            "A model that takes no stack of clients is tried in every round",
            "                self.vectorize = False\n",
            "",
            tests_of("engine/test_vectorize.py", "tried_once"),
        ),
        (
            "A first visit goes together with later ones",
            "groups.setdefault(form(visit, state), [])",
            "groups.setdefault(form(visit, None), [])",
            tests_of("engine/test_vectorize.py", "do_go_together"),
        ),
    ),
    *of(
        "fedaccord/engine/workers.py",
        tests_of("engine/test_workers.py", "network"),
        (
            "A client at a worker keeps no version before its last",
            "store.remember(memory, asked, state)",
            "store.remember(None, asked, state)",
        ),
        (
            "Workers get the smallest clients first",
            "key=lambda pair: -self.task.num_examples(pair[0].client)",
            "key=lambda pair: self.task.num_examples(pair[0].client)",
            tests_of("engine/test_workers.py", "largest"),
        ),
    ),
    *of(
        "fedaccord/runs/tensors.py",
        "tests/client/test_disk.py",
        (
            "The checksum of a client's tensors is not looked at",
            "if not same:",
            "if False:",
        ),
        (
            "The checksum of a checkpoint's tensors is not looked at",
            "if not same:",
            "if False:",
            "tests/runs/test_checkpoint.py",
        ),
        (
            "A file is written in its place",
            "    replace(path, content)\n",
            "    path.write_bytes(content)\n",
        ),
    ),
    *of(
        "fedaccord/task/parts.py",
        "tests/task/test_parts.py",
        ("All clients draw the same samples", "[self._seed, DRAWN, client]", "[self._seed, DRAWN]"),
        ("The smaller parts come first", "(client < self._larger)", "(client >= self._larger)"),
        (
            "A class is drawn whatever a client's prior",
            "cdf = self._prior(rng).cumsum()",
            "cdf = (0 * self._prior(rng) + 1).cumsum()",
        ),
    ),
    *of(
        "fedaccord/client/shards.py",
        "tests/client/test_shards.py",
        (
            "A place that holds the version before is used again",
            "there.pop(before.round, None)",
            "there.get(before.round)",
        ),
        (
            "The version before is copied again",
            "there.pop(before.round, None) or ",
            "",
            "tests/engine/test_states.py",
        ),
        ("Places are never used again", "self._free[len(place)].append(place)", "pass"),
        ("States stay in memory", "release(version.state.place)", "pass"),
    ),
    *of(
        "fedaccord/engine/states.py",
        "tests/engine/test_states.py",
        ("One version of a state is counted", "size = 2 * visited", "size = visited"),
        (
            "Tensors of large vectors are kept",
            "    return pages\n",
            "    return torch.frombuffer(pages, dtype=v.dtype).view(v.shape)\n",
        ),
    ),
    *of(
        "fedaccord/runs/checkpoint.py",
        "tests/runs/test_checkpoint.py",
        (
            "What is kept of a past round is written with every checkpoint",
            "for name, vector in past.items():\n            if name not in self._sums:",
            "for name, vector in past.items():\n            if True:",
        ),
        (
            "The checksum of a checkpoint's plain values is not looked at",
            'if zlib.crc32(json.dumps(whole["content"]).encode()) != whole["sum"]:',
            'if "sum" not in whole:',
        ),
        (
            "The files of the other checkpoint are deleted",
            'named |= set(self._content(number)["files"])',
            'named = set(self._content(number)["files"])',
        ),
        (
            "One checkpoint is kept, not two",
            "self.forget(*self.numbers()[:-KEPT])",
            "self.forget(*self.numbers()[:-1])",
        ),
        (
            "A checkpoint names its files before they are there",
            '        server_file = f"{number}.safetensors"\n',
            '        replace(self.folder / f"{number}.json", b"{}")\n'
            '        server_file = f"{number}.safetensors"\n',
        ),
        (
            "A run that goes on keeps the checkpoints that came after",
            "(n for n in self.numbers() if n > number)",
            "(n for n in self.numbers() if n > number + 1)",
        ),
    ),
    *of(
        "fedaccord/logbook.py",
        "tests/test_logbook.py",
        (
            "A server that begins again does not say so to its clients",
            'facts["attempt"] + 1',
            'facts["attempt"]',
        ),
        (
            "A run that goes on has another name for its clients",
            "            facts = begun.facts\n",
            '            facts = begun.facts | {"federation": _fresh(directory.path)}\n',
        ),
        (
            "A checkpoint holds a state that the tables do not have yet",
            "s, session = self._recorded, self.strategy.session",
            "s, session = self.strategy.state, self.strategy.session",
        ),
        (
            "Checkpoints that came after stay when a run goes on from an earlier one",
            "        checkpoints.go_on_from(begun.number)\n",
            "",
            tests_of("engine/test_resume.py", "earlier_checkpoint"),
        ),
        (
            "Other mathematics goes on",
            '        check_resumed(config, begun.facts["settings"])\n',
            "",
            tests_of("engine/test_resume.py", "other_mathematics"),
        ),
    ),
    *of(
        "fedaccord/server_app.py",
        tests_of("plugins/test_gossip.py", "generalisation"),
        (
            "The generalisation gap has the wrong sign",
            'train["train-accuracy"] - found[accuracy]',
            'found[accuracy] - train["train-accuracy"]',
        ),
    ),
    *of(
        "fedaccord/runs/directory.py",
        tests_of("runs/test_directory.py", "the_summary_counts"),
        (
            "The window mean of the summary is the mean of the whole run",
            "sum(seen[-WINDOW:]) / len(seen[-WINDOW:])",
            "sum(seen) / len(seen)",
        ),
        (
            "The best loss is the largest one",
            'max if "accuracy" in key else min',
            "max",
        ),
        (
            "The untrained model counts among the evaluations",
            'if row["round"] > 0',
            "",
        ),
        (
            "A full disk leaves a torn row",
            "os.truncate(self.path, size)",
            "pass",
            tests_of("runs/test_directory.py", "tears_no_row"),
        ),
        (
            "A dead run says running",
            "not origin.is_alive(",
            "origin.is_alive(",
            tests_of("runs/test_directory.py", "is_dead"),
        ),
    ),
    *of(
        "fedaccord/server_app.py",
        "tests/test_server_app.py",
        (
            "A run of which no round counted is completed",
            "not result.train_metrics_clientapp",
            "False",
        ),
        (
            "A model that is not finite is completed",
            "not (finite and math.isfinite(loss))",
            "False",
        ),
    ),
    *of(
        "fedaccord/interrupts.py",
        "tests/test_interrupts.py",
        ("A second signal interrupts the saving", "if first and not", "if not"),
        (
            "A signal during a row cuts it",
            "        self._held = True\n        try:",
            "        try:",
        ),
    ),
    *of(
        "fedaccord/reproduce/table.py",
        "tests/reproduce/test_table.py",
        (
            "A row's own settings lose to the column's",
            '{**base, **changes, **flatten(values.get("set", {}))}',
            '{**base, **flatten(values.get("set", {})), **changes}',
        ),
        ("A special preset is not taken", "if fitting else values", "if not others else values"),
        (
            "The paper's numbers belong to the columns backwards",
            "zip(columns, paper",
            "zip(columns[::-1], paper",
        ),
    ),
    *of(
        "fedaccord/reproduce/study.py",
        "tests/reproduce/test_study.py",
        (
            "A longer run begins anew",
            'f"{configuration.name}-seed{seed}"',
            'f"{configuration.name}-{self.rounds_of(cell)}-seed{seed}"',
        ),
        ("An annealed run goes on", 'settings["algo"] in ANNEALED', 'settings["algo"] in ()'),
        ("Fewer rounds throw a longer run away", "if has > run.job.rounds", "if has < 0"),
        (
            "A finished run of fewer rounds loses its checkpoints",
            "job.rounds >= runs[0].cell.rounds",
            "job.rounds >= 1",
        ),
    ),
    *of(
        "fedaccord/reproduce/results.py",
        "tests/reproduce/test_page.py",
        ("The shorter run stays", 'keep="last"', 'keep="first"'),
    ),
    *of(
        "fedaccord/reproduce/page.py",
        "tests/reproduce/test_page.py",
        ("Fewer rounds are compared with the paper", "rounds < cell.rounds or", "rounds < 0 or"),
        (
            "The mean is subtracted the other way round",
            "best.mean() - cell.paper",
            "cell.paper - best.mean()",
        ),
        ("One spread is far", "abs(value) > 2 * best.std()", "abs(value) > best.std()"),
        ("Cells that were not run are silent", "if cell.name not in run:", "if not run:"),
    ),
    *of(
        "fedaccord/sweep/table.py",
        "tests/sweep/test_table.py",
        ("Gains are over FedAvg's first choice", "each.configuration.point.items() <=", "set() <="),
        ("A failed seed has a number", "if not math.isnan(value)}", "}"),
        ("Winners are those of the method", "== chosen]", "[:1] == chosen[:1]]"),
    ),
    *of(
        "fedaccord/sweep/plan.py",
        "tests/sweep/test_sweep.py",
        ("What is not to be tuned is tuned", "return self.options.tune and any(", "return any("),
    ),
    *of(
        "fedaccord/cli/sweep.py",
        "tests/cli/test_sweep.py",
        ("No time is left", "ended, self.left(self.rounds))", "ended)"),
    ),
    *of(
        "fedaccord/reproduce/estimate.py",
        "tests/reproduce/test_estimate.py",
        ("Second gradients cost nothing", "steps * strategy.cost.gradients", "steps"),
        ("What is done is counted again", "self.study.done(run) is None", "True"),
    ),
]


# --- running them ---------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("-k", default="", metavar="TEXT", help="those whose name or file holds it")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--all-tests", action="store_true", help="the whole fast suite for each")
    parser.add_argument("--limit", type=float, help="seconds for the tests of a mutant")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.k.lower() in f"{m.name} {m.file}".lower()]
    if options.all_tests:
        chosen = [m._replace(tests=FAST_SUITE) for m in chosen]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.file:38} {mutant.name}")
        print(f"{len(chosen)} mutants")
        return 0
    limit = options.limit or (3600.0 if options.all_tests else 300.0)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [_copy(Path(folder) / str(n)) for n in range(max(1, options.jobs))]
        return run(chosen, trees, limit)


def run(mutants: Sequence[Mutant], trees: Sequence[Path], limit: float) -> int:
    """Print a line per mutant and a summary; the exit code."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def passes(tests: str) -> bool:
        tree = free.get()
        code, output = _pytest(tree, tests, limit)
        free.put(tree)
        if code != 0:
            print(f"FAILS WITHOUT A MUTANT: pytest {tests}\n{output}", flush=True)
        return code == 0

    def attempt(mutant: Mutant) -> str:
        tree, began = free.get(), time.perf_counter()
        status = judge(mutant, tree, limit)
        free.put(tree)
        print(f"{status:16} {time.perf_counter() - began:5.1f} s  {mutant.name}", flush=True)
        return status

    with ThreadPoolExecutor(len(trees)) as pool:
        usable = [m for m in mutants if _occurrences(m, ROOT) == 1]
        if not all(list(pool.map(passes, dict.fromkeys(m.tests for m in usable)))):
            return 2
        statuses = Counter(pool.map(attempt, mutants))
    print(", ".join(f"{n} {status}" for status, n in statuses.most_common()), end="; ")
    print(f"{len(mutants)} mutants")
    return int(any(statuses[bad] for bad in (SURVIVED, NOT_APPLICABLE)))


def judge(mutant: Mutant, tree: Path, limit: float) -> str:
    """What becomes of a mutant in a copy of the tree, which is afterwards as it was."""
    found = _occurrences(mutant, tree)
    if found != 1:
        print(f"{mutant.file}: expected {mutant.old!r} exactly once, found it {found} times")
        return NOT_APPLICABLE
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code, output = _pytest(tree, mutant.tests, limit)
    finally:
        path.write_text(text, encoding="utf-8")
    if code not in OUTCOMES:
        raise RuntimeError(f"{mutant.name}: pytest ended with {code}\n{output}")
    return OUTCOMES[code]


def _occurrences(mutant: Mutant, tree: Path) -> int:
    path = tree / mutant.file
    return path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0


def _copy(tree: Path) -> Path:
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    return tree


def _pytest(tree: Path, tests: str, limit: float) -> tuple[int | None, str]:
    """The exit code of pytest in ``tree``, None past the time limit, and what it printed."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOADED)
    output = tree.with_name(f"{tree.name}.txt")
    process = forks.Process(target=_run_pytest, args=(str(tree), shlex.split(tests), str(output)))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return None, ""
    return process.exitcode, output.read_text(errors="replace")[-4000:]


def _run_pytest(tree: str, arguments: list[str], output: str) -> None:
    """In a process of its own: the tests of ``tree`` on the package of ``tree``."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    # bytecode of a file that changes within a second could be taken for that of another version
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:] = [tree, *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    import pytest

    import fedaccord

    if not Path(str(fedaccord.__file__)).is_relative_to(tree):
        print(f"expected the package of {tree}, got {fedaccord.__file__}", flush=True)
        sys.exit(ANOTHER_PACKAGE)
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))


if __name__ == "__main__":
    sys.exit(main())
