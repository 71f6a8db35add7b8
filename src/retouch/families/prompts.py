"""How much of the prompts of a run its text encoders read. Tokens are counted by the model's own tokenizers, as the
encoders call them; no weights are loaded, and nothing here imports torch before prompts are counted."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.config import ConfigError, RunConfig
from retouch.data.base import DataError, DataSection, ItemError, ItemFiles
from retouch.data.buckets import Shape
from retouch.data.dataset import all_embedded
from retouch.data.item import shape_of
from retouch.data.texts import reading_rewards
from retouch.errors import ImageProblem, shown
from retouch.files.model_files import ModelFilesError, component_path
from retouch.imaging.lines import parse_lines
from retouch.process.plain_text import some_of
from retouch.rewards.protocol import quoted_text

if TYPE_CHECKING:
    from retouch.families.text import PromptReader

logger = logging.getLogger(__name__)

Readers = Mapping[str, "PromptReader"]
"""Text encoders by name."""

Asked = tuple[str, tuple[int, ...]]
"""A prompt, or its start, and the tokens of each image that is read with it."""

_SLACK = 4
"""Tokens that a prompt may take beside one for each of its characters, and those of the empty prompt."""

_AT_ONCE = 1000
"""Prompts that a tokenizer gets in one call."""


@dataclass(frozen=True)
class PromptCheck:
    """Counts the tokens of prompts; of a data section for `retouch.data.dataset.load_dataset`.

    Attributes:
        local: read only files that are on this machine; without them prompts are not counted.
    """

    run: RunConfig
    local: bool = False

    def __call__(self, section: DataSection, items: Sequence[ItemFiles]) -> tuple[list[str], dict[int, ItemError]]:
        """Warnings about prompts that are cut, and by its position each item of whose prompt no text encoder reads the
        target text, or anything.

        Without tokenizers nothing is counted: a run does without them if it has stored embeddings, and else loading the
        model reports them."""
        try:
            readers = self._readers(embedded=all_embedded(items))
        except (ModelFilesError, ConfigError, ImportError, NotImplementedError) as error:
            reason = "that needs the train extra" if isinstance(error, ImportError) else str(error)
            return ([f"prompts are not counted: {reason}"] if self.local else []), {}
        cut = {name: self._cut(reader, section, items) for name, reader in readers.items()}
        by_all = set[int].intersection(*map(set, cut.values())) if cut else set[int]()
        lost = self._lost(readers, section, {p: items[p] for p in sorted(by_all)})
        warnings = [self._warning(readers, name, cut, items) for name in readers if cut[name]]
        return [*warnings, *self._unknown(readers, items)], lost

    def fixed(self) -> list[str]:
        """A warning about each prompt of the run file that is cut."""
        items = [ItemFiles(0, prompt) for prompt in self.run.model.fixed_prompts]
        warnings, _ = self(self.run.data, items)
        return [f"model.negative_prompt: {warning}" for warning in warnings]

    def _readers(self, *, embedded: bool) -> Readers:
        """Raises: ModelFilesError, ConfigError, ImportError, NotImplementedError: as `FamilyModel.prompt_readers`."""
        if getattr(self.run.algorithm, "conditioning", None) == "rewrite_text":
            return {}  # the images are conditioned on completions alone, and the policy reads whole prompts
        model = self.run.model
        path = component_path(model.path, model.family)
        if self.local and not Path(path).is_dir():
            path = _downloaded(path)
        return _readers_of(model.family, model.model_dump_json(), path, embedded)

    def _images(self, section: DataSection, item: ItemFiles, shape: Shape) -> tuple[int, ...]:
        """Tokens of each image that a text encoder reads with the prompt of an item whose example has a shape; the
        edited one has the strip of its reference above it."""
        strip = section.image_options.reference_strip or 0
        edited = self.run.model.vision_tokens((shape[0] + strip, shape[1]))
        more = (self.run.model.vision_tokens(shape),) * len(item.more_paths)
        return (edited, *more) if edited and item.source_path is not None else ()

    def _largest(self, section: DataSection) -> Shape:
        """The shape of a section whose images take the most tokens."""
        return max(section.sizes, key=self.run.model.vision_tokens)

    def _own_images(self, section: DataSection, item: ItemFiles) -> tuple[int, ...]:
        """`_images` of the item's own shape, which its file decides; of the largest one if the file is gone."""
        most = self._images(section, item, self._largest(section))
        with suppress(ImageProblem):
            return self._images(section, item, shape_of(item, section)) if most else ()
        return most

    def _cut(self, reader: PromptReader, section: DataSection, items: Sequence[ItemFiles]) -> dict[int, int]:
        """Position -> tokens, of the prompts that a text encoder does not read whole."""
        least, asked = lru_cache(maxsize=None)(partial(reader.count, "")), dict[int, Asked]()
        largest = self._largest(section)
        for position, item in enumerate(items):
            if item.embedding_path is not None and reader.name == self.run.model.spec.embedded_encoder:
                continue  # a file has its output
            # a tokenizer makes at most one token of an ASCII character: most prompts are not tokenized
            if item.prompt.isascii():
                most = len(item.prompt) + least(self._images(section, item, largest)) + _SLACK
                if most <= reader.length:
                    continue
            asked[position] = item.prompt, self._own_images(section, item)
        tokens = _counted(reader, asked.values(), closed=True)
        return {position: tokens[one] for position, one in asked.items() if tokens[one] > reader.length}

    def _lost(self, readers: Readers, section: DataSection, items: Mapping[int, ItemFiles]) -> dict[int, ItemError]:
        """By its position, the problem of each item whose prompt every text encoder cuts before the end of its target
        text, or, without one, before everything."""
        # without such a reward, quotes are a part of the description: a run that began before them keeps its items
        quoted = bool(reading_rewards(self.run))
        texts, asked = dict[int, str | None](), dict[int, Asked]()
        for position, item in items.items():
            if item.embedding_path is None:
                texts[position], end = _end_of_text(item, quoted=quoted)
                asked[position] = item.prompt[:end], self._own_images(section, item)
        ends = {name: _counted(reader, asked.values(), closed=False) for name, reader in readers.items()}
        return {
            position: self._problem(readers, items[position], texts[position], {name: ends[name][one] for name in ends})
            for position, one in asked.items()
            if all(ends[name][one] > reader.length for name, reader in readers.items())
        }

    def _problem(self, readers: Readers, item: ItemFiles, text: str | None, ends: Mapping[str, int]) -> ItemError:
        """Why an item is lost.

        Args:
            text: its target text; None without one.
            ends: tokens up to the end of the text, or of the first character of the prompt, by text encoder.
        """
        what = "the prompt" if text is None else f"the text {shown(text)} in the prompt"
        where = ", and at ".join(f"token {ends[name]} of {name}, which reads {r.length}" for name, r in readers.items())
        remedy = "shorten the prompt" if text is None else "put it nearer to the start of the prompt"
        longer = any(map(self._can_be_longer, readers.values()))
        also = ", or raise model.max_sequence_length" if longer else ""
        verb = "begins" if text is None else "ends"
        return ItemError(item.where, f"no text encoder reads {what}: it {verb} at {where}; {remedy}{also}")

    def _warning(
        self, readers: Readers, name: str, cut: Mapping[str, Mapping[int, int]], items: Sequence[ItemFiles]
    ) -> str:
        """One line on the prompts that a text encoder cuts, with the longest."""
        longest = max(cut[name], key=cut[name].__getitem__)
        whole = [other for other in readers if not cut[other].keys() & cut[name].keys()]
        if whole:
            remedy = f"{' and '.join(whole)} reads them whole"
        elif self._can_be_longer(readers[name]):
            remedy = "shorten them, or raise model.max_sequence_length"
        else:
            remedy = "shorten them"
        return (
            f"{len(cut[name])} of {len(items)} prompts are longer than the {readers[name].length} tokens that {name} "
            f"reads, and are cut; the longest takes {cut[name][longest]} ({items[longest].where}: "
            f"{shown(items[longest].prompt)}); {remedy}"
        )

    def _unknown(self, readers: Readers, items: Sequence[ItemFiles]) -> Iterator[str]:
        """A warning for each text encoder that has no tokens for characters of the prompts."""
        prompts = [item.prompt for item in items if item.embedding_path is None]
        characters = rare_characters(prompts)
        for name, reader in readers.items():
            unknown = reader.unknown(characters)
            if count := sum(not set(unknown).isdisjoint(prompt) for prompt in prompts):
                yield (
                    f"{count} of {len(items)} prompts have characters that {name} has no tokens for, and reads as one "
                    f"unknown token: {some_of(unknown)}; write the prompts without them, or use a model whose text "
                    "encoder reads bytes, such as qwen_image or z_image"
                )

    def _can_be_longer(self, reader: PromptReader) -> bool:
        """Whether the run file sets the limit of a text encoder, below the largest that it allows."""
        fields: Mapping[str, Any] = type(self.run.model).model_fields
        if reader.fixed or "max_sequence_length" not in fields:
            return False
        most = next((m.le for m in fields["max_sequence_length"].metadata if hasattr(m, "le")), None)
        return most is None or reader.length < most


def require_read(run: RunConfig, section: DataSection, item: ItemFiles) -> None:
    """Log a warning if the prompt of one item is cut.

    Raises:
        DataError: no text encoder reads its target text.
    """
    warnings, problems = PromptCheck(run)(section, [item])
    for warning in warnings:
        logger.warning("%s", warning)
    if problems:
        raise DataError(problems[0].problem)


def rare_characters(prompts: Iterable[str]) -> list[str]:
    """Characters of prompts that a vocabulary may not have: all but white space, and letters and digits of ASCII."""
    used = set[str]().union(*prompts)
    return sorted(c for c in used if not c.isspace() and not (c.isascii() and c.isalnum()))


def _counted(reader: PromptReader, asked: Iterable[Asked], *, closed: bool) -> dict[Asked, int]:
    """Tokens of each prompt; equal ones are counted once."""
    by_images = dict[tuple[int, ...], list[str]]()
    for prompt, images in dict.fromkeys(asked):
        by_images.setdefault(images, []).append(prompt)
    found = dict[Asked, int]()
    for images, prompts in by_images.items():
        for start in range(0, len(prompts), _AT_ONCE):
            some = prompts[start : start + _AT_ONCE]
            counts = reader.counts(some, images, closed=closed)
            found |= {(prompt, images): count for prompt, count in zip(some, counts, strict=True)}
    return found


def _end_of_text(item: ItemFiles, *, quoted: bool) -> tuple[str | None, int]:
    """The target text of an item that ends last in its prompt, and its end there: of its lines, else of its text, else
    with `quoted` of what stands in quotes; (None, 1) where the prompt has none of them."""
    found: tuple[str | None, int] = (None, 1)
    for text in _target_texts(item, quoted=quoted):
        words = r"\s+".join(map(re.escape, text.split()))
        place = re.search(words, item.prompt, re.IGNORECASE) if words else None
        if place is not None and place.end() > found[1]:
            found = text, place.end()
    return found


def _target_texts(item: ItemFiles, *, quoted: bool) -> list[str]:
    if "lines" in item.metadata:
        try:
            return [line.text for line in parse_lines(item.metadata["lines"])]
        except ValueError:  # reading the item reports it
            return []
    text = item.metadata.get("text")
    if isinstance(text, str) and text.strip():
        return [text]
    found = quoted_text(item.prompt) if quoted else None
    return [] if found is None else [found]


@lru_cache(maxsize=8)
def _readers_of(family: str, section: str, path: str, embedded: bool) -> Readers:
    """The text encoders of a model section, as JSON, with tokenizers and without networks."""
    from retouch.families import FAMILIES
    from retouch.families.loading import family_class

    kind: Any = family_class(family)
    if not hasattr(kind, "prompt_readers"):
        raise NotImplementedError(f"{kind.__name__} has no prompt_readers")
    return kind.prompt_readers(FAMILIES[family].model_validate_json(section), path, embedded=embedded)


def _downloaded(hub_id: str) -> str:
    """Folder of a hub id in the local cache.

    Raises:
        ModelFilesError: not downloaded.
    """
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(hub_id, "model_index.json")
    if not isinstance(index, str):
        raise ModelFilesError(f"{hub_id} is not on this machine")
    return str(Path(index).parent)
