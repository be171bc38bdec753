"""scikit-learn's digits, which need no files of their own."""

from pathlib import Path

import numpy as np

from fedaccord.data.kind import Arrays, Kind, ReadOptions, Source, image_facts


def find(root: Path, reading: ReadOptions) -> Source:
    return Source((), decode)


def decode() -> Arrays:
    """1,797 images of 8x8 pixels; one in five of each class is for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = np.rint(digits.images * 255 / 16).astype(np.uint8)  # scikit-learn's levels are 0..16
    y = digits.target
    test = np.zeros(len(y), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(y == label)[2::5]] = True
    return Arrays(x[~test], y[~test], x[test], y[test], 10, tuple("0123456789"))


DIGITS = Kind(find=find, origin="package", facts=image_facts((1, 8, 8), 10, 1438, 359))
