"""One reward on one image, or on labelled images: `retouch reward score` and `retouch reward probe`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from retouch.errors import ConfigError
from retouch.files import plain_json
from retouch.imaging.masks import read_mask
from retouch.imaging.reading import open_image, to_rgb
from retouch.rewards.addresses import reward_token
from retouch.rewards.client.client import RewardClient, percentile
from retouch.rewards.client.endpoints import resolve_urls
from retouch.rewards.client.servers import ServerStatus, readiness
from retouch.rewards.devices import numbered, require
from retouch.rewards.protocol import CheckedScorer, RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.types import Failure, Outcome, Score

Ask = Callable[[Sequence[RewardItem]], list[Outcome]]
"""Scores items, in this process or on a server."""

_ANSWER_S = 5.0
"""Timeout for an address that does not even refuse a connection."""

_LABELLED = {"image", "prompt", "mask", "source", "reference", "text", "label"}


def item_of(
    image: Path, prompt: str, mask: Path | None = None, source: Path | None = None, reference: Path | None = None
) -> RewardItem:
    """An item from files.

    Raises:
        ImageProblem: an unusable image or mask.
    """
    return RewardItem(
        id=0,
        prompt=prompt,
        image=np.asarray(to_rgb(open_image(image))),
        mask=np.asarray(read_mask(open_image(mask), str(mask)).mask) if mask else None,
        source=np.asarray(to_rgb(open_image(source))) if source else None,
        reference=np.asarray(to_rgb(open_image(reference))) if reference else None,
    )


@contextmanager
def asking(
    reward: str, url: str | None, wait_s: float, options: Mapping[str, Any] | None = None, device: str = "cpu"
) -> Iterator[Ask]:
    """A function that scores items by a reward, loaded in this process or on a server.

    Args:
        options: of the scorer; `scorer` is its name if `reward` is another.
        device: of the scorer, as torch names it.

    Raises:
        ConfigError: no such scorer, option or server.
    """
    if url is None:
        given = dict(options or {})
        scorer = make_scorer(str(given.pop("scorer", reward)), given)
        require([numbered(device)], f"--device: given {device!r}")
        scorer.load(device)
        yield CheckedScorer(scorer).score
        return
    if options or device != "cpu":
        given = "--options" if options else "--device"
        raise ConfigError(f"{given}: given beside --url, but the server has its own; start it with them, or drop --url")
    urls = resolve_urls(url, reward, "--url")
    with RewardClient(urls, [reward], token=reward_token()) as client:
        if problems := client.wait_ready(wait_s, every_server=False) if wait_s else _unusable(urls):
            raise ConfigError(
                f"--url: {'; '.join(problems)}; start a server with `retouch reward serve {reward}`, or give --wait "
                "SECONDS for one that is starting"
            )
        yield lambda items: client.score(items)[reward]


def _unusable(urls: Sequence[str]) -> list[str]:
    """Problems of the servers if none of them can become ready; each is asked once."""
    asked = {url: _asked(url) for url in urls}
    if not all(told.problem for told in asked.values()):
        return []
    failed = " (correct that first)"
    return [f"{url}: {told.problem}{failed * (told.status == 'failed')}" for url, told in asked.items()]


def _asked(url: str) -> ServerStatus:
    """The status of a server, with the problem of one that does not reply."""
    try:
        return readiness(url, _ANSWER_S)
    except (httpx.RequestError, TimeoutError) as error:
        return ServerStatus("unknown", f"{type(error).__name__} {error}".strip())


def probe(ask: Ask, item: RewardItem, repeats: int, batch: int) -> dict[str, Any]:
    """Measure a scorer with one image.

    Args:
        repeats: number of times that it is scored alone.
        batch: variants of it (shifted sideways) that are scored alone and then together.

    Returns:
        `value`; `seconds` (p50 and p95 of one image, and of one image in a batch); `repeatability` (standard deviation,
        n - 1, and largest difference: the value for `min_group_std`); `batch_difference` (the largest between
        alone and together); `failures`.
    """
    alone, seconds = [], list[float]()
    for _ in range(repeats):
        started = time.monotonic()
        alone += ask([item])
        seconds.append(time.monotonic() - started)
    # Equal images would share a reply, or a cache of the scorer. Variants of one image are scored alone first: the
    # batch differs from them by batching alone.
    variants = [
        replace(item, id=i, image=np.ascontiguousarray(np.roll(item.image, i, axis=1))) for i in range(max(1, batch))
    ]
    single = [outcome for one in variants for outcome in ask([one])]
    started = time.monotonic()
    together = ask(variants)
    each = (time.monotonic() - started) / len(variants)
    values = [outcome.value for outcome in alone if isinstance(outcome, Score)]
    apart = [
        abs(a.value - b.value)
        for a, b in zip(single, together, strict=True)
        if isinstance(a, Score) and isinstance(b, Score)
    ]
    failures = [outcome for outcome in (*alone, *single, *together) if isinstance(outcome, Failure)]
    return {
        "value": values[0] if values else None,
        "seconds": {"p50": percentile(seconds, 0.5), "p95": percentile(seconds, 0.95), "in_a_batch": each},
        "repeatability": {
            "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            "largest_difference": max(values) - min(values) if values else None,
        },
        "batch_difference": max(apart, default=None),
        "failures": len(failures),
        **({"first_failure": f"{failures[0].code}: {failures[0].message}"} if failures else {}),
    }


def agreement(ask: Ask, labelled: Sequence[tuple[RewardItem, float]], batch: int) -> dict[str, Any]:
    """Agreement of scores with labels: Spearman's rank correlation, and the fraction of the pairs with different labels
    that the scorer orders correctly (a tie counts half). None without anything to compare."""
    outcomes: list[Outcome] = []
    items = [replace(item, id=i) for i, (item, _) in enumerate(labelled)]
    for start in range(0, len(items), batch):
        outcomes += ask(items[start : start + batch])
    pairs = [(o.value, label) for o, (_, label) in zip(outcomes, labelled, strict=True) if isinstance(o, Score)]
    scores, labels = [a for a, _ in pairs], [b for _, b in pairs]
    return {
        "pictures": len(labelled),
        "failures": len(labelled) - len(pairs),
        "spearman": spearman(scores, labels),
        "pairs_in_order": pairs_in_order(scores, labels),
    }


def read_labels(path: Path) -> list[tuple[RewardItem, float]]:
    """Items and labels of a JSONL file: {"image", "prompt", "label", and optionally "mask", "source", "reference",
    "text"}; paths are relative to the file.

    Raises:
        ConfigError: an invalid line.
    """
    found: list[tuple[RewardItem, float]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--labels: given {str(path)!r}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--labels: {path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = plain_json.loads(line, finite=True)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict) or not {"image", "prompt", "label"} <= row.keys() <= _LABELLED:
            raise ConfigError(
                f"{where}: a line has image, prompt and label, and may have mask, source, reference, text"
            )
        # A table that was exported to JSONL writes null where a row has no mask or text, which is read as no key. For
        # an image and a prompt, which are required, null is an error.
        absent = {n: row[n] for n in sorted(_LABELLED - {"label"}) if n in row and not isinstance(row[n], str)}
        wrong = [n for n, value in absent.items() if value is not None or n in ("image", "prompt")]
        if wrong:
            raise ConfigError(f"{where}: {wrong[0]}: given {row[wrong[0]]!r}; it must be a string")
        label = row["label"]
        # A bool is an int in Python: without the first test `true` would be the label 1.
        if isinstance(label, bool) or not isinstance(label, int | float) or not math.isfinite(label):
            raise ConfigError(f"{where}: label: given {label!r}; it must be a number, not NaN or Inf")
        images = {n: path.parent / row[n] if row.get(n) else None for n in ("mask", "source", "reference")}
        item = item_of(path.parent / row["image"], row["prompt"], **images)
        found.append((replace(item, metadata={"text": row["text"]} if "text" in row else {}), float(label)))
    if len(found) < 2:
        raise ConfigError(f"--labels: {path} has {len(found)} images; agreement needs two or more")
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's correlation of the ranks, ties averaged; None if one side is constant."""
    first, second = _ranks(a), _ranks(b)
    if len(a) < 2 or first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def pairs_in_order(scores: Sequence[float], labels: Sequence[float]) -> float | None:
    """Fraction of the pairs of different labels whose scores are in the same order; equal scores count half."""
    points = [
        0.5 if scores[i] == scores[j] else float((scores[i] > scores[j]) == (labels[i] > labels[j]))
        for i in range(len(scores))
        for j in range(i)
        if labels[i] != labels[j]
    ]
    return sum(points) / len(points) if points else None


def _ranks(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    column = np.asarray(values, np.float64)
    return np.asarray([(column < v).sum() + ((column == v).sum() - 1) / 2 for v in column], np.float64)
