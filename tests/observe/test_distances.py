"""Distances of sets of features: closed forms, and a second derivation of each. numpy alone."""

from __future__ import annotations

import numpy as np
import pytest

from retouch.observe.distances import cmmd, fid, interval, kid


def sample(n: int, d: int = 6, seed: int = 0, shift: float = 0.0, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(shift, scale, (n, d))


def test_fid_of_shifted_and_scaled_features_has_a_closed_form() -> None:
    """The same features moved by s and stretched by c: |s|² + (c - 1)² Tr S, exactly."""
    a = sample(200)
    shift = np.arange(6.0)
    assert fid(a, a) == pytest.approx(0, abs=1e-9)
    assert fid(a, a + shift) == pytest.approx(shift @ shift)
    centred = a - a.mean(0)
    assert fid(centred, 3 * centred) == pytest.approx(4 * np.trace(np.cov(a, rowvar=False)))


@pytest.mark.parametrize("sizes", [(300, 250), (5, 9)])
def test_fid_agrees_with_the_root_of_the_product(sizes: tuple[int, int]) -> None:
    """By eigenvalues of S_a S_b, also with fewer images than features; and by scipy's matrix root."""
    a, b = sample(sizes[0]), sample(sizes[1], seed=1, shift=0.3, scale=1.5) @ np.triu(np.ones((6, 6)))
    s_a, s_b = (np.cov(x, rowvar=False) for x in (a, b))
    gap = a.mean(0) - b.mean(0)
    roots = np.sqrt(np.maximum(np.linalg.eigvals(s_a @ s_b).real, 0)).sum()
    assert fid(a, b) == pytest.approx(gap @ gap + np.trace(s_a) + np.trace(s_b) - 2 * roots, rel=1e-6)
    assert fid(a, b) == pytest.approx(fid(b, a))
    if min(sizes) > 6:
        linalg = pytest.importorskip("scipy.linalg")
        root = linalg.sqrtm(s_a @ s_b).real
        assert fid(a, b) == pytest.approx(gap @ gap + np.trace(s_a + s_b - 2 * root), rel=1e-9)


def test_fid_of_one_distribution_falls_with_the_number_of_images() -> None:
    """The bias that the warning is about."""
    few, many = (fid(sample(n, 32, 1), sample(n, 32, 2)) for n in (64, 1024))
    assert few > 10 * many > 0


def naive_mmd(a: np.ndarray, b: np.ndarray, kernel: object, skip_equal: bool) -> float:
    """Sums over pairs, one by one."""

    def average(x: np.ndarray, y: np.ndarray, same: bool) -> float:
        values = [
            kernel(p, q)  # type: ignore[operator]
            for i, p in enumerate(x)
            for j, q in enumerate(y)
            if not (same and skip_equal and i == j)
        ]
        return sum(values) / len(values)

    return average(a, a, True) + average(b, b, True) - 2 * average(a, b, False)


def test_kid_is_the_unbiased_mmd_of_the_cubic_kernel() -> None:
    a, b = sample(12), sample(9, seed=1, shift=0.5)
    assert kid(a, b) == pytest.approx(1000 * naive_mmd(a, b, lambda p, q: (p @ q / 6 + 1) ** 3, True))
    apart = [kid(sample(40, seed=2 * i), sample(40, seed=2 * i + 1)) for i in range(60)]
    assert abs(np.mean(apart)) < 3 * np.std(apart) / 60**0.5  # zero on average: unbiased


def test_cmmd_is_the_mmd_of_directions_with_a_gaussian_of_10() -> None:
    a, b = sample(12), sample(9, seed=1, shift=0.5)

    def kernel(p: np.ndarray, q: np.ndarray) -> float:
        return float(np.exp(-np.sum((p / np.linalg.norm(p) - q / np.linalg.norm(q)) ** 2) / 200))

    assert cmmd(a, b) == pytest.approx(1000 * naive_mmd(a, b, kernel, False))
    assert cmmd(a, 7 * a) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("distance", [fid, kid, cmmd])
def test_the_interval_lies_around_the_value_and_shrinks(distance: object) -> None:
    widths: list[float] = []
    for n in (30, 300):
        a, b = sample(n, 4), sample(n, 4, seed=1, shift=1.0)
        low, high = interval(distance, a, b, 40)  # type: ignore[arg-type]
        assert low < distance(a, b) < high  # type: ignore[operator]
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


# --- images of one example ---


def test_images_of_an_example_are_one_of_the_interval() -> None:
    """CMMD, an average over all pairs, does not change where each image stands four times; nor may its interval, which
    else would have half the width."""
    a, b = sample(30, 4), sample(30, 4, seed=1, shift=1.0)
    fourfold = np.repeat(a, 4, 0)
    assert cmmd(fourfold, b) == pytest.approx(cmmd(a, b))
    expected = interval(cmmd, a, b, 60)
    assert interval(cmmd, fourfold, b, 60, np.repeat(np.arange(30), 4).tolist()) == pytest.approx(expected)
    independent = interval(cmmd, fourfold, b, 60)
    assert expected and independent and np.ptp(independent) < 0.9 * np.ptp(expected)


def test_a_real_image_is_drawn_with_the_outputs_of_its_example() -> None:
    """Outputs that are their sources: the distance is 0 in every sample, and so is its interval; by themselves the two
    sets would be other samples of one distribution."""
    a, items = sample(30, 4), list(range(30))
    assert interval(cmmd, a, a, 40, items, items) == pytest.approx([0, 0], abs=1e-9)
    low, high = interval(cmmd, a, a, 40) or (0.0, 0.0)
    assert high - low > 1e-3


def test_an_interval_needs_two_examples() -> None:
    assert interval(cmmd, sample(8, 4), sample(9, 4), 40, [0] * 8) is None
    assert interval(cmmd, sample(8, 4), sample(2, 4), 40, [0, 1] * 4, [0, 1]) is not None


@pytest.mark.parametrize("images", [1, 4])
def test_intervals_cover_the_distance_whatever_the_images_of_an_example(images: int) -> None:
    """The difference of the means of dependent images and of a fixed set: 95 % of the intervals cover it, to within
    three errors of 60 repetitions; with images for examples fewer than 80 % do."""

    def gap(a: np.ndarray, b: np.ndarray) -> float:
        return float(a.mean() - b.mean())

    fixed, covered, naive = np.zeros((2, 1)), 0, 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        shared = random.normal(0, 1, (20, 1, 1)) + random.normal(0, 0.3, (20, images, 1))
        features, examples = shared.reshape(-1, 1), np.repeat(np.arange(20), images).tolist()
        low, high = interval(gap, features, fixed, 80, examples) or (0.0, 0.0)
        covered += low <= 0 <= high
        low, high = interval(gap, features, fixed, 80) or (0.0, 0.0)
        naive += low <= 0 <= high
    assert covered / 60 >= 0.85
    assert images == 1 or naive / 60 < 0.8
