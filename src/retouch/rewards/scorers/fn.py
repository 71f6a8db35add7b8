"""A custom scorer: a function or a class, named as "module:name"."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from PIL import Image
from pydantic import model_validator

from retouch.config.base import Names
from retouch.errors import ConfigError
from retouch.files.disk import is_file
from retouch.registry import PLUGINS, import_from_here
from retouch.rewards.base import PackageScorer, RewardEntry
from retouch.rewards.protocol import PICTURES, RewardItem
from retouch.types import Failure, Outcome, Score

RECOLOURED = "retouch.tiny.edits:recoloured"
"""The reward of the tiny editing tasks."""


_OWN = __name__.partition(".")[0]

_NO_COMPLETION = Failure(
    "bad_item", "the item has no completion, which a function of completions scores; train with vlm_grpo"
)


class FnReward(RewardEntry):
    """A custom function or class, as "module:name"."""

    value_range = (-1e9, 1e9)
    licence = "yours"
    VALUE_ALIASES: ClassVar[Mapping[str, Mapping[str, str]]] = {"fn": {"retouch.data.edits:recoloured": RECOLOURED}}

    scorer: Literal["fn"] = "fn"
    fn: Annotated[str, Names("code", own=(RECOLOURED,), variables=(PLUGINS,))] = ""
    """Required with url null or "auto": "module:name"; a module that is not installed is searched for in the working
    directory. A function of a list of `RewardItem` that returns a number, `Score` or `Failure` for each, or a class
    without arguments with such a method `score` and optionally `load(device)`. A function whose first parameter is
    `completions` is called as by TRL's GRPOTrainer, for runs of `vlm_grpo`."""
    needs: list[str] | None = None
    """Images (mask, source, reference) that an item must have; an item without them is a typed failure."""

    @model_validator(mode="after")
    def _names_something(self) -> FnReward:
        if self.is_made_here and not all(self.fn.partition(":")):
            raise ValueError(f"fn: given {self.fn!r}; write module:function, like my_rewards:score")
        unknown = [name for name in self.needs or () if name not in PICTURES[1:]]
        if unknown:
            raise ValueError(f"needs: given {unknown[0]!r}; an item may have {', '.join(PICTURES[1:])}")
        return self

    @property
    def spec_name(self) -> str:
        return self.fn

    def required_images(self) -> frozenset[str]:
        return frozenset(self.needs or ())

    def make(self) -> FnScorer:
        return FnScorer(self)


class FnScorer(PackageScorer[FnReward]):
    """Calls what `fn` names."""

    def __init__(self, options: FnReward) -> None:
        super().__init__(options, f"fn {options.fn}")
        self._score: Callable[[Sequence[RewardItem]], Sequence[Any]] | None = None

    def load(self, device: str) -> None:
        """Import it. Its files become part of the revision, because different code may give different scores.

        Raises:
            ConfigError: no such module, or no such name in it.
        """
        found = find_function(self.options.fn, "reward 'fn': fn")
        if _is_of_trl(found):
            self._score = partial(_trl_call, found)
        elif isinstance(found, type):
            made: Any = found()
            if hasattr(made, "load"):
                made.load(device)
            self._score = made.score
        else:
            self._score = found
        self.set_revision(f"fn {self.options.fn} {source_digest(found)}")

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        assert self._score is not None
        return [_outcome(one) for one in self._score(items)]


def find_function(fn: str, where: str) -> Any:
    """The object at "module:name"; `where` begins the message.

    Raises:
        ConfigError: no such module, or no such name in it.
    """
    module, _, name = fn.partition(":")
    try:
        return getattr(import_from_here(module), name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{where}: given {fn!r}: no module {error.name}; it is looked for in {Path.cwd()}") from None
    except AttributeError:
        raise ConfigError(f"{where}: given {fn!r}: {module} has no {name}") from None


def source_digest(found: Any) -> str:
    """Digest of the file that defines a function or class, and of the modules that its own one imports from the same
    folder or package, and they in turn; of an installed package, of the first file alone."""
    file = Path(inspect.getfile(found)).resolve()
    digest = hashlib.blake2b(file.read_bytes(), digest_size=6)
    module, place = found.__module__.split("."), getattr(sys.modules.get(found.__module__), "__file__", None)
    if place is not None and module[0] != _OWN and not {"site-packages", "dist-packages"} & {*Path(place).parts}:
        files = [Path(place).resolve()]
        root = files[0].parents[len(module) - (files[0].stem != "__init__")]
        for one in files:
            files += sorted({*_imported_files(one, root)} - {*files})
        for one in sorted({*files} - {file}):
            digest.update(f"\0{one.relative_to(root).as_posix()}\0".encode() + one.read_bytes())
    return digest.hexdigest()


def _imported_files(file: Path, root: Path) -> Iterator[Path]:
    """Files below the folder `root` of the modules, with their packages, that a file imports anywhere in it."""
    package = file.relative_to(root).parent.parts
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):  # of a module that is imported later, if at all
        return
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        start = ""
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            start = "".join(f"{part}." for part in [*above, *filter(None, [node.module])])
        for name in names:
            parts = f"{start}{name}".split(".")
            places = [root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1) if parts[0] != _OWN]
            yield from (
                one
                for place in places
                for one in (place.with_name(f"{place.name}.py"), place / "__init__.py")
                if is_file(one)
            )


def _is_of_trl(found: Any) -> bool:
    """Whether it is a reward function of TRL, `reward_fn(completions, **kwargs)`."""
    return inspect.isfunction(found) and next(iter(inspect.signature(found).parameters), "") == "completions"


def _trl_call(function: Callable[..., Sequence[Any]], items: Sequence[RewardItem]) -> list[Any]:
    """The values of a reward function of TRL, and a failure for each item without a completion."""
    completed = [item for item in items if item.metadata.get("completion") is not None]
    values = _trl_values(function, completed) if completed else []
    for place, item in enumerate(items):  # ascending: each failure moves the values behind it to their own places
        if item.metadata.get("completion") is None:
            values.insert(place, _NO_COMPLETION)
    return values


def _trl_values(function: Callable[..., Sequence[Any]], items: Sequence[RewardItem]) -> list[Any]:
    """The values of a reward function of TRL. It gets the texts of the trained text encoder as `completions`, and by
    keyword, as far as it has parameters for them: `prompts`, `images` (generated) and `source_images` as PIL images,
    and every key of the metadata. None stands for no value there."""
    texts = [item.metadata["completion"] for item in items]
    names = dict.fromkeys(name for item in items for name in item.metadata if name != "completion")
    columns: dict[str, list[Any]] = {name: [item.metadata.get(name) for item in items] for name in names}
    columns["prompts"] = [item.prompt for item in items]
    columns["images"] = [Image.fromarray(item.image) for item in items]
    columns["source_images"] = [None if item.source is None else Image.fromarray(item.source) for item in items]
    parameters = inspect.signature(function).parameters
    # TRL passes keywords, and a function that takes only some of them fails on the others: it gets those that it names.
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
        columns = {name: column for name, column in columns.items() if name in parameters}
    no_value = Failure("scorer_error", "the function returned None for it")
    return [no_value if value is None else value for value in function(completions=texts, **columns)]


def _outcome(value: Any) -> Outcome:
    """A number of any library as a score; anything else is left for `CheckedScorer` to reject."""
    if isinstance(value, Score | Failure):
        return value
    return Score(value.item() if hasattr(value, "item") else value)
