"""A data set: a list of items by file name, turned into `Example`s of one size, or of one of several, on access.

A format (`retouch.data.formats`) lists items, and `retouch.data.item` reads one; which of them are usable is here.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import overload

from retouch.data.base import DataError, DataSection, ItemDoubt, ItemError, ItemFiles, listed_in
from retouch.data.buckets import Buckets, Shape, Shapes
from retouch.data.checking import Alone, find_problems, in_threads, memory_of
from retouch.data.identity import files_of
from retouch.data.item import check_item, missing_of, read_item, shape_of
from retouch.errors import ImageProblem
from retouch.imaging.reading import PackedImage
from retouch.types import Example, Processes

logger = logging.getLogger(__name__)

CheckPrompts = Callable[[DataSection, Sequence[ItemFiles]], tuple[Sequence[str], Mapping[int, ItemError]]]
"""Usable items of a section -> warnings about their prompts, and by position the items whose prompts are unusable."""


class Dataset(Sequence[Example]):
    """Examples, opened on access. `skipped` broken items were dropped by `load_dataset`, which found the doubts."""

    def __init__(
        self, config: DataSection, items: Sequence[ItemFiles], doubts: Sequence[ItemDoubt] = (), skipped: int = 0
    ) -> None:
        self.config = config
        self.skipped = skipped
        self.items = list(items)
        self.doubts = list(doubts)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return read_item(self.items[index], self.config)[0]

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    @property
    def each_once(self) -> Dataset:
        """The examples to evaluate or sample, each input of the model once."""
        return Dataset(self.config, self.config.each_once(self.items), self.doubts)

    @property
    def prompts(self) -> list[str]:
        """Every prompt once, in order."""
        return list(dict.fromkeys(item.prompt for item in self.items))

    @property
    def difficulties(self) -> list[float]:
        """Difficulty of every example, by position."""
        return [item.difficulty for item in self.items]

    @cached_property
    def shapes(self) -> list[Shape]:
        """(height, width) of every example, by position."""
        return shapes_of(self.items, self.config)

    @cached_property
    def counted_shapes(self) -> Shapes:
        """`shapes` for `batch_examples`."""
        return Shapes(self.shapes)


def shapes_of(items: Sequence[ItemFiles], config: DataSection, processes: Processes | None = None) -> list[Shape]:
    """(height, width) of the example of every item, the same on all processes, which read a share of the files each.

    Raises:
        DataError: a file that is not there any more, on every process.
    """
    if not isinstance(config.resolution, Buckets):
        return [config.size] * len(items)
    processes = processes or Alone()

    def found(position: int) -> tuple[int, Shape | str]:
        try:
            return position, shape_of(items[position], config)
        except ImageProblem as problem:
            return position, str(problem)

    own = range(processes.rank, len(items), processes.world_size)
    shapes: list[Shape] = []
    for _, shape in sorted(processes.gather_list(list(in_threads(found, own)))):
        if isinstance(shape, str):
            raise DataError(shape)
        shapes.append(shape)
    return shapes


def load_dataset(
    config: DataSection,
    purpose: str = "data",
    needs: Collection[str] = (),
    processes: Processes | None = None,
    check_prompts: CheckPrompts | None = None,
) -> Dataset:
    """List and check every item; skip up to `max_bad_items` broken ones, each with a warning.

    Args:
        purpose: name of the section in messages.
        needs: images that every item must have: of source, mask, reference, win, lose.
        processes: all load the same section at the same time and check a share each; None: this process alone.
        check_prompts: finds items whose prompts are unusable (`retouch.families.prompts`); None: none is checked.

    Raises:
        DataError: no items, too many broken items, or two items with one id.
    """
    processes = processes or Alone()
    listed = listed_in(config, purpose)
    told = repr([_told_of(item) if isinstance(item, ItemFiles) else str(item) for item in listed])
    if len(set(processes.gather_list([hashlib.sha256(told.encode()).digest()]))) > 1:
        raise DataError(f"{purpose}: {config.path} does not list the same items on all machines; give them equal files")
    files = [item for item in listed if isinstance(item, ItemFiles)]
    check = partial(check_item, config=config, needs=needs)
    if any(map(files_of, files)):
        problems = iter(find_problems(files, check, purpose, processes, memory_of(config, needs)))
    else:  # of prompts alone, every process looks at all: that takes less than to share them
        problems = (check(item) if "lines" in item.metadata else missing_of(item, config, needs) for item in files)
    verdicts = [item if isinstance(item, ItemError) else next(problems) or item for item in listed]
    outcomes = [item if isinstance(one, ItemDoubt) else one for one, item in zip(verdicts, listed, strict=True)]
    doubts = _reasoned(verdicts, outcomes, check)
    if check_prompts is not None:
        outcomes = _with_read_prompts(outcomes, partial(check_prompts, config), purpose, processes)
    good = [outcome for outcome in outcomes if isinstance(outcome, ItemFiles)]
    bad = [in_place(str(outcome), purpose) for outcome in outcomes if isinstance(outcome, ItemError)]
    if len(bad) > config.max_bad_items:
        raise DataError(
            f"{purpose}: {len(bad)} of {len(listed)} items are broken, more than max_bad_items {config.max_bad_items}; "
            f"the first: {bad[0]}. `retouch data validate` lists them all"
        )
    if not good:
        raise DataError(f"{purpose}: {config.path} holds no usable item" + (f"; {bad[0]}" if bad else ""))
    if bad and processes.rank == 0:
        for problem in bad:
            logger.warning("%s: skipped %s", purpose, problem)
        logger.warning(
            "%s: skipped %d of %d items (max_bad_items %d)", purpose, len(bad), len(listed), config.max_bad_items
        )
    twice = repeated_ids(good)
    if twice:
        raise DataError(f"{purpose}: item id {twice[0]} appears more than once in {config.path}; ids must differ")
    if doubts and processes.rank == 0:
        logger.warning("%s: %s", purpose, doubts_of(doubts, len(good), purpose))
    data = Dataset(config, good, doubts, len(bad))
    data.shapes = shapes_of(good, config, processes)
    if isinstance(config.resolution, Buckets) and processes.rank == 0:
        counts = Counter(data.shapes).most_common()
        told = ", ".join(f"{height} x {width}: {count}" for (height, width), count in counts)
        logger.info("%s: examples by shape (height x width): %s", purpose, told)
    return data


def _reasoned(
    verdicts: Sequence[ItemFiles | ItemError | ItemDoubt],
    items: Sequence[ItemFiles | ItemError],
    check: Callable[[ItemFiles], ItemError | ItemDoubt | None],
) -> list[ItemDoubt]:
    """The doubts among verdicts on items; the first, which messages name, has its reason at every start."""
    doubtful = [
        (verdict, item) for verdict, item in zip(verdicts, items, strict=True) if isinstance(verdict, ItemDoubt)
    ]
    doubts = [doubt for doubt, _ in doubtful]
    for doubt, item in doubtful[:1]:
        if doubt.remembered and isinstance(item, ItemFiles):
            again = check(item)
            # what all processes agreed on stays: only the words change here
            doubts[0] = again if isinstance(again, ItemDoubt) else doubt
    return doubts


def _with_read_prompts(
    outcomes: Sequence[ItemFiles | ItemError],
    check: Callable[[Sequence[ItemFiles]], tuple[Sequence[str], Mapping[int, ItemError]]],
    purpose: str,
    processes: Processes,
) -> list[ItemFiles | ItemError]:
    """The outcomes with the problems of their prompts; an item that is unusable on one machine is unusable."""
    found, places = list(outcomes), [p for p, outcome in enumerate(outcomes) if isinstance(outcome, ItemFiles)]
    warnings, problems = check([outcome for outcome in outcomes if isinstance(outcome, ItemFiles)])
    for warning in warnings if processes.rank == 0 else ():
        logger.warning("%s: %s", purpose, warning)
    for position, problem in processes.gather_list(list(problems.items())):
        found[places[position]] = problem
    return found


def _told_of(item: ItemFiles) -> tuple[object, ...]:
    """Id, prompt, target text with its lines, and names of the files of an item: an id that is a position is the same
    in every list, and folders may differ."""
    files = [(role, f.digest if isinstance(f, PackedImage) else f.name) for role, f in files_of(item).items()]
    return item.id, item.prompt, item.metadata.get("text"), item.metadata.get("lines"), files


def all_embedded(items: Iterable[ItemFiles]) -> bool:
    """Whether every item names a file with the text embeddings of its prompt, which replaces encoding it."""
    return all(item.embedding_path is not None for item in items)


def repeated_ids(items: Sequence[ItemFiles]) -> list[int]:
    """Ids that more than one item has."""
    return [i for i, count in Counter(item.id for item in items).items() if count > 1]


def doubts_of(doubts: Sequence[ItemDoubt], items: int, purpose: str) -> str:
    """A message about the doubtful masks among the items of a section."""
    shown = in_place(str(doubts[0]), purpose)
    return (
        f"masks of {len(doubts)} of {items} items are doubtful; the first: {shown}. `retouch data validate` lists all"
    )


def in_place(message: str, purpose: str) -> str:
    """A message about an item with the keys of its section, or the option of the command line if the section comes from
    there."""
    if "--" in purpose:
        return message.replace("set data.invert_mask=true", "add --invert-mask")
    return _OPTION.sub(f"{purpose}.", message)


_OPTION = re.compile(r"(?<![\w./-])data\.(?=(?:fit|invert_mask|reference|resolution)\b)")
