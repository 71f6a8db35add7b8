"""Check that the model folder is complete and of the right class, by configs and file headers; no weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from retouch.doctor.line import Line
from retouch.families.base import Model
from retouch.files.hub import cached
from retouch.files.model_files import INDEX, Damaged, components, json_object, schedule_problem, stems, weights_of


@dataclass(frozen=True)
class FoundModel:
    """The files of a model on this machine.

    Attributes:
        folder: None if it is not on this machine.
        problems: problems of the folder.
        missing: valid reason for no folder: a hub id that has not been downloaded.
        embedded: whether examples have text embeddings; `spec.embedded_encoder` is then not loaded.
        transformer: folder of `model.transformer`; None without one, or if it is not here.
    """

    folder: Path | None = None
    problems: list[str] = field(default_factory=list[str])
    missing: str | None = None
    embedded: bool = False
    transformer: Path | None = None

    def network_folder(self, model: Model, name: str) -> Path | None:
        """Folder of a network of the model; None where it is not here."""
        if name == model.spec.network_name and model.transformer is not None:
            return self.transformer
        return None if self.folder is None else self.folder / name


def find_model(model: Model, *, embedded: bool = False) -> FoundModel:
    """Inspect the folder of `model.path`: a local folder, one of the package, or the hub's cache.

    Args:
        embedded: as of `FoundModel`.
    """
    try:
        from retouch.families.loading import (
            ModelFilesError,
            component_path,
            family_class,
            pipeline_index,
            transformer_folder,
        )
    except ImportError:
        return FoundModel(missing="not looked at: that needs the train extra")
    try:
        other = None if model.transformer is None else transformer_folder(model.transformer)
        path = component_path(model.path, model.family)
        folder = Path(path) if Path(path).is_dir() else downloaded(path)
        if folder is None:
            # This is no problem of a folder: the run downloads it.
            away = f"{path} is not on this machine; the run downloads it (gated ones need HF_TOKEN)"
            return FoundModel(missing=away, embedded=embedded, transformer=other)
        family_class(model.family).require_index(model, pipeline_index(str(folder)) or {})
        networks = loaded(model, embedded=embedded, folder=folder)
    except ModelFilesError as error:
        return FoundModel(problems=[str(error)])
    problems: list[str] = []
    found = FoundModel(folder, problems, embedded=embedded, transformer=other)
    for name, expected in networks.items():
        place = found.network_folder(model, name)
        if place is None:
            continue
        try:
            _require_network(place, expected, model.weights_variant)
        except Damaged as error:
            problems.append(str(error))
    texts = [name for name in networks if name.startswith("text_")]
    if not model.spec.tokenizer_in_processor:
        problems.extend(p for name in texts for p in _tokenizer(folder, name.replace("text_encoder", "tokenizer")))
    if model.spec.has_processor:
        processor = _processor(folder / "processor")
        if not processor and texts and model.spec.tokenizer_in_processor:
            processor = [*_tokenizer(folder, "processor")]
        problems.extend(processor)
    problems.extend(_scheduler(model, folder))
    return found


def loaded(model: Model, *, embedded: bool, folder: Path | None = None) -> dict[str, str]:
    """Component -> class of the networks that training loads, the trained one first: no text encoder if
    `model.embeddings` replaces it, not the one whose output comes with the examples, and no optional component that is
    missing in `folder`."""
    spared = {model.spec.embedded_encoder} if embedded else set[str | None]()
    if folder is not None and model.spec.optional:  # only then is an index downloaded
        spared |= model.spec.optional.difference(components(folder))
    return {
        name: kind
        for name, kind in model.spec.networks.items()
        if name not in spared and not (name.startswith("text_") and model.embeddings is not None)
    }


def downloaded(hub_id: str) -> Path | None:
    """The newest snapshot of a hub id in the local cache."""
    index = cached(hub_id, INDEX)
    return None if index is None else index.parent


def _require_network(folder: Path, expected: str, variant: str | None) -> None:
    """Raise Damaged for a network of another class, or without all of its weights."""
    from retouch.families.meta import other_class

    config = json_object(folder / "config.json")
    if (found := other_class(config, expected)) is not None:
        raise Damaged(f"{folder.name}/ is a {found}, {expected} is needed")
    weights_of(folder, *stems(config), variant)


def _tokenizer(folder: Path, name: str) -> Iterator[str]:
    """Problems of the tokenizer in folder/name/."""
    try:
        kind = str(json_object(folder / name / "tokenizer_config.json").get("tokenizer_class", ""))
    except Damaged as error:
        yield str(error)
        return
    vocabularies = ("tokenizer.json", "vocab.json", "spiece.model")
    if not kind.startswith("ByT5") and not any((folder / name / file).is_file() for file in vocabularies):
        yield f"{name}/ has none of {', '.join(vocabularies)}"


def _processor(folder: Path) -> list[str]:
    """Problems of the image processor."""
    names = ("preprocessor_config.json", "processor_config.json")
    return [] if any((folder / name).is_file() for name in names) else [f"processor/ has none of {', '.join(names)}"]


def _scheduler(model: Model, folder: Path) -> Iterator[str]:
    """Problems of the scheduler's config."""
    try:
        config = json_object(folder / "scheduler/scheduler_config.json")
    except Damaged as error:
        yield str(error)
        return
    if model.spec.prediction == "flow" and (problem := schedule_problem(config)):
        yield problem


def model_lines(model: Model, found: FoundModel) -> Iterator[Line]:
    """Lines on the model: complete and of the right class, or its problems."""
    if found.missing:
        yield Line("warning", "model", found.missing)
    elif found.problems:
        here = f"{found.folder}: " if found.folder else ""
        remedy = "; copy the model anew" if found.folder else ""
        yield Line("fix", "model", f"{here}{'; '.join(found.problems)}{remedy}")
    else:
        networks = ", ".join(loaded(model, embedded=found.embedded, folder=found.folder))
        yield Line("ok", "model", f"{found.folder}: {networks}, their configs and files complete")
    other, folder = model.transformer, found.transformer
    if other is not None and not found.problems:
        here = f"{folder}: in place of the transformer of model.path"
        away = f"{other.path} is not on this machine; the run downloads it"
        yield Line("ok" if folder else "warning", "model.transformer", here if folder else away)
