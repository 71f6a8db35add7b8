"""Whether examples to evaluate on are trained on: by the bytes of their files, whatever these are called."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path

from retouch.data.dataset import Dataset, ItemFiles


def trained_on(evaluation: Dataset, *training: Dataset) -> list[ItemFiles]:
    """Items of `evaluation` whose source or target is a picture of the training data; of text to image, those whose
    prompt is. Only files as long as one of the other side are read."""
    asked = {item.id: pictures_of(item) for item in evaluation.items}
    sizes = {path.stat().st_size for paths in asked.values() for path in paths}
    known: defaultdict[int, set[Path]] = defaultdict(set)
    for path in {p.resolve() for data in training for item in data.items for p in pictures_of(item)}:
        known[path.stat().st_size].add(path)
    digests = {digest(path) for length in sizes & known.keys() for path in known[length]}
    prompts = {item.prompt for data in training for item in data.items if not pictures_of(item)}

    def is_known(item: ItemFiles) -> bool:
        paths = asked[item.id]
        if not paths:
            return item.prompt in prompts
        return any(path.stat().st_size in known and digest(path) in digests for path in paths)

    return [item for item in evaluation.items if is_known(item)]


def pictures_of(item: ItemFiles) -> list[Path]:
    """What a model may learn by heart: not masks and references, which many items may share."""
    return [p for p in (item.source_path, item.target_path, item.win_path, item.lose_path) if p is not None]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
