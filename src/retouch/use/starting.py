"""A first run file for a folder of images or a file of prompts: `retouch init`."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

from retouch.algorithms import ALGORITHMS
from retouch.algorithms.base import RlConfig
from retouch.config import ConfigError, load_run, numbers, parse_run, yaml12
from retouch.config.errors import nearest
from retouch.config.load import THIS_DIR, with_this_dir
from retouch.config.needs import needed_pictures
from retouch.data.base import DataError, ItemError, ItemFiles
from retouch.data.discover import Found, discover
from retouch.data.formats.manifest import ManifestData
from retouch.data.item import examine
from retouch.data.split import parts_of, split
from retouch.data.texts import has_text
from retouch.errors import ImageProblem
from retouch.families import FAMILIES
from retouch.families.base import SHORT_NAMES, TINY_SIZE_MULTIPLE
from retouch.files.disk import write_whole
from retouch.imaging.fitting import Fit
from retouch.imaging.reading import open_image
from retouch.process.plain_text import count_of
from retouch.registry import import_plugins_of_environment
from retouch.rewards.quotes import quoted_text

_HELD_OUT = 0.2
_ENOUGH = 8
"""Least number of examples of which some are held out."""

_TINY_LENGTH = {"flux_fill": 24, "qwen_image_edit": 128}
"""Family -> model.max_sequence_length of its tiny base."""

_TINY_SIDE = 64
"""Largest side of the images that tiny bases learned, in pixels."""

_SIDE = 512
"""Side of the images of a released base, in pixels."""

_LOOKED_AT = 32
"""Examples whose masks decide on the size."""

_SHOWN = 5
"""Images left out that are listed one by one."""


@dataclass(frozen=True)
class _Run:
    """Choices of the run file.

    Attributes:
        data: `data.path`.
        shape: (`data.resolution`, `data.fit`).
        held_out: manifest of held-out examples; None: there is none.
        examples: number of examples to train on.
        model: `model.path`; None: $MODEL_PATH, or the released model of the family.
    """

    found: Found
    family: str
    algorithm: str
    model: str | None
    shape: tuple[str, Fit]
    data: Path
    held_out: Path | None
    examples: int

    @property
    def tiny(self) -> bool:
        return self.model == "tiny"

    @property
    def trains_on_rewards(self) -> bool:
        return issubclass(ALGORITHMS[self.algorithm], RlConfig)


def start(folder: Path, out: Path, family: str, algorithm: str, model: str | None) -> list[str]:
    """Write a run file for the images of a folder or for prompts and, if images have no list that a format reads, a
    manifest beside it -> lines for the terminal.

    Args:
        model: `model.path`; None: $MODEL_PATH, or the released model of the family.

    Raises:
        ConfigError: an unknown family or algorithm, files that exist, or images that do not fit the family.
        DataError: no data set in the folder.
    """
    import_plugins_of_environment()
    family = SHORT_NAMES.get(family, family)
    families = [*FAMILIES.available()]
    algorithms = [name for name, kind in ALGORITHMS.available().items() if not kind.trains_text_encoder]
    for option, given, known in (("--family", family, families), ("--algorithm", algorithm, algorithms)):
        if given not in known and option == "--algorithm" and given in ALGORITHMS:
            raise ConfigError(
                f"{option}: given {given!r}, for which init writes no run file; it writes {', '.join(known)}"
            )
        if given not in known:
            raise ConfigError(f"{option}: given {given!r}; {nearest(given, known)}")
    found = _without_descriptions(discover(folder), folder)
    _require_images(found, folder, family)
    manifest = out.with_name(f"{out.stem}_data.json")
    # an old list of held-out examples would leave the new run without any
    for file in (out, *([manifest, *parts_of(manifest)] if found.path is None else [])):
        if file.exists():
            raise ConfigError(f"--out: {file} exists; set --out to another path, or delete it")
    shape = _tiny_shape(found, family) if model == "tiny" else _shape(found, family)
    run = _Run(found, family, algorithm, model, shape, found.path or manifest, None, len(found.items))
    _require_fitting(run, out)  # before anything is written
    if found.path is None:
        data, held_out, examples = _write_manifest(found, manifest)
        run = replace(run, data=data, held_out=held_out, examples=examples)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, _run_file(run, out))
    config = load_run(out)
    numbers(config)  # fails here where `retouch check` would
    texts = sum(map(has_text, found.items))
    masks = sum(item.mask_path is not None for item in found.items)
    lines = [f"{folder}: {_count(found)}, {masks} with a mask, {texts} with a text to write"]
    lines += _unread(run, texts)
    lines += [f"left out: {problem}" for problem in found.left_out[:_SHOWN]]
    lines += [f"left out: {len(found.left_out) - _SHOWN} more"] if len(found.left_out) > _SHOWN else []
    lines += [f"{file}: written" for file in (run.data, run.held_out) if found.path is None and file is not None]
    lines += [f"{out}: {algorithm} on {family}, rewards {', '.join(config.rewards)}"]
    quoted = shlex.quote(str(out))
    return [*lines, f"next: retouch data validate {quoted}; retouch check {quoted}; retouch train {quoted}"]


def _mostly_texts(found: Found) -> bool:
    """Whether more than half of the examples have a text to write: a caption without one does not change the reward."""
    return 2 * sum(map(has_text, found.items)) > len(found.items)


def _without_descriptions(found: Found, folder: Path) -> Found:
    """Without the examples on which a reward that reads fails, if a manifest is written and most others have a text."""
    if found.path is not None or not _mostly_texts(found):
        return found
    texts = [has_text(item) for item in found.items]
    without = [entry["image_path"] for entry, text in zip(found.entries, texts, strict=True) if not text]
    names = [os.path.relpath(path, folder.resolve()) for path in without]
    return replace(
        found,
        entries=list(compress(found.entries, texts)),
        items=list(compress(found.items, texts)),
        left_out=[*(f"{name}: no text in quotes in its caption, as most have" for name in names), *found.left_out],
    )


def _unread(run: _Run, texts: int) -> list[str]:
    """A line on the examples of a list without a text, if the reward reads one."""
    without = len(run.found.items) - texts
    if not without or not _mostly_texts(run.found):
        return []
    return [
        f"{without} without a text, on whose samples the reward fails: give them one, or leave them out of the list"
    ]


def _require_fitting(run: _Run, out: Path) -> None:
    """Raises: ConfigError: an algorithm that the rewards or the images of the run do not fit."""
    try:
        config = parse_run(with_this_dir(yaml12.parse(_run_file(run, out)), out.parent), source=out.name)
        numbers(config)
    except ConfigError as error:
        raise ConfigError(
            f"--algorithm: given {run.algorithm!r}, for which init writes no run file with the rewards of these data; "
            f"{error}"
        ) from None
    needs = needed_pictures(config, training=True)
    first = run.found.items[0]
    missing = sorted(f"{name}_path" for name in needs if getattr(first, f"{name}_path") is None)
    if missing and isinstance(read := examine(first, config.data, needs), ItemError) and missing[0] in read.problem:
        raise ConfigError(
            f"--algorithm: given {run.algorithm!r}, which needs {', '.join(missing)} of each example; write a manifest "
            "with them, and set data.path to it"
        )


def _require_images(found: Found, folder: Path, family: str) -> None:
    needs = FAMILIES[family].spec.needs
    if "source" in needs and all(item.source_path is None for item in found.items):
        others = [name for name, section in FAMILIES.available().items() if not section.spec.needs]
        raise ConfigError(
            f"--family: given {family!r}, which needs images, but {folder} has prompts alone; set --family to one of "
            f"{', '.join(others)}"
        )
    without = sum(item.mask_path is None for item in found.items)
    if without and "mask" in needs:
        raise ConfigError(
            f"--family: given {family!r}, which repaints inside a mask, but {without} of {len(found.items)} images of "
            f"{folder} have none; add photo_mask.png beside photo.png (white where to repaint), or set "
            "--family=qwen_image_edit, which edits whole images"
        )


def _write_manifest(found: Found, manifest: Path) -> tuple[Path, Path | None, int]:
    """Write the examples, with paths relative to the manifest -> the manifest to train on, the manifest of held-out
    examples, and the number of examples to train on."""
    manifest.parent.mkdir(parents=True, exist_ok=True)
    root = manifest.parent.resolve()
    entries = [{k: v if k == "prompt" else os.path.relpath(v, root) for k, v in e.items()} for e in found.entries]
    if _mostly_texts(found):  # as rewards find it, for reports and glyph_correlation
        entries = [{**entry, "text": quoted_text(entry["prompt"]) or ""} for entry in entries]
    write_whole(manifest, json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
    if len(entries) < _ENOUGH:
        return manifest, None, len(entries)
    try:
        parts = split(manifest, _HELD_OUT)
    except DataError:  # one part would be empty
        return manifest, None, len(entries)
    (train, count), (held_out, _) = parts.items()
    return train, held_out, count


def _run_file(run: _Run, out: Path) -> str:
    """The run file as text, with a comment for each choice."""
    # Text and not a dumped config: a reader learns the keys from the comments beside them. Only keys that a first run
    # is likely to change are written; the values of a tiny base are those with which it trains within minutes.
    family, tiny = run.family, run.tiny
    released = FAMILIES[family].model_fields["path"].default
    path = f"${{MODEL_PATH:-{released}}}" if run.model is None else run.model
    (size, chosen), weights = run.shape, "full weights" if tiny else "LoRA"
    fit = f"  fit: {chosen}    # crop cuts a window around the mask, stretch ignores the aspect ratio"
    held_out = "" if run.held_out is None else json.dumps(_from_run_file(run.held_out, out))
    length = _TINY_LENGTH.get(family) if tiny else None
    short_prompts = [] if length is None else [f"  max_sequence_length: {length}    # of the tiny base"]
    return "\n".join(
        [
            f"# {run.algorithm} on {family}, written by `retouch init`: {_count(run.found)}.",
            f"#   retouch data validate {out}     opens every image",
            f"#   retouch check {out}             prints the derived numbers; --memory adds the memory",
            f"#   retouch train {out}",
            "# docs/configuration.md lists every key.",
            f"name: {json.dumps(f'{_as_name(out.stem)}_{run.algorithm}')}",
            "seed: 0",
            "model:",
            f"  family: {family}",
            f"  path: {json.dumps(path)}    # a folder in the diffusers layout, or a hub id",
            f"  dtype: {'fp32' if tiny else 'bf16'}    # of frozen weights",
            f"  train: {'{kind: full}' if tiny else '{kind: lora, rank: 32}'}    # full trains every weight",
            *short_prompts,
            "data:",
            f"  format: {run.found.format}",
            f"  path: {json.dumps(_from_run_file(run.data, out))}    # THIS_DIR is the folder of this file",
            f"  resolution: {size}    # side, or [height, width], in pixels",
            *([fit] if run.found.format != "prompts" else []),
            *_rollout(run),
            "rewards:",
            *_rewards(run),
            "optimizer:",
            f"  lr: {'3.0e-4' if tiny or run.trains_on_rewards else '1.0e-4'}    # for {weights}",
            f"  batch_size_per_device: {8 if tiny else 1}    # more if memory allows",
            f"  global_batch_size: {_step_size(run)}    # images an optimizer step, on all devices together",
            "training:",
            f"  max_steps: {20 if tiny else 2000}",
            f"  checkpoint_every: {10 if tiny else 200}",
            f"  eval_every: {10 if tiny else 100}",
            f"  mixed_precision: {json.dumps('no') if tiny else 'bf16'}",
            f"  gradient_checkpointing: {'false' if tiny else 'true'}    # half the memory for a third more time",
            "evaluation:",
            f"  num_examples: {min(len(run.found.items), 16)}",
            f"  data: null    # the training examples; {_split_of(run)}"
            if run.held_out is None
            else f"  data: {{format: manifest, path: {held_out}, resolution: {size}, fit: {chosen}}}",
            "",
        ]
    )


def _split_of(run: _Run) -> str:
    """The command that holds some of the examples out, and whether they are enough for it."""
    if run.examples >= _ENOUGH:  # it was tried
        return "items that share an image stay together, and no part of these could be held out"
    few = f", of about ten or more (here {run.examples})"
    return f"`retouch data split {shlex.quote(str(run.data))} --share {_HELD_OUT}` holds some out{few}"


def _as_name(stem: str) -> str:
    """A file's stem as the start of the name of a run, which has no spaces."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-_") or "run"


def _step_size(run: _Run) -> int:
    """Images of an optimizer step: two steps or fewer of the samples of an epoch."""
    return 32 if run.trains_on_rewards and not run.tiny else 8


def _from_run_file(path: Path, out: Path) -> str:
    """A path as the run file names it: an absolute one as it was given, except beside the run file, and every other
    from the folder of the run file, which is then usable from any working directory."""
    if path.is_absolute() and path.parent != out.parent:
        return str(path)
    return str(Path(THIS_DIR) / os.path.relpath(path, out.parent))


def _tiny_shape(found: Found, family: str) -> tuple[str, Fit]:
    """For a tiny base: the size of the first image, if it can be read and is of such a size, else what the base
    learned."""
    sides = _sides(found.items[0])
    if sides and all(side <= _TINY_SIDE and side % TINY_SIZE_MULTIPLE == 0 for side in sides):
        return str(list(sides)), "stretch"
    return "[32, 64]" if "mask" in FAMILIES[family].spec.needs else "32", "stretch"


def _shape(found: Found, family: str) -> tuple[str, Fit]:
    """A square of 512 pixels, if its crop cuts the mask of no example; else as many pixels in the proportions of the
    first image; else a square that ignores the proportions."""
    multiple = FAMILIES[family].spec.size_multiple
    shapes: list[tuple[tuple[int, int], Fit]] = [((_SIDE, _SIDE), "crop")]
    if sides := _sides(found.items[0]):
        scale = _SIDE / (sides[0] * sides[1]) ** 0.5
        height, width = (max(multiple, round(side * scale / multiple) * multiple) for side in sides)
        shapes.append(((height, width), "crop"))
    usable = _usable(found.items[:_LOOKED_AT], (_SIDE, _SIDE), "stretch")
    for size, fit in shapes:
        if len(_usable(usable, size, fit)) == len(usable):
            return str(_SIDE) if size == (_SIDE, _SIDE) else str(list(size)), fit
    return str(_SIDE), "stretch"


def _usable(items: Sequence[ItemFiles], size: tuple[int, int], fit: Fit) -> list[ItemFiles]:
    section = ManifestData(path="", resolution=size, fit=fit)
    return [item for item in items if not isinstance(examine(item, section), ItemError)]


def _sides(item: ItemFiles) -> tuple[int, int] | None:
    """(height, width) of the image of an item; None without one that can be read, which `retouch data validate`
    names."""
    with suppress(ImageProblem):
        if item.source_path is not None:
            width, height = open_image(item.source_path).size
            return height, width
    return None


def _rollout(run: _Run) -> list[str]:
    tiny, kind = run.tiny, ALGORITHMS[run.algorithm]
    steps = 4 if tiny else 20 if FAMILIES[run.family].spec.prediction == "epsilon" else 10
    if not run.trains_on_rewards:
        return [f"algorithm: {{name: {run.algorithm}}}", f"rollout: {{num_steps: {steps}}}    # of evaluations"]
    compares = getattr(kind.model_fields.get("baseline"), "default", "group") == "group"
    groups, group = (min(8, run.examples), 8) if compares else (min(32, run.examples), 1)
    guided = FAMILIES[run.family].spec.doubles_for_guidance
    return [
        "algorithm:",
        f"  name: {run.algorithm}",
        "  sft_steps: 0    # supervised steps before RL; they need targets (warmup_data)",
        "rollout:",
        *(["  preset: fast    # `retouch check` lists what it sets"] if "presets" in kind.READS else []),
        f"  group_size: {group}    # samples of each example, compared with each other",
        f"  global_groups_per_batch: {groups}    # different examples of a rollout batch",
        f"  batch_size_per_device: {32 if tiny else 8}    # samples generated at once",
        f"  num_steps: {steps}    # few steps are enough to rank samples",
        *(["  guidance_scale: 1.0    # without guidance: one forward a step"] if guided else []),
    ]


def _rewards(run: _Run) -> list[str]:
    """OCR if most examples have a text, of each line if one has several; else how well the image fits its prompt, and
    the edge of the mask."""
    if _mostly_texts(run.found):
        server, where = ("null", "null reads in this process")
        if run.trains_on_rewards:
            server, where = "auto", "auto starts a server for the run"
        if any(len(item.metadata.get("lines") or ()) > 1 for item in run.found.items):
            return [f"  ocr_lines: {{url: {server}}}    # similarity of each line at its own place; {where}"]
        one_line = ", detect: false" if run.tiny else ""  # in images of 32 x 64, text detection finds no line
        return [f"  ocr: {{url: {server}{one_line}}}    # similarity of the text that OCR reads; {where}"]
    masks = all(item.mask_path is not None for item in run.found.items)
    seam = ["  seam: {weight: 0.3}    # no visible edge around the mask"] if masks else []
    if run.tiny and run.found.items[0].source_path is not None:
        return ["  preservation: {}    # needs no download; a real base takes clip", *seam]
    return [
        "  # How well the image fits its prompt; hpsv2 and vlm are stronger. `url: auto` starts a server for the run,",
        "  # `device: auto` computes on a GPU if there is one.",
        f"  clip: {{url: auto, {'crop: mask_box, ' if masks else ''}device: auto}}",
        *seam,
    ]


def _count(found: Found) -> str:
    return f"{count_of(len(found.items), 'example')} ({found.layout})"
