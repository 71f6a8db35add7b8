"""Combinations of data sections that cannot work, refused before anything is opened."""

from __future__ import annotations

from retouch.config.needs import (
    data_sections,
    needed_pictures,
    reference_strip,
    takes_references,
)
from retouch.config.run import RunConfig
from retouch.data.sections import (
    DISCIPLINES,
    LEVELS,
    ComplexEditData,
    Data,
    MmmgData,
    PictureSection,
    ProtocolData,
    chosen,
)


def check_data(run: RunConfig) -> None:
    """Raise ValueError with *what you gave, what is allowed, what to set*."""
    if not run.algorithm.trains_text_encoder:
        _references(run)
    _sizes(run)
    _held_out(run)
    _curriculum(run)


def _references(run: RunConfig) -> None:
    """Where references come from, and that something looks at them; no format without the pictures that are needed."""
    for name, data in data_sections(run).items():
        if not isinstance(data, PictureSection):
            needs = needed_pictures(run, training=name == "data")
            has = {"source"} if isinstance(data, ComplexEditData) else frozenset[str]()
            told, family = ("sources alone", "qwen_image_edit") if has else ("no pictures", "qwen_image")
            if not needs <= has:
                raise ValueError(
                    f"{name}.format: given {data.format!r}, which has {told}, but the run needs "
                    f"{', '.join(sorted(needs))} of every example; set format=manifest, or train what needs no more "
                    f"(model.family={family} with full weights or LoRA)"
                )
            continue
        if data.reference_strip != reference_strip(run):
            raise ValueError(
                f"{name}.reference_strip: given {data.reference_strip}, but data.reference_strip is "
                f"{reference_strip(run)}; a model is trained and used with one: set both alike"
            )
        filled = run.data.reference_strip_fit if isinstance(run.data, PictureSection) else "contain"
        if data.reference_strip_fit != filled:
            raise ValueError(
                f"{name}.reference_strip_fit: given {data.reference_strip_fit!r}, but data.reference_strip_fit is "
                f"{filled!r}; a model is trained and used with one layout; set {name}.reference_strip_fit={filled}"
            )
        if data.reference == "given":
            continue
        if not takes_references(run, scored=True):
            raise ValueError(
                f"{name}.reference: given {data.reference!r}, but nothing looks at a reference: set "
                "model.train.kind=ip_adapter, a style reward or a reference_strip, or leave it out"
            )
        if data.reference == "half_box" and not _supervises_alone(run, name):
            raise ValueError(
                f"{name}.reference: given 'half_box', where half of a text is repainted, so that no reward can read "
                "it; name such pairs under warmup_data (SFT: data, beside evaluation.data), and set mask_box here"
            )


def _supervises_alone(run: RunConfig, section: str) -> bool:
    """Whether supervised steps, and nothing that is scored, see the examples of a section."""
    if section == "data":
        return run.algorithm.name == "sft" and run.evaluation.data is not None
    return section == "warmup_data"


def _sizes(run: RunConfig) -> None:
    multiple = run.model.size_multiple
    for name, data in data_sections(run).items():
        strip = data.reference_strip if isinstance(data, PictureSection) else None
        if strip is not None and strip % multiple:
            raise ValueError(
                f"{name}.reference_strip: given {strip}; {run.model.family} needs multiples of {multiple}; set "
                f"{max(multiple, round(strip / multiple) * multiple)}"
            )
        if any(side % multiple for side in data.size):
            nearest = [max(multiple, round(side / multiple) * multiple) for side in data.size]
            raise ValueError(
                f"{name}.resolution: given {data.resolution}; {run.model.family} needs multiples of {multiple}; "
                f"set {nearest if nearest[0] != nearest[1] else nearest[0]}"
            )
        run.model.check_size(name, data.size)


def _held_out(run: RunConfig) -> None:
    """No picture or prompt of a protocol's data may be both trained on and held out."""
    held_out = run.evaluation.data
    for name, data in (("data", run.data), ("warmup_data", run.warmup_data)):
        if not isinstance(held_out, ProtocolData) or not isinstance(data, ProtocolData) or not _overlap(data, held_out):
            continue
        if (data.part, held_out.part) != ("train", "held_out"):
            raise ValueError(
                f"evaluation.data.part: given {held_out.part!r} beside {name}.part {data.part!r} of the same path, so "
                f"that what is held out would be trained on; set {name}.part=train and evaluation.data.part=held_out"
            )
        if data.held_out_share != held_out.held_out_share:
            raise ValueError(
                f"evaluation.data.held_out_share: given {held_out.held_out_share:g}, but {name}.held_out_share is "
                f"{data.held_out_share:g}; set both to one share"
            )


def _overlap(one: Data, other: Data) -> bool:
    """Whether two sections of protocols choose from the same pictures or prompts, parts aside."""
    if one.path != other.path:
        return False
    if isinstance(one, ComplexEditData) and isinstance(other, ComplexEditData):
        return one.image_type == other.image_type or "all" in (one.image_type, other.image_type)
    if not (isinstance(one, MmmgData) and isinstance(other, MmmgData)):
        return False
    levels = {*chosen(one.levels, LEVELS)} & {*chosen(other.levels, LEVELS)}
    return bool(levels and {*chosen(one.disciplines, DISCIPLINES)} & {*chosen(other.disciplines, DISCIPLINES)})


def _curriculum(run: RunConfig) -> None:
    """Stages are those of rollouts; nothing else reads them."""
    sections = {"warmup_data": run.warmup_data, "evaluation.data": run.evaluation.data}
    unread = sections if run.algorithm.trains_on_rewards else {"data": run.data, **sections}
    for name, data in unread.items():
        if isinstance(data, ProtocolData) and data.curriculum != 1:
            raise ValueError(
                f"{name}.curriculum: given {data.curriculum}, but a curriculum is of rollouts, which draw from data; "
                "leave it out"
            )
