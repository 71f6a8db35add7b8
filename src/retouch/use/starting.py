"""A first run file for a folder of images: `retouch init`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from retouch import families
from retouch.config import ConfigError, RunConfig, load_run, numbers
from retouch.config.errors import nearest
from retouch.data.dataset import DataError
from retouch.data.discover import Found, discover
from retouch.data.split import split
from retouch.families.base import Model
from retouch.texts import has_text

ALGORITHMS = ("dpo", "grpo", "nft", "ppo", "sft")
FAMILIES = ("flux_fill", "sd_inpaint", "qwen_image_edit")
"""Families that repaint or edit images."""

_BASES: dict[str, str] = {
    section.model_fields["family"].default: section.model_fields["path"].default
    for section in get_args(get_args(Model)[0])
}
"""Released model of each family."""

_HELD_OUT = 0.2
_ENOUGH = 8
"""Examples from which on some are held out."""

_SHOWN = 5
"""Images that are left out and named one by one."""


@dataclass(frozen=True)
class Started:
    """What `retouch init` did.

    Attributes:
        lines: for the terminal.
        config: the run file that was written, validated.
    """

    lines: list[str]
    config: RunConfig


def start(folder: Path, out: Path, family: str, algorithm: str, model: str | None) -> Started:
    """Write a run file for the images of a folder and, where they have no list that can be read, a manifest beside it.

    Args:
        model: `model.path`; None: $MODEL_PATH, or the released model of the family.

    Raises:
        ConfigError: an unknown family or algorithm, files that exist, or images that do not fit the family.
        DataError: no data set in the folder.
    """
    for option, given, known in (("--family", family, FAMILIES), ("--algorithm", algorithm, ALGORITHMS)):
        if given not in known:
            raise ConfigError(f"{option}: given {given!r}; {nearest(given, known)}")
    found = discover(folder)
    _require_fit(found, folder, family)
    manifest = out.with_name(f"{out.stem}_data.json")
    for file in (out, *([manifest] if found.path is None else [])):
        if file.exists():
            raise ConfigError(f"--out: {file} exists; set --out to another path, or delete it")
    data = found.path
    held_out, examples = None, len(found.items)
    if data is None:
        data, held_out, examples = _write_manifest(found, manifest)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_run_file(found, data, held_out, examples, out, family, algorithm, model), encoding="utf-8")
    config = load_run(out)
    numbers(config)  # a run file that `retouch check` takes
    texts = sum(map(has_text, found.items))
    masks = sum(item.mask_path is not None for item in found.items)
    examples = _count(len(found.items), "example")
    lines = [f"{folder}: {examples} ({found.what}), {masks} with a mask, {texts} with a text to write"]
    lines += [f"left out: {problem}" for problem in found.left_out[:_SHOWN]]
    lines += [f"left out: {len(found.left_out) - _SHOWN} more"] if len(found.left_out) > _SHOWN else []
    lines += [f"{file}: written" for file in (data if found.path is None else None, held_out) if file is not None]
    lines += [f"{out}: {algorithm} on {family}, rewards {', '.join(config.rewards)}"]
    lines += [f"next: retouch data validate {out}; retouch check {out}; retouch train {out}"]
    return Started(lines, config)


def _require_fit(found: Found, folder: Path, family: str) -> None:
    without = [item for item in found.items if item.mask_path is None]
    if without and "mask" in families.FAMILIES[family].spec.needs:
        raise ConfigError(
            f"--family: given {family!r}, which repaints inside a mask, but {len(without)} of "
            f"{len(found.items)} images of {folder} have none; add photo_mask.png beside photo.png "
            "(white where to repaint), or set --family=qwen_image_edit, which edits whole images"
        )


def _write_manifest(found: Found, manifest: Path) -> tuple[Path, Path | None, int]:
    """Write the examples -> the manifest to train on, that of held-out ones, and how many there are to train on.

    Paths are relative to the manifest."""
    manifest.parent.mkdir(parents=True, exist_ok=True)
    entries = [
        {
            key: value if key == "prompt" else os.path.relpath(value, manifest.parent.resolve())
            for key, value in e.items()
        }
        for e in found.entries
    ]
    manifest.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if len(entries) < _ENOUGH:
        return manifest, None, len(entries)
    try:
        halves = split(manifest, _HELD_OUT)
    except DataError:  # one half would be empty
        return manifest, None, len(entries)
    (train, count), (held_out, _) = halves.items()
    return train, held_out, count


def _run_file(
    found: Found,
    data: Path,
    held_out: Path | None,
    examples: int,
    out: Path,
    family: str,
    algorithm: str,
    model: str | None,
) -> str:
    """The run file as text, with a comment for each choice.

    Args:
        examples: to train on.
    """
    tiny = model == "tiny"
    path = f"${{MODEL_PATH:-{_BASES[family]}}}" if model is None else model
    train = "{kind: full}" if tiny else "{kind: lora, rank: 32}"
    lines = [
        f"# {algorithm} on {family}, written by `retouch init`: {_count(len(found.items), 'example')} ({found.what}).",
        f"#   retouch data validate {out}     opens every image",
        f"#   retouch check {out}             prints what the run amounts to; --memory adds the memory",
        f"#   retouch train {out}",
        "# docs/configuration.md lists every key.",
        f"name: {_name(out, algorithm)}",
        "seed: 0",
        "model:",
        f"  family: {family}",
        f"  path: {json.dumps(path)}    # a folder in the diffusers layout, or a hub id",
        f"  dtype: {'fp32' if tiny else 'bf16'}    # of frozen weights",
        f"  train: {train}    # full trains every weight",
        *(["  max_sequence_length: 24    # of the tiny base"] if tiny and family == "flux_fill" else []),
        *_data(found, data, tiny),
    ]
    lines += _rollout(examples, family, algorithm, tiny)
    lines += _rewards(found, algorithm, tiny)
    rows = 8 if tiny else 1
    lines += [
        "optimizer:",
        f"  lr: {'3.0e-4' if tiny or algorithm != 'sft' else '1.0e-4'}    # for {'full weights' if tiny else 'LoRA'}",
        f"  batch_size_per_device: {rows}    # more where memory allows",
        f"  gradient_accumulation: {1 if tiny else 8}    # 8 images an optimizer step on each device",
        "training:",
        f"  max_steps: {20 if tiny else 2000}",
        f"  checkpoint_every: {10 if tiny else 200}",
        f"  eval_every: {10 if tiny else 100}",
        f"  mixed_precision: {json.dumps('no') if tiny else 'bf16'}",
        f"  gradient_checkpointing: {'false' if tiny else 'true'}    # half the memory for a third more time",
        "evaluation:",
        *_evaluation(found, held_out, tiny),
    ]
    return "\n".join(lines) + "\n"


def _name(out: Path, algorithm: str) -> str:
    return json.dumps(f"{out.stem}_{algorithm}")


def _data(found: Found, data: Path, tiny: bool) -> list[str]:
    size, fit = ("[32, 64]", "stretch") if tiny else ("512", "crop")
    return [
        "data:",
        f"  format: {found.format}",
        f"  path: {json.dumps(str(data))}    # relative to the folder that retouch is started in",
        f"  resolution: {size}    # side, or [height, width], in pixels",
        f"  fit: {fit}    # crop cuts a window around the mask, stretch ignores the aspect ratio",
    ]


def _rollout(examples: int, family: str, algorithm: str, tiny: bool) -> list[str]:
    steps = 4 if tiny else 20 if family == "sd_inpaint" else 10
    if algorithm == "sft":
        return ["algorithm: {name: sft}", f"rollout: {{num_steps: {steps}}}    # of evaluations"]
    groups, group = (min(32, examples), 1) if algorithm == "ppo" else (min(8, examples), 8)
    guided = families.FAMILIES[family].spec.doubles_for_guidance
    return [
        "algorithm:",
        f"  name: {algorithm}",
        "  sft_steps: 0    # supervised steps before RL; they need targets (warmup_data)",
        "rollout:",
        *([] if algorithm == "dpo" else ["  preset: fast    # `retouch check` lists what it sets"]),
        f"  group_size: {group}    # samples of each example, compared with each other",
        f"  global_groups_per_batch: {groups}    # different examples of a rollout batch",
        f"  batch_size_per_device: {8 if not tiny else 32}    # samples generated at once",
        f"  num_steps: {steps}    # few steps are enough to rank samples",
        *(["  guidance_scale: 1.0    # without guidance: one forward a step"] if guided else []),
    ]


def _rewards(found: Found, algorithm: str, tiny: bool) -> list[str]:
    """OCR where there is a text to write; else how well the image fits its description, and the edge of the mask."""
    if found.items and all(map(has_text, found.items)):
        server = "auto" if algorithm != "sft" else "null"
        where = "auto starts a server for the run" if algorithm != "sft" else "null reads in this process"
        one_line = ", detect: false" if tiny else ""  # of images of 32 x 64, text detection finds no line
        return ["rewards:", f"  ocr: {{url: {server}{one_line}}}    # similarity of the text that OCR reads; {where}"]
    masks = all(item.mask_path is not None for item in found.items)
    seam = ["  seam: {weight: 0.3}    # no visible edge around the mask"] if masks else []
    if tiny:
        return ["rewards:", "  preservation: {}    # needs no download; a real base takes clip", *seam]
    crop = "crop: mask_box, " if masks else ""
    return [
        "rewards:",
        "  # How well the image fits its prompt; hpsv2 and vlm are stronger. `url: auto` starts a server for the run,",
        "  # `device: auto` computes on a GPU where there is one.",
        f"  clip: {{url: auto, {crop}device: auto}}",
        *seam,
    ]


def _evaluation(found: Found, held_out: Path | None, tiny: bool) -> list[str]:
    lines = [f"  num_examples: {min(len(found.items), 16)}"]
    if held_out is None:
        return [*lines, "  data: null    # the training examples; `retouch data split` holds some out"]
    size, fit = ("[32, 64]", "stretch") if tiny else ("512", "crop")
    path = json.dumps(str(held_out))
    return [*lines, f"  data: {{format: manifest, path: {path}, resolution: {size}, fit: {fit}}}"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
