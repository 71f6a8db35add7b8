"""Which pictures weights are used on, and how they are read: as the run reads its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retouch.config import ConfigError, RunConfig
from retouch.config.data_sections import DEFAULT_TEMPLATE, FITS, DataSection, ManifestData, ProtocolData
from retouch.config.errors import nearest
from retouch.config.families import FACTS
from retouch.config.needs import needed_pictures, takes_references
from retouch.data import DataError, Dataset, ItemFiles, load_dataset
from retouch.data.dataset import check_item
from retouch.data.validate import data_at
from retouch.imaging import open_image, to_rgb


@dataclass(frozen=True)
class SampleRequest:
    """What to repaint: a data set, or one picture.

    Attributes:
        reference: picture whose style to take, instead of the items' own; for a run that trained a style adapter.
        size: (height, width) to repaint at; None: the run's.
        fit: as `data.fit`; None: the run's.
        feather: radius in pixels of a soft edge inside the mask.
    """

    data: Path | None
    image: Path | None
    mask: Path | None
    text: str | None
    prompt: str | None
    reference: Path | None
    seed: int
    count: int
    steps: int | None
    size: tuple[int, int] | None
    fit: str | None
    feather: float


def items_to_sample(config: RunConfig, request: SampleRequest) -> tuple[DataSection, list[ItemFiles]]:
    """The items of a request, checked, and the section that says how to read them.

    Raises:
        ConfigError: neither or both of a data set and a picture, a picture without mask (but for a model that changes
            whole pictures) and text, or no such fit.
        DataError: a broken picture or mask, or more broken items than the run allows.
    """
    if (request.data is None) == (request.image is None):
        raise ConfigError("give either --data, or --image with --mask and --text (or --prompt)")
    if request.fit not in (None, *FITS):
        raise ConfigError(f"--fit: given {request.fit!r}; {nearest(request.fit, FITS)}")
    given = {"resolution": request.size, "fit": request.fit}
    update = {name: value for name, value in given.items() if value is not None}
    if request.data is not None:
        section = like(config, request.data).model_copy(update=update)
        return section, examples_of(config, section, "--data", request.reference, scored=False).items
    edits = FACTS[config.model.family].edits
    if (request.mask is None and not edits) or (request.text is None and request.prompt is None):
        raise ConfigError(f"--image needs {'' if edits else '--mask and '}--text (or --prompt)")
    if request.text is not None and not request.text.strip():
        raise ConfigError("--text: empty; say what the mask shall read")
    section = ManifestData(path="").model_copy(
        update={**_shared(config.data, ManifestData), "reference": "given", **update}
    )
    template = getattr(config.data, "prompt_template", DEFAULT_TEMPLATE)
    prompt = request.prompt if request.prompt is not None else template.replace("{text}", request.text or "")
    if takes_references(config, scored=False) and request.reference is None:
        raise ConfigError(
            "--image needs --reference: the run trained with style pictures (an adapter or reference_strip); give one"
        )
    _takes_references(config, request.reference, scored=False)
    item = ItemFiles(0, prompt, request.image, request.mask, request.reference)
    problem = check_item(item, section, needed_pictures(config, training=False, scored=False))
    if problem:
        raise DataError(problem.problem)
    return section, [item]


def examples_of(config: RunConfig, section: Any, purpose: str, reference: Path | None, *, scored: bool) -> Dataset:
    """The usable examples of a section, with one reference for all where one is given.

    Raises:
        ConfigError: a reference that the run cannot take.
        DataError: more broken items than the section allows, or a broken reference.
    """
    _takes_references(config, reference, scored=scored)
    needs = needed_pictures(config, training=False, scored=scored)
    if reference is None:
        return load_dataset(section, purpose, needs)
    to_rgb(open_image(reference))  # one message, not one an item
    found = load_dataset(section, purpose, needs - {"reference"})
    return Dataset(section, [replace(item, reference_path=reference) for item in found.items])


def like(config: RunConfig, path: Path) -> Any:
    """A data section for `path` that reads as the run's evaluation data (or training data) does."""
    model = config.evaluation.data or config.data
    if isinstance(model, ProtocolData):  # nothing in a path tells these apart
        return model.model_copy(update={"path": str(path), "limit": None, "part": "all", "curriculum": 1})
    section = data_at(path, config.data.size)
    same = _shared(model, type(section))
    same |= {"reference": "mask_box"} if same.get("reference") == "half_box" else {}  # which is to train on
    return section.model_copy(update={k: v for k, v in same.items() if k not in ("format", "limit")})


def make_folder(out: Path) -> None:
    """Before minutes go into what is to be written there."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: {out} is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)


def _takes_references(config: RunConfig, reference: Path | None, *, scored: bool) -> None:
    if reference is not None and not takes_references(config, scored=scored):
        unjudged = ", and no reward does" if scored else ""
        raise ConfigError(
            f"--reference: given {reference}, but the run trained {config.model.train.kind} weights, which see no "
            f"reference{unjudged}; leave it out"
        )


def _shared(model: DataSection, kind: type[DataSection]) -> dict[str, Any]:
    """What a section says that one of another format can say, too."""
    return {
        name: getattr(model, name)
        for name in kind.model_fields
        if name not in ("path", "format", "limit", "image_root", "list_file") and hasattr(model, name)
    }
