"""Whether a run trained on the examples that it is evaluated on."""

from __future__ import annotations

import logging

from retouch.config import RunConfig
from retouch.data.base import DataError, DataSection, ItemFiles
from retouch.data.dataset import Dataset
from retouch.data.identity import images_of, paths, trained_on
from retouch.data.remote import cached_path
from retouch.files.disk import is_file

logger = logging.getLogger(__name__)


def seen_in_training(config: RunConfig, dataset: Dataset, option: str) -> list[ItemFiles]:
    """The items that the run trained on, with a warning that counts them; and a warning where that is unknown.

    Args:
        option: the option that named the data, for the warnings.
    """
    training = [
        Dataset(section, _items_here(config, key, section, option))
        for key, section in (("data", config.data), ("warmup_data", config.warmup_data))
        if section is not None
    ]
    edits = config.algorithm.trains_text_encoder
    seen = trained_on(dataset, *training, with_prompt=edits)
    if seen:
        logger.warning(
            "%s: %s trained on %d of %d examples (the first: %s): its data or warmup_data have the same image%s "
            "(or, without images, the same prompt); the scores are not held-out scores; split the data with "
            "`retouch data split`",
            option,
            config.name,
            len(seen),
            len(dataset),
            seen[0].where,
            " with the same prompt" if edits else "",
        )
    return seen


def _items_here(config: RunConfig, key: str, section: DataSection, option: str) -> list[ItemFiles]:
    """The items of a section whose images are on this machine; nothing is downloaded for a warning."""
    here = section.hub_id is None and all(cached_path(path) is not None for path in section.paths)
    try:
        listed = [item for item in section.items() if isinstance(item, ItemFiles)] if here else []
    except DataError:
        listed = []
    items = [item for item in listed if all(is_file(path) for path in paths(images_of(item)))]
    if not items or len(listed) - len(items) > section.max_bad_items:  # training itself would have refused as many
        some = f" of {len(listed) - len(items)} of {len(listed)} items" if items else ""
        logger.warning(
            "%s: it is unknown whether %s trained on these examples: %s.path has no images%s on this machine: %s",
            option,
            config.name,
            key,
            some,
            section.path,
        )
    return items
