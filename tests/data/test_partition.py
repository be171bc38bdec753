"""Partitions: sizes, laws of the draws, reports, and invalid settings."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedaccord.data.partition import REPLACEMENTS, fill, matching_share, partition, report

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))
SKEWED = ("dirichlet", "pathological")


def shares(parts, labels):
    counts = report(parts, labels).counts
    return counts / counts.sum(axis=1, keepdims=True)


@st.composite
def problems(draw):
    """Labels, some classes rare or absent, and settings of a class-prior partition."""
    labels = np.array(draw(st.lists(st.sampled_from([0, 1, 1, 3, 7]), min_size=1, max_size=60)))
    settings = {
        "num_clients": draw(st.integers(1, len(labels))),
        "scheme": draw(st.sampled_from(SKEWED)),
        "alpha": draw(st.sampled_from([1e-300, 1e-6, 0.1, 0.3, 1.0, 1e6])),
        "classes_per_client": draw(st.integers(1, len(np.unique(labels)))),
        "seed": draw(st.integers(0, 2**32)),
    }
    return labels, settings


@given(problems(), st.sampled_from(REPLACEMENTS))
def test_every_client_gets_the_same_number_of_valid_indices(problem, replacement):
    labels, settings = problem
    parts = partition(labels, replacement=replacement, **settings)
    assert len(parts) == settings["num_clients"]
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) == len(labels) // settings["num_clients"]
        assert part.min() >= 0
        assert part.max() < len(labels)


@given(problems(), st.sampled_from(REPLACEMENTS))
def test_a_partition_is_a_function_of_its_arguments(problem, replacement):
    labels, settings = problem
    first = partition(labels, replacement=replacement, **settings)
    np.random.seed(1)
    again = partition(labels.astype(np.uint8), replacement=replacement, **settings)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@given(problems())
def test_none_uses_every_index_at_most_once(problem):
    labels, settings = problem
    indices = np.concatenate(partition(labels, replacement="none", **settings))
    assert len(np.unique(indices)) == len(indices)


@given(problems())
def test_cyclic_repeats_a_sample_only_once_its_class_is_exhausted(problem):
    """The numbers of clients that hold two samples of a class differ by at most one."""
    labels, settings = problem
    counts = np.bincount(
        np.concatenate(partition(labels, replacement="cyclic", **settings)), minlength=len(labels)
    )
    for k in np.unique(labels):
        assert np.ptp(counts[labels == k]) <= 1


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 100))
def test_iid_cuts_all_samples_into_equal_sizes(n, num_clients, seed):
    num_clients = min(n, num_clients)
    parts = partition(np.zeros(n, dtype=int), num_clients, "iid", seed=seed)
    sizes = [len(part) for part in parts]
    assert len(parts) == num_clients
    assert max(sizes) - min(sizes) <= 1
    assert sorted(np.concatenate(parts)) == list(range(n))


@pytest.mark.parametrize("own", [0, 20])
@pytest.mark.parametrize("scheme", ["iid", *SKEWED])
def test_another_seed_gives_another_partition(scheme, own):
    """Also if each client draws its own samples."""
    more = {"samples_per_client": own}
    parts = [np.concatenate(partition(LABELS, 10, scheme, seed=seed, **more)) for seed in range(4)]
    assert all(not np.array_equal(a, b) for a, b in pairwise(parts))


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize("scheme", SKEWED)
def test_samples_of_a_client_are_not_the_first_of_their_class(scheme, replacement):
    """Which samples of a class are handed out is random, not the order of the data."""
    settings = {"classes_per_client": 1, "replacement": replacement}
    indices = np.concatenate(partition(np.zeros(1000, dtype=int), 1, scheme, **settings))
    assert abs(np.corrcoef(indices, np.arange(1000))[0, 1]) < 0.15


# The law: the loop of the module's docstring, one slot at a time.


def fill_by_loop(class_of, priors, replacement, rng):
    num_clients, size = len(priors), len(class_of) // len(priors)
    parts = [[] for _ in priors]
    pools = {k: [j for j, c in enumerate(class_of) if c == k] for k in set(class_of)}
    for pool in pools.values():
        rng.shuffle(pool)
    rest = {k: list(pool) for k, pool in pools.items()}
    while any(len(part) < size for part in parts):
        i = rng.randrange(num_clients)
        if len(parts[i]) == size:
            continue
        prior = priors[i]
        if replacement == "none":
            remains = [float(bool(rest[k])) for k in range(len(prior))]
            masked = [p * r for p, r in zip(prior, remains, strict=True)]
            prior = masked if any(masked) else remains
        (k,) = rng.choices(range(len(prior)), prior)
        if replacement == "iid":
            parts[i].append(rng.choice(pools[k]))
            continue
        rest[k] = rest[k] or list(pools[k])
        parts[i].append(rest[k].pop())
    return parts


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_the_vectorised_form_has_the_law_of_the_loop(replacement):
    """Same frequencies of the whole outcome: class counts of all clients, samples held twice.

    Client 0 exhausts class 0 and moves on to class 1, where it competes with client 1; both may
    end in class 2. Were a second choice to wait for all first choices, client 1 would get more.
    """
    class_of = [0] * 2 + [1] * 4 + [2] * 6
    priors = [[0.6, 0.4, 0.0], [0.0, 0.8, 0.2]]

    def frequencies(draw):
        tally = {}
        for _ in range(3000):
            (a, b), draws = draw(), {}
            counts = [0] * 6
            for client, part in enumerate((a, b)):
                for j in part:
                    counts[3 * client + class_of[j]] += 1
                    draws[j] = draws.get(j, 0) + 1
            outcome = (*counts, sum(times > 1 for times in draws.values()))
            tally[outcome] = tally.get(outcome, 0) + 1
        return tally

    numpy_rng, rng = np.random.default_rng(1), random.Random(2)
    arrays = np.array(class_of), np.array(priors)
    ours = frequencies(lambda: [p.tolist() for p in fill(*arrays, replacement, numpy_rng)])
    loop = frequencies(lambda: fill_by_loop(class_of, priors, replacement, rng))
    # Two-sample chi-square: about its degrees of freedom when the laws agree.
    outcomes = ours.keys() | loop.keys()
    a, b = (np.array([tally.get(o, 0) for o in outcomes]) for tally in (ours, loop))
    chi2, freedom = ((a - b) ** 2 / (a + b)).sum(), len(outcomes) - 1
    assert freedom >= 3
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("u", [0, 1 - 2**-24], ids=["smallest", "largest"])
def test_a_class_without_mass_is_never_drawn(u):
    """Not even by the extreme values of the uniform numbers, which are never drawn in tests."""

    class Extreme(np.random.Generator):
        def random(self, size, dtype):
            return np.full(size, u, dtype=dtype)

    priors = np.tile([0.0, 0.1, 0.7, 0.2 + 1e-17, 0.0], (1000, 1))
    class_of = np.tile(np.arange(5), 1000)
    parts = fill(class_of, priors, "iid", Extreme(np.random.PCG64(0)))
    assert (class_of[np.concatenate(parts)] == (1 if u == 0 else 3)).all()


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_large_alpha_gives_equal_shares(replacement):
    labels = np.repeat(np.arange(4), 10_000)
    parts = partition(labels, 4, alpha=1e6, replacement=replacement)
    np.testing.assert_allclose(shares(parts, labels), 0.25, atol=0.03)


@pytest.mark.parametrize("replacement", ["cyclic", "iid"])
def test_small_alpha_gives_one_class_per_client(replacement):
    parts = partition(LABELS, 50, alpha=1e-6, replacement=replacement)
    assert (shares(parts, LABELS).max(axis=1) == 1).all()


def test_mean_prior_is_uniform_at_any_alpha():
    """E[prior_i] is 1/classes: over many clients all classes are wanted equally."""
    labels = np.tile(np.arange(5), 4000)
    for alpha in (1e-6, 0.05, 0.3, 10.0):
        means = shares(partition(labels, 2000, alpha=alpha, replacement="iid"), labels).mean(axis=0)
        np.testing.assert_allclose(means, 0.2, atol=5 * np.sqrt(0.2 * 0.8 / 2000))


@pytest.mark.parametrize("alpha", [1e-300, 1e-6])
def test_strict_partition_ends_when_all_clients_want_one_class(alpha):
    """Most clients' class is exhausted: they share what is left, and nothing is left over."""
    labels = np.concatenate([np.zeros(990, dtype=int), np.arange(1, 11)])
    result = report(partition(labels, 100, alpha=alpha, replacement="none"), labels)
    assert result.duplicated == 0
    assert result.unused == 0


@pytest.mark.parametrize("replacement", ["cyclic", "iid"])
def test_pathological_clients_have_their_number_of_classes_in_equal_shares(replacement):
    labels = np.repeat(np.arange(10), 2000)
    share = shares(
        partition(labels, 10, "pathological", classes_per_client=2, replacement=replacement), labels
    )
    assert ((share > 0).sum(axis=1) == 2).all()
    np.testing.assert_allclose(share[share > 0], 0.5, atol=0.06)


def test_pathological_clients_choose_among_all_classes():
    labels = np.tile(np.arange(4), 2000)
    settings = {"classes_per_client": 2, "replacement": "iid"}
    means = (shares(partition(labels, 800, "pathological", **settings), labels) > 0).mean(axis=0)
    np.testing.assert_allclose(means, 0.5, atol=5 * np.sqrt(0.25 / 800))


def test_classes_may_have_gaps():
    labels = np.array([2, 2, 9, 9, 9, 5])
    assert report(partition(labels, 3), labels).counts.sum(axis=0)[[2, 5, 9]].tolist() == [2, 1, 3]


def test_report_counts_what_is_held():
    labels = np.array([0, 0, 1, 2, 2])
    result = report([np.array([0, 0, 2]), np.array([2, 3])], labels)
    assert result.counts.tolist() == [[2, 1, 0], [0, 1, 1]]
    assert result.duplicated == 2  # sample 0, twice in one client, and sample 2, in two
    assert result.unused == 2  # samples 1 and 4
    assert report([np.array([0, 0, 0, 1, 2, 3, 4])], labels).duplicated == 1  # one, three times
    assert str(result).splitlines() == [
        "2 clients, 2 to 3 samples and 2 to 2 of 3 classes each; "
        "2 samples held more than once, 2 unused",
        "client  samples  classes  largest class",
        "     0        3        2      0 (67%)",
        "     1        2        2      1 (50%)",
    ]


def test_report_of_many_clients_stays_short():
    text = str(report(partition(LABELS, 100), LABELS))
    assert len(text.splitlines()) < 15
    assert "90 more clients" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_clients": 0}, "^num-clients: expected at least 1, got 0"),
        ({"num_clients": 1001}, "1000 samples for 1001 clients"),
        ({"scheme": "dirichlett"}, "^partition: .* got 'dirichlett' .did you mean 'dirichlet'?"),
        ({"replacement": "cycle"}, r"^replacement: .* got 'cycle' \(did you mean 'cyclic'\?\)"),
        ({"alpha": 0.0}, "dirichlet-alpha: expected above 0 and at most 1e[+]06, got 0.0"),
        ({"alpha": float("nan")}, "got nan"),
        ({"alpha": float("inf")}, "got inf"),
        ({"scheme": "pathological", "classes_per_client": 0}, "expected 1 to 10, .* got 0"),
        ({"scheme": "pathological", "classes_per_client": 11}, "^classes-per-client: .* got 11"),
        (
            {"labels": LABELS / 2},
            "^partition: expected iid, natural or file .*, got dirichlet, which",
        ),
        ({"labels": LABELS - 1}, "integers from 0"),
        (
            {"labels": LABELS[:, None], "scheme": "pathological"},
            r"^dataset: expected labels \(n,\), got \(n, 1\): flatten them$",
        ),
        (
            {"labels": np.stack([LABELS, LABELS], 1), "scheme": "pathological"},
            "^partition: expected iid, natural or file .*, got pathological, which divides by",
        ),
    ],
)
def test_errors_say_what_was_expected(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        partition(**{"labels": LABELS, "num_clients": 10} | settings)
    assert "\n" not in str(error.value)


# --- shares of the test samples -------------------------------------------------------------------


def test_a_matching_share_has_the_mixture_of_what_is_held():
    own = np.repeat([0, 2, 3], [50, 30, 20])
    labels = np.tile(np.arange(4), 100)
    share = matching_share(own, labels, 60, seed=0)
    assert len(set(share.tolist())) == len(share) == 60
    assert np.bincount(labels[share]).tolist() == [30, 0, 18, 12]
    assert share.tolist() == sorted(share.tolist())
    assert share.tolist() == matching_share(own, labels, 60, seed=0).tolist()
    assert share.tolist() != matching_share(own, labels, 60, seed=1).tolist()


@pytest.mark.parametrize(("size", "counts"), [(7, [3, 2, 2]), (1, [1]), (2, [1, 1])])
def test_a_matching_share_rounds_by_largest_remainders(size, counts):
    own, labels = np.repeat([0, 1, 2], [5, 4, 3]), np.tile(np.arange(3), 10)
    assert np.bincount(labels[matching_share(own, labels, size, seed=0)]).tolist() == counts


def test_a_matching_share_is_smaller_if_a_class_is_exhausted():
    labels = np.repeat([0, 1], [3, 50])
    assert np.bincount(labels[matching_share(np.array([0, 0, 1]), labels, 30, 0)]).tolist() == [
        3,
        10,
    ]
    assert len(matching_share(np.array([7]), labels, 5, 0)) == 5  # a class of no test sample


@pytest.mark.parametrize("seed", range(5))
def test_a_matching_share_of_few_samples_has_a_shared_class(seed):
    """The one place is that of class 0, of which there is no test sample."""
    own, labels = np.repeat([0, 1], [6, 4]), np.repeat([1, 2, 3, 4], 2)
    assert labels[matching_share(own, labels, 1, seed)].tolist() == [1]
