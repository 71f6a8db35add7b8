"""The image encoder of a style adapter and the initial adapter: complete, of the right class and sizes? And the file of
a distillation LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from retouch.config.errors import ConfigError
from retouch.doctor.line import Line
from retouch.doctor.networks import Networks, asked_adapter, encoder_folder, meta_encoder
from retouch.errors import first_line
from retouch.families.base import Model, TrainLora
from retouch.files.hub import looks_local
from retouch.files.model_files import STEMS, Damaged, weights_of


def adapter_lines(model: Model, networks: Networks) -> Iterator[Line]:
    """Lines on the style adapter or the initial LoRA; none without either, or without torch."""
    if model.train.kind == "lora" and model.train.initial_adapter is not None:
        yield from _initial_lora_lines(model.train, model, networks)
    name = model.reference_encoder
    if name is None:
        return
    try:
        yield _encoder_line(name, model.weights_variant)
    except ImportError:
        return
    initial = model.train.initial_adapter if model.train.kind == "ip_adapter" else None
    if initial is not None:
        yield _initial_line(model, networks, initial)


def distillation_lines(model: Model) -> Iterator[Line]:
    """A line on the file of `model.distillation_lora`; none without one."""
    lora = model.merged_lora
    if lora is None:
        return
    what, path = "distillation LoRA", Path(lora.path).expanduser()
    file = path / lora.weight_name if lora.weight_name and path.is_dir() else path
    if file.exists():
        yield Line("ok", what, str(file))
    elif looks_local(lora.path) or path.is_dir():
        yield Line("fix", what, f"model.distillation_lora: {file}: no such file; give a hub id, folder or file")
    else:
        yield Line("warning", what, f"{lora.path} is a hub id; the run downloads {lora.weight_name or 'its only file'}")


def _encoder_line(name: str, variant: str | None) -> Line:
    what, folder = "image encoder", encoder_folder(name)
    if folder is None:
        return Line("warning", what, f"{name} is not on this machine; the run downloads it")
    if not folder.is_dir():
        return Line("fix", what, f"model.train.image_encoder: {name}: no such folder; give a folder or a hub id")
    try:
        encoder, width = meta_encoder(folder)
        _complete(folder, set(encoder.state_dict()), variant)
    except (ConfigError, Damaged, OSError, ValueError, TypeError) as error:
        return Line("fix", what, f"model.train.image_encoder: {first_line(error)}; copy it anew, or set another")
    return Line("ok", what, f"{folder}: a {type(encoder).__name__}, its files complete, vectors of width {width}")


def _complete(folder: Path, names: set[str], variant: str | None) -> None:
    """Check that every weight is in the files; in those of a whole SigLIP or CLIP, names have a prefix."""
    shapes = weights_of(folder, *STEMS, variant)
    there = {name.removeprefix("vision_model.") for name in shapes}
    lacking = sorted(name for name in names if name.removeprefix("vision_model.") not in there)
    if shapes and lacking:
        raise Damaged(f"{folder} has no {lacking[0]} among its weights")


def _initial_lora_lines(train: TrainLora, model: Model, networks: Networks) -> Iterator[Line]:
    try:
        from retouch.adapters.initial_lora import initial_lora, lora_file, require_initial_lora
    except ImportError:
        return
    what, network = "initial adapter", networks.parts.get(model.spec.network_name)
    try:
        require_initial_lora(train)
        if network is not None:
            initial_lora(network, train, model.spec)
        unknown = "; whether it fits is not known without the model" if network is None else ""
        yield Line("ok", what, f"{lora_file(train.initial_adapter or '')}: a LoRA{unknown}")
    except ConfigError as error:
        yield Line("fix", what, str(error))


def _initial_line(model: Model, networks: Networks, path: str) -> Line:
    from retouch.adapters.formats import describe_unused
    from retouch.adapters.train_ip_adapter import describe, initial_adapter, require_shape

    what = "initial adapter"
    try:
        given = initial_adapter(model.train, model.family)
        assert given is not None
        wanted = asked_adapter(model, networks)
        if wanted is not None:
            require_shape(given, wanted, path)
    except ConfigError as error:
        return Line("fix", what, str(error))
    unknown = "" if wanted is not None else "; whether it fits is not known without the model"
    found = f"{path}: whole, {describe(given)}{unknown}"
    return (
        Line("warning", what, f"{found}; {describe_unused(given.unused)}") if given.unused else Line("ok", what, found)
    )
