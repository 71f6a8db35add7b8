"""Is the model folder complete and of the right class? From configs and file headers alone: no weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from retouch.doctor.line import Line
from retouch.families.base import Model

Shapes = dict[str, tuple[int, ...]]
"""Weight name -> shape."""


@dataclass(frozen=True)
class Found:
    """A model as far as it lies on this machine.

    Attributes:
        folder: None where it is not here, or cannot be.
        weights: network -> shapes; a network whose weights are not in safetensors files is left out.
        problems: what is wrong with the folder.
        missing: why there is no folder, where that is no mistake: a hub id that has not been downloaded.
        embedded: whether examples bring their text embeddings, so that `spec.embedded_encoder` is not loaded.
    """

    folder: Path | None = None
    weights: dict[str, Shapes] = field(default_factory=dict[str, Shapes])
    problems: list[str] = field(default_factory=list[str])
    missing: str | None = None
    embedded: bool = False


class Damaged(ValueError):
    """A file of the model that cannot be what it should."""


def find_model(model: Model, *, embedded: bool = False) -> Found:
    """Look at the folder that `model.path` means: as it stands, of the package, or where the hub's files are kept.

    Args:
        embedded: as of `Found`.
    """
    try:
        from retouch.families.loading import (
            ModelFilesError,
            component_path,
            require_pipeline,
        )
    except ImportError:
        return Found(missing="not looked at: that needs the train extra")
    networks = loaded(model, embedded=embedded)
    try:
        path = component_path(model.path, model.family)
        folder = Path(path) if Path(path).is_dir() else _downloaded(path)
        if folder is None:
            away = f"{path} is not on this machine; the run downloads it (gated ones need HF_TOKEN)"
            return Found(missing=away, embedded=embedded)
        require_pipeline(str(folder), model.pipeline)
    except ModelFilesError as error:
        return Found(problems=[str(error)])
    weights: dict[str, Shapes] = {}
    problems: list[str] = []
    for name, expected in networks.items():
        try:
            shapes = _network(folder / name, expected)
        except Damaged as error:
            problems.append(str(error))
        else:
            weights |= {name: shapes} if shapes else {}
    texts = [name for name in networks if name.startswith("text_")]
    if not model.spec.tokenizer_in_processor:
        problems += [p for name in texts for p in _tokenizer(folder, name.replace("text_encoder", "tokenizer"))]
    if model.spec.has_processor:
        found = _processor(folder / "processor")
        if not found and texts and model.spec.tokenizer_in_processor:
            found = [*_tokenizer(folder, "processor")]
        problems += found
    problems += [] if (folder / "scheduler/scheduler_config.json").is_file() else ["no scheduler/scheduler_config.json"]
    return Found(folder, weights, problems, embedded=embedded)


def loaded(model: Model, *, embedded: bool) -> dict[str, str]:
    """Component -> class of the networks that training loads, the trained one first: no text encoder if
    `model.embeddings` replaces it, and not the one whose output comes with the examples."""
    spared = {model.spec.embedded_encoder} if embedded else set[str | None]()
    return {
        name: kind
        for name, kind in model.spec.networks.items()
        if name not in spared and not (name.startswith("text_") and model.embeddings is not None)
    }


def _downloaded(hub_id: str) -> Path | None:
    """The newest snapshot of a hub id in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(hub_id, "model_index.json")
    return Path(index).parent if isinstance(index, str) else None


def _network(folder: Path, expected: str) -> Shapes:
    """Shapes of its weights; empty where they are in files that only torch reads.

    Raises:
        Damaged: no such folder, a network of another class, or weights that are not all there.
    """
    config = _json(folder / "config.json")
    found: Any = config.get("_class_name") or next(iter(config.get("architectures") or []), expected)
    if found != expected:
        raise Damaged(f"{folder.name}/ is a {found}, {expected} is needed")
    # diffusers writes _class_name, transformers does not
    return weights_of(folder, *(("diffusion_pytorch_model",) * 2 if "_class_name" in config else STEMS))


STEMS = ("model", "pytorch_model")
"""File names of transformers' weights: safetensors, and pickled."""


def weights_of(folder: Path, stem: str, pickled: str) -> Shapes:
    """Shapes of the weights in a folder, by the headers of its files; empty where only torch reads them.

    Raises:
        Damaged: no weights, or not all of them.
    """
    index = folder / f"{stem}.safetensors.index.json"
    if (folder / f"{stem}.safetensors").is_file():
        return _header(folder / f"{stem}.safetensors")
    if index.is_file():
        placed = _json(index).get("weight_map", {})
        shapes = {
            name: shape for file in sorted(set(placed.values())) for name, shape in _header(folder / file).items()
        }
        lacking = sorted(placed.keys() - shapes.keys())
        if lacking:
            raise Damaged(f"{folder.name}/: {lacking[0]} is in none of the files that its index names")
        return shapes
    if (folder / f"{pickled}.bin").is_file() or (folder / f"{pickled}.bin.index.json").is_file():
        return {}
    raise Damaged(f"{folder.name}/ has no {stem}.safetensors")


def _header(file: Path) -> Shapes:
    """Shapes in a safetensors file, whose length must be what its header says.

    Raises:
        Damaged: it is not there, or cut off.
    """
    where = f"{file.parent.name}/{file.name}"
    if not file.is_file():
        raise Damaged(f"no {where}")
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = cast("dict[str, Any]", json.loads(stream.read(min(length, file.stat().st_size))))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        whole = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{where} is no safetensors file, or only the start of one") from None
    if file.stat().st_size != whole:
        raise Damaged(f"{where} has {file.stat().st_size} bytes, {whole} are expected")
    return shapes


def _tokenizer(folder: Path, name: str) -> Iterator[str]:
    """What is wrong with the tokenizer in folder/name/."""
    try:
        kind = str(_json(folder / name / "tokenizer_config.json").get("tokenizer_class", ""))
    except Damaged as error:
        yield str(error)
        return
    vocabularies = ("tokenizer.json", "vocab.json", "spiece.model")
    if not kind.startswith("ByT5") and not any((folder / name / file).is_file() for file in vocabularies):
        yield f"{name}/ has none of {', '.join(vocabularies)}"


def _processor(folder: Path) -> list[str]:
    """What is wrong with the processor of pictures."""
    names = ("preprocessor_config.json", "processor_config.json")
    return [] if any((folder / name).is_file() for name in names) else [f"processor/ has none of {', '.join(names)}"]


def _json(file: Path) -> dict[str, Any]:
    """Raises: Damaged: it is not there, or holds no JSON object."""
    try:
        value: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise Damaged(f"no {file.parent.name}/{file.name}") from None
    except ValueError:
        raise Damaged(f"{file.parent.name}/{file.name} is not valid JSON") from None
    if not isinstance(value, dict):
        raise Damaged(f"{file.parent.name}/{file.name} holds no JSON object")
    return cast("dict[str, Any]", value)


def model_lines(model: Model, found: Found) -> Iterator[Line]:
    """Complete and of the right class, or what is not."""
    if found.missing:
        yield Line("warning", "model", found.missing)
    elif found.problems:
        here = f"{found.folder}: " if found.folder else ""
        remedy = "; copy the model anew" if found.folder else ""
        yield Line("fix", "model", f"{here}{'; '.join(found.problems)}{remedy}")
    else:
        networks = ", ".join(loaded(model, embedded=found.embedded))
        yield Line("ok", "model", f"{found.folder}: {networks}, their configs and files complete")
