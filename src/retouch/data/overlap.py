"""Whether examples to evaluate on are trained on: by the bytes of their files, whatever these are called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from retouch.data.dataset import Dataset, ItemFiles
from retouch.data.identity import digest
from retouch.imaging import PackedPicture


def trained_on(evaluation: Dataset, *training: Dataset) -> list[ItemFiles]:
    """Items of `evaluation` whose source or target is a picture of the training data; of text to image, those whose
    prompt is. Only files as long as one of the other side are read; pictures inside tables know their digests, and are
    compared with such pictures alone."""
    asked = {item.id: pictures_of(item) for item in evaluation.items}
    sizes = {path.stat().st_size for pictures in asked.values() for path in files(pictures)}
    known: defaultdict[int, set[Path]] = defaultdict(set)
    seen = [picture for data in training for item in data.items for picture in pictures_of(item)]
    for path in {p.resolve() for p in files(seen)}:
        known[path.stat().st_size].add(path)
    digests = {digest(path) for length in sizes & known.keys() for path in known[length]}
    packed = {picture.digest for picture in seen if isinstance(picture, PackedPicture)}
    prompts = {item.prompt for data in training for item in data.items if not pictures_of(item)}

    def is_known(picture: Path | PackedPicture) -> bool:
        if isinstance(picture, PackedPicture):
            return picture.digest in packed
        return picture.stat().st_size in known and digest(picture) in digests

    return [
        item
        for item in evaluation.items
        if (any(map(is_known, asked[item.id])) if asked[item.id] else item.prompt in prompts)
    ]


def pictures_of(item: ItemFiles) -> list[Path | PackedPicture]:
    """What a model may learn by heart: not masks and references, which many items may share."""
    return [p for p in (item.source_path, item.target_path, item.win_path, item.lose_path) if p is not None]


def files(pictures: Iterable[Path | PackedPicture]) -> list[Path]:
    return [picture for picture in pictures if isinstance(picture, Path)]
