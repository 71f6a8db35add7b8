"""Distances between two sets of images by their feature vectors. numpy alone, float64.

FID (arXiv 1706.08500) and KID (arXiv 1801.01401) are defined on any features, but values of two extractors do not
compare. FID is biased: two samples of one distribution with 256 features have 227 at 128 images, 33 at 1,024 and 8 at
4,096; compare equal numbers only. CMMD (arXiv 2401.09603) is usable from a few hundred images on.

Legend: N, M images of the two sets; D features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from retouch.observe.statistics import bootstrap_percentiles

Features = NDArray[np.float64]
"""[N, D]"""

FEWEST_FOR_FID = 2048
"""Images of each set below which FID is mostly bias."""

_SIGMA = 10.0


def fid(a: Features, b: Features) -> float:
    """|m_a - m_b|² + Tr S_a + Tr S_b - 2 Tr (S_a S_b)^½, with S over N - 1.

    With S_a = R_aᵀ R_a of a QR decomposition, the last trace is the nuclear norm of R_a R_bᵀ: no root of a matrix, and
    no complex numbers by rounding.
    """
    gap = a.mean(0) - b.mean(0)
    root_a, root_b = (_root(x) for x in (a, b))
    shared = np.linalg.svd(root_a @ root_b.T, compute_uv=False).sum()
    return float(gap @ gap + (root_a**2).sum() + (root_b**2).sum() - 2 * shared)


def kid(a: Features, b: Features) -> float:
    """1000 x the unbiased estimate of MMD² with the kernel (x·y / D + 1)³, over all pairs."""
    return 1000 * _mmd(*((x @ y.T / x.shape[1] + 1) ** 3 for x, y in ((a, a), (b, b), (a, b))), unbiased=True)


def cmmd(a: Features, b: Features) -> float:
    """1000 x MMD² of features of unit length with a Gaussian kernel of sigma 10, over all pairs, equal ones too (the
    published estimate, which is biased upward)."""
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return 1000 * _mmd(*(_gaussian(x, y) for x, y in ((a, a), (b, b), (a, b))), unbiased=False)


DISTANCES: dict[str, Callable[[Features, Features], float]] = {"fid": fid, "kid": kid, "cmmd": cmmd}


def interval(
    distance: Callable[[Features, Features], float],
    a: Features,
    b: Features,
    draws: int,
    examples_a: Sequence[Hashable] | None = None,
    examples_b: Sequence[Hashable] | None = None,
) -> list[float] | None:
    """95 % interval of a distance as [low, high]: the spread of bootstrap samples around their mean, laid around the
    value; None of fewer than two examples. Their own level is not used: repeated images raise all three distances.

    The images of an example, those of `b` among them, are not independent and are sampled together; images of `b` of
    other examples are sampled apart.

    Args:
        examples_a, examples_b: of each image; None: each is of an example of its own.
    """
    rows_a = _rows_by_example(range(len(a)) if examples_a is None else examples_a)
    rows_b = _rows_by_example(range(-len(b), 0) if examples_b is None else examples_b)
    together, alone = list(rows_a), [example for example in rows_b if example not in rows_a]
    if len(together) < 2:
        return None
    source, drawn = np.random.default_rng(0), list[float]()
    for _ in range(draws):
        chosen = [together[i] for i in source.integers(0, len(together), len(together))]
        others = [alone[i] for i in source.integers(0, len(alone), len(alone))] if alone else []
        of_b = [row for example in (*chosen, *others) for row in rows_b.get(example, ())]
        if len(of_b) > 1:  # else most examples have no image in it
            drawn.append(distance(a[[row for example in chosen for row in rows_a[example]]], b[of_b]))
    if len(drawn) <= draws / 2:
        return None
    spread = np.percentile(np.array(drawn) - np.mean(drawn), bootstrap_percentiles(len(together)))
    return [float(distance(a, b) + low_or_high) for low_or_high in spread]


def _rows_by_example(examples: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    found = dict[Hashable, list[int]]()
    for row, example in enumerate(examples):
        found.setdefault(example, []).append(row)
    return found


def _root(x: Features) -> Features:
    """R [min(N, D), D] with Rᵀ R = covariance."""
    return np.asarray(np.linalg.qr((x - x.mean(0)) / np.sqrt(len(x) - 1), mode="r"))


def _gaussian(x: Features, y: Features) -> Features:
    squared = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    return np.exp(-np.maximum(squared, 0) / (2 * _SIGMA**2))


def _mmd(aa: Features, bb: Features, ab: Features, *, unbiased: bool) -> float:
    """MMD² from kernel matrices [N, N], [M, M], [N, M]."""
    if not unbiased:
        return float(aa.mean() + bb.mean() - 2 * ab.mean())
    apart = [(k.sum() - np.trace(k)) / (len(k) * (len(k) - 1)) for k in (aa, bb)]
    return float(sum(apart) - 2 * ab.mean())
