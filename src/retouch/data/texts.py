"""Check that examples have a target text if a reward reads one, before a model is loaded. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from retouch.config import ConfigError, RunConfig
from retouch.config.needs import data_sections
from retouch.data.base import DataError, DataSection, ItemFiles
from retouch.data.remote import pinned
from retouch.process.plain_text import some_of
from retouch.rewards.base import RewardEntry
from retouch.rewards.quotes import quoted_text, read_quotes

LISTED_BYTES = 2 << 20
"""Lists up to this size are read by `retouch check`: about 10,000 entries, in 0.2 s."""


def reading_rewards(run: RunConfig) -> list[str]:
    """Names of the rewards that compare what they read with the text of an example."""
    return [name for name, entry in run.rewards.items() if entry.reads_text()]


def scored_sections(run: RunConfig) -> dict[str, DataSection]:
    """Data sections whose samples are scored, by key."""
    sections = data_sections(run)
    scored = {name: sections[name] for name in ("data", "evaluation.data") if name in sections}
    if "evaluation.data" in scored and not run.algorithm.trains_on_rewards:
        del scored["data"]
    return scored


def target_text(item: ItemFiles) -> str | None:
    """The text of an example as the reward wire finds it: `metadata.text`, else a text in quotes in the prompt."""
    text = item.metadata.get("text")
    return text if isinstance(text, str) and text.strip() else quoted_text(item.prompt)


def has_text(item: ItemFiles) -> bool:
    """Whether an example has a target text."""
    return target_text(item) is not None


def text_warnings(item: ItemFiles, readers: Mapping[str, RewardEntry]) -> list[str]:
    """Reasons why the target text of an example may not be what its author meant, or is never read.

    Args:
        readers: the rewards that read the text, by name; empty if the run is not known.
    """
    text = target_text(item)
    warnings = list[str]()
    if text is None and readers:
        warnings.append(f"no text to read (`text`, or quotes in the prompt): rewards.{next(iter(readers))} fails")
    if text is None or text != item.metadata.get("text"):
        warnings += [f"{other} looks like a text, but is not read" for other in read_quotes(item.prompt).others]
    for name, entry in readers.items():
        if text is not None and (lacking := entry.lacking(text)):
            warnings.append(f"{_unknown(name, lacking)}: {entry.remedy_for(lacking, name)}")
    return warnings


def unknown_characters(run: RunConfig, items: Sequence[ItemFiles]) -> list[str]:
    """For every reward whose reader cannot return characters of the texts: how many texts, and which characters."""
    messages = list[str]()
    for name in reading_rewards(run):
        entry = run.rewards[name]
        found = [lacking for item in items if (text := target_text(item)) and (lacking := entry.lacking(text))]
        if found:
            characters = list(dict.fromkeys(character for lacking in found for character in lacking))
            texts = f"for the texts of {len(found)} of {len(items)} examples"
            messages.append(f"{_unknown(name, characters)}, {texts}: {entry.remedy_for(characters, name)}")
    return messages


def _unknown(name: str, characters: Sequence[str]) -> str:
    return f"the reader of rewards.{name} has no {some_of(characters)} in its dictionary"


def require_texts(run: RunConfig, name: str, path: str, items: Sequence[ItemFiles]) -> None:
    """Check that a reward that reads a text finds one in at least one example of a scored section.

    Args:
        name, path: of the section, for the message.

    Raises:
        ConfigError: no example has a text.
    """
    readers = reading_rewards(run)
    if not readers or not items or any(map(has_text, items)):
        return
    masked = any(item.mask_path for item in items)
    fitting = "{clip: {url: auto, crop: mask_box}, seam: {weight: 0.3}}" if masked else "{clip: {url: auto}}"
    others = "mask_composite, hpsv2 and vlm" if masked else "pickscore, hpsv2 and vlm"
    weightless = '"rewards={preservation: {}}", which needs no weights, ' if masked else ""
    own = f"rewards.{readers[0]}.gate=0, or " if "gate" in run.rewards[readers[0]].own_options() else ""
    raise ConfigError(
        f"rewards.{readers[0]}: given, but none of the {len(items)} examples of {name} ({path}) has a text to read: no "
        f"`text`, and nothing in quotes in the prompt; set {own}rewards that judge a description, like "
        f'"rewards={fitting}" ({others} fit, too), {weightless}or give the examples a text'
    )


def require_texts_of(run: RunConfig, loaded: Mapping[str, Sequence[ItemFiles]]) -> None:
    """`require_texts` for every scored section that was loaded.

    Args:
        loaded: usable items by section.
    """
    for name, section in scored_sections(run).items():
        if name in loaded:
            require_texts(run, name, section.path, loaded[name])


def check_texts(run: RunConfig) -> None:
    """`require_texts` for sections with a short list on this machine; training checks the other sections, and downloads
    data at a commit."""
    for name, section in scored_sections(run).items() if reading_rewards(run) else ():
        listing = None if section.has_texts or pinned(section.path) else section.listing()
        if listing is None or not listing.is_file() or listing.stat().st_size > LISTED_BYTES:
            continue
        try:
            listed = section.items()
        except DataError:  # `retouch doctor` and training report it
            continue
        require_texts(run, name, section.path, [item for item in listed if isinstance(item, ItemFiles)])
