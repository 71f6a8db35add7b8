"""The networks of a run without their weights: built on the meta device from configs alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.config.errors import ConfigError
from retouch.doctor.model import FoundModel, loaded
from retouch.errors import first_line
from retouch.families.base import FamilySpec, Model, TrainIpAdapter
from retouch.families.facts import AdapterFacts
from retouch.files import plain_json
from retouch.files.hub import hub_problem, refusal
from retouch.files.model_files import tiny_path
from retouch.registry import load_attribute

if TYPE_CHECKING:
    from retouch.adapters.shape import AdapterShape


@dataclass(frozen=True)
class Networks:
    """The networks of a run that could be built.

    Attributes:
        parts: component -> what stays in memory of its network, on the meta device; without those whose config is
            missing.
        encoder: of references, for a style adapter.
        reference_width: of its vectors; also set for a released encoder that is not on this machine.
        whole: whether nothing was left out.
    """

    parts: dict[str, Any] = field(default_factory=dict[str, Any])
    encoder: Any = None
    reference_width: int | None = None
    whole: bool = False


def build_networks(model: Model, found: FoundModel, *, download: bool = False) -> Networks:
    """Build the networks from their configs on the meta device. For a hub id that is not on this machine, build the
    trained network at its released size; for the Qwen families, the other networks too.

    Args:
        download: get the configs (and nothing else) of a hub id that is not on this machine.

    Raises:
        ModelFilesError: `download`, and a config is damaged.
        ConfigError: `download`, and the config of a hub id can neither be downloaded nor is its size known.
    """
    try:
        from retouch.families.loading import ModelFilesError
        from retouch.families.meta import component_on_meta
    except ImportError:  # no torch: reported in the line of the extra
        return Networks()
    if found.problems and found.folder is None:
        return Networks()
    folder = found.folder or (_fetch(model, embedded=found.embedded) if download else None)
    kinds = loaded(model, embedded=found.embedded, folder=folder)
    other = found.transformer or (_fetch_transformer(model) if download and folder is not None else None)
    places = FoundModel(folder, transformer=other)
    parts: dict[str, Any] = {}
    for name, kind in kinds.items():
        place = places.network_folder(model, name)
        if place is None:
            continue
        try:
            parts[name] = load_attribute(model.spec.model).kept(name, component_on_meta(place, kind))
        except ModelFilesError:  # reported in the model's line
            if download:
                raise
    if folder is None and found.missing:
        parts = {name: made for name, made in released_parts(model.spec).items() if name in kinds}
    # where one cannot be had, waiting for the other is in vain
    encoder, width = _encoder(model, download=download and folder is not None)
    encoder = None if model.embeddings is not None else encoder  # its vectors are there already
    needed = len(kinds) + (model.train.kind == "ip_adapter" and model.embeddings is None)
    return Networks(parts, encoder, width, len(parts) + (encoder is not None) == needed)


def released_parts(spec: FamilySpec) -> dict[str, Any]:
    """`Networks.parts` at the released sizes, as far as the family records them."""
    from retouch.families.meta import released_networks

    family = load_attribute(spec.model)
    return {name: family.kept(name, made) for name, made in released_networks(spec).items()}


def asked_adapter(model: Model, networks: Networks) -> AdapterShape | None:
    """Sizes of the style adapter of `model.train`; None if the network or the encoder is unknown."""
    from retouch.adapters.train_ip_adapter import wanted_shape

    train = model.train
    network = networks.parts.get(model.spec.network_name)
    if not isinstance(train, TrainIpAdapter) or network is None or networks.reference_width is None:
        return None
    return wanted_shape(network, train, model.spec, networks.reference_width)


def encoder_folder(name: str) -> Path | None:
    """Folder of an image encoder on this machine: a local one, the one of the package, or the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    folder = tiny_path("image_encoder") if name == "tiny" else Path(name).expanduser()
    if folder.is_dir() or name.count("/") != 1:
        return folder
    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def encoder_class(folder: Path) -> tuple[Any, str]:
    """Class of an image encoder, and which of its outputs is the vector.

    Raises:
        ConfigError: no config, or a model of another kind.
    """
    from retouch.families.image_encoder import KINDS

    try:
        kind = plain_json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        raise ConfigError(f"{folder} has no config.json of a model") from None
    if kind not in KINDS:
        raise ConfigError(f"{folder} is a {kind} model; give a SigLIP or a CLIP")
    return KINDS[kind]


def meta_encoder(folder: Path) -> tuple[Any, int]:
    """An image encoder on the meta device, and the width of its vectors.

    Raises:
        ConfigError: no config, or a model of another kind.
    """
    from transformers import AutoConfig

    from retouch.families.image_encoder import vision_config

    return _on_meta(*encoder_class(folder), vision_config(AutoConfig.from_pretrained(folder)))


def released_encoder(facts: AdapterFacts) -> tuple[Any, int]:
    """As `meta_encoder`, of the default encoder; no encoder if its config is not known."""
    from retouch.families.image_encoder import KINDS

    if not facts.encoder:
        return None, facts.width
    kind, output = KINDS[facts.encoder["model_type"]]
    return _on_meta(kind, output, kind.config_class(**facts.encoder))


def _on_meta(kind: Any, output: str, config: Any) -> tuple[Any, int]:
    from retouch.families.meta import on_meta

    width = config.projection_dim if output == "image_embeds" else config.hidden_size
    return on_meta(lambda: kind(config)), int(width)


def _encoder(model: Model, *, download: bool) -> tuple[Any, int | None]:
    name, facts = model.reference_encoder, model.spec.adapter
    if name is None or facts is None:
        return None, None
    known = name == facts.image_encoder
    folder = encoder_folder(name)
    if folder is None and download:
        folder = _fetched(name, "config.json", known)
    try:
        if folder is not None:
            return meta_encoder(folder)
    except ConfigError:  # reported in a line of its own
        return None, facts.width if known else None
    return released_encoder(facts) if known else (None, None)


def _fetch(model: Model, *, embedded: bool) -> Path | None:
    """The configs of a hub id; None where they cannot be had, but its trained network is known."""
    known, top = model.path in model.spec.hub_ids, None
    if model.spec.optional and (top := _fetched(model.path, "model_index.json", known)) is None:
        return None
    for name in loaded(model, embedded=embedded, folder=top):
        top = _fetched(model.path, f"{name}/config.json", known)
        if top is None:
            return None
    return top


def _fetch_transformer(model: Model) -> Path | None:
    """The config of a hub id of `model.transformer`; None without one."""
    other = model.transformer
    if other is None:
        return None
    top = _fetched(other.path, f"{other.subfolder}/config.json" if other.subfolder else "config.json", False)
    return None if top is None else top / (other.subfolder or "")


def _fetched(hub_id: str, file: str, known: bool) -> Path | None:
    """Top folder of the snapshot that a small file of a hub id was downloaded to."""
    import huggingface_hub

    absent = hub_problem()
    try:
        path = Path(huggingface_hub.hf_hub_download(hub_id, file))
    except (OSError, ValueError) as error:
        if known:
            return None
        reason = refusal(error, hub_id) or (
            f"{absent or first_line(error)}; check the id and the network (gated ones need HF_TOKEN), or give a folder"
        )
        raise ConfigError(f"{hub_id}: its {file} cannot be had: {reason}") from None
    return path.parents[file.count("/")]
