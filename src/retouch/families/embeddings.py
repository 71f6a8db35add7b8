"""Embeddings on disk: outputs of the frozen encoders for prompts, references and images. With them, training loads
neither the text encoders nor the reference encoder.

    FOLDER/cache.json         the model that made them
    FOLDER/text/KEY.safetensors    by the name of each tensor in the condition
    FOLDER/reference/KEY.safetensors   FOLDER/image/KEY.safetensors

A KEY is the hash of the model (its files, precision and prompt length) and of the content: prompts or pixels. An entry
can therefore be found only for the same model and content, and files that have changed are detected. The metadata of an
entry has the SHA-256 of its tensors: one that was damaged, or moved to another key, is not used. Entries of older
versions have none.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from retouch.config.errors import ConfigError
from retouch.families.image_encoder import TINY, ImageEncoder, changed_normalization, picture_key
from retouch.families.loading import component_path, transformer_folder
from retouch.families.offload import OffloadedNetworks
from retouch.files import plain_json
from retouch.files.disk import read_bounded, write_whole
from retouch.files.hub import is_hub_id
from retouch.files.model_files import fingerprint, is_same_model
from retouch.process.plain_text import count_of
from retouch.process.replacing import beside

if TYPE_CHECKING:
    from PIL.Image import Image

    from retouch.families.base import DistillationLora, Model

logger = logging.getLogger(__name__)

_MAKE_AGAIN = (
    "run `retouch data precompute` again: the data changed since, or has colour profiles, which earlier versions did "
    "not convert to sRGB"
)
"""The remedy for an image that is not in a cache, whose keys are pixels as they are read."""

_PROCESSOR = "processor_files"
"""Part of a model with the image processor of its text encoder, and perhaps the tokenizer."""


class EmbeddingCache:
    """The embeddings of one model in a folder.

    Args:
        model: of a run file.
        create: fill the cache, and make the folder if there is none; else it must exist.

    Attributes:
        added: new entries by kind: "prompts", "references", "images".

    Raises:
        ConfigError: no such cache, or one of another model: stale; to fill it, also one without a record of the
            processor.
    """

    def __init__(self, folder: Path, model: Model, *, create: bool = False) -> None:
        self.folder = folder
        self.fills = create
        self._lacks_image = False
        self._tiles = model.vae_batch == "tiles"
        self.added = {"prompts": 0, "references": 0, "images": 0}
        now, file = identity(model), folder / "cache.json"
        if create and not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(now, indent=2) + "\n")
        self._made_with = _read_identity(file)
        for name in {**now, **self._made_with}:
            value, made = now.get(name), self._made_with.get(name)
            # encoders that are not here any more cannot have changed, and a run may need none of references
            unused = value is None and (name.endswith("_files") or name.startswith("image_encoder"))
            # earlier versions did not record it; their entries are read, but new ones would not depend on it
            unused |= name == _PROCESSOR and name not in self._made_with and not create
            if not is_same_model(made, value) and not unused:
                raise ConfigError(
                    f"model.embeddings: {folder} was made with {name} {made!r}, but now it is {value!r}; run `retouch "
                    "data precompute RUN.yaml --out ...` into a new folder, or delete this one first"
                )

    def text(self, prompt: str) -> dict[str, Tensor] | None:
        """Tensors by name, as the encoders made them; None for a prompt that is not stored."""
        return self._read(self._path("text", prompt.encode()))

    def has_text(self, prompt: str) -> bool:
        return self._path("text", prompt.encode()).is_file()

    def add_text(self, prompt: str, encode: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Store the tensors of a prompt that is not stored yet."""
        if not self.has_text(prompt):
            self._write(self._path("text", prompt.encode()), encode(prompt))
            self.added["prompts"] += 1

    def reference(self, picture: Image) -> Tensor | None:
        found = self._read(self._path("reference", picture_key(picture).encode()))
        return None if found is None else found["vector"]

    def has_reference(self, picture: Image) -> bool:
        return self._path("reference", picture_key(picture).encode()).is_file()

    def add_reference(self, picture: Image, encode: Callable[[Sequence[Image]], Tensor]) -> None:
        """Store the vector of a reference that is not stored yet."""
        if not self.has_reference(picture):
            path = self._path("reference", picture_key(picture).encode())
            self._write(path, {"vector": encode([picture])[0]})
            self.added["references"] += 1

    def vector_width(self) -> int:
        """D of the vectors.

        Raises:
            ConfigError: it has none.
        """
        file = next(iter(sorted((self.folder / "reference").glob("*.safetensors"))), None)
        vectors = None if file is None else self._read(file)
        if vectors is None:
            raise ConfigError(
                f"model.embeddings: {self.folder} has no vectors of references, which model.train.kind=ip_adapter "
                "needs; run `retouch data precompute` again"
            )
        return len(vectors["vector"])

    def image(self, pixels: Tensor) -> Tensor | None:
        """Latents [C, h, w] of pixels [3, H, W]."""
        found = self._read(self._path("image", _bytes(pixels)))
        if found is None and not self.fills and not self._lacks_image:
            self._lacks_image = True
            told = (
                "model.embeddings: %s has no latents of an image, which is encoded here; if it is of the run's data, %s"
            )
            logger.info(told, self.folder, _MAKE_AGAIN)
        return None if found is None else found["latents"]

    def add_images(self, images: Tensor, latents: Tensor) -> None:
        """Store the latents [B, C, h, w] of images [B, 3, H, W], if this cache is being filled."""
        for pixels, made in zip(images, latents, strict=True):
            path = self._path("image", _bytes(pixels))
            if self.fills and not path.is_file():
                self._write(path, {"latents": made})
                self.added["images"] += 1

    def _path(self, kind: str, content: bytes) -> Path:
        of = {"reference": "image_encoder", "image": "vae_files", "text": ("text_files", _PROCESSOR)}[kind]
        names = [n for n in self._made_with if n.startswith(of) or n in ("family", "dtype", "max_sequence_length")]
        tiles = ["tiles"] if kind == "image" and self._tiles else []  # their latents differ near the edges of tiles
        model = json.dumps([self._made_with[n] for n in sorted(names)] + tiles)
        key = hashlib.sha256(model.encode() + bytes(1) + content).hexdigest()
        return self.folder / kind / f"{key}.safetensors"

    def _read(self, path: Path) -> dict[str, Tensor] | None:
        if not path.is_file():
            return None
        try:
            tensors = load_file(path)
            with safe_open(path, "pt") as file:
                recorded = (file.metadata() or {}).get("sha256")
            sound = recorded in (None, _digest(tensors, path))  # older versions recorded none
            problem = None if sound else f"its SHA-256 is not the recorded {recorded}"
        except SafetensorError as error:
            tensors, problem = {}, str(error)
        if problem is not None:
            raise ConfigError(
                f"model.embeddings: {path} is damaged ({problem}); delete it and run `retouch data precompute` again"
            )
        return tensors

    def _write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
        with beside(path) as temporary:  # a reader never finds part of a file
            save_file(kept, temporary, metadata={"sha256": _digest(kept, path)})
            temporary.replace(path)


class StoredVectors(ImageEncoder):
    """References as vectors that were computed before; no encoder.

    Raises:
        ConfigError: when called with an image that the cache does not have.
    """

    def __init__(self, cache: EmbeddingCache, width: int) -> None:
        self.cache, self.width = cache, width
        self.placement = OffloadedNetworks([], waits=True)
        self.device = torch.device("cpu")

    def __call__(self, images: Sequence[Image]) -> Tensor:
        return torch.stack([self._vector(image) for image in images])

    def _vector(self, image: Image) -> Tensor:
        vector = self.cache.reference(image)
        if vector is None:
            raise ConfigError(
                f"model.embeddings: {self.cache.folder} has no vector of a reference of {image.width} x {image.height} "
                f"pixels; {_MAKE_AGAIN}"
            )
        return vector


def open_cache(model: Model) -> EmbeddingCache | None:
    """The cache that a run file names.

    Raises:
        ConfigError: not there, or stale.
    """
    return None if model.embeddings is None else EmbeddingCache(Path(model.embeddings).expanduser(), model)


def require_prompts(model: Model, prompts: Iterable[str]) -> None:
    """Before minutes go into loading: every prompt must be in the cache that the run file names.

    Raises:
        ConfigError: the cache does not exist, is stale, or has no entry for a prompt.
    """
    cache = open_cache(model)
    if cache is not None and (lacking := prompts_missing(cache, model, prompts)):
        raise ConfigError(
            f"model.embeddings: {cache.folder} lacks {count_of(len(lacking), 'prompt')} of the run, {lacking[0]!r} "
            "among them; run `retouch data precompute` again: the data changed since"
        )


def prompts_missing(cache: EmbeddingCache, model: Model, prompts: Iterable[str]) -> list[str]:
    """Those of some prompts, and of the prompts that the model adds for guidance, that are not stored."""
    guidance = model.fixed_prompts if model.doubles_for_guidance else ()
    return [prompt for prompt in (*guidance, *prompts) if not cache.has_text(prompt)]


def identity(model: Model) -> dict[str, Any]:
    """Settings and files that embeddings depend on. Files count by a sample of their bytes; None if they are absent."""
    path = component_path(model.path, model.family)
    made: dict[str, Any] = {
        "family": model.family,
        "dtype": model.dtype,
        "max_sequence_length": getattr(model, "max_sequence_length", None),
        "text_files": fingerprint(_folders(path, ("text_encoder", "tokenizer"))),
        "vae_files": fingerprint(_folders(path, ("vae",))),
    }
    if model.weights_variant is not None:  # caches of earlier versions have no such key
        made["weights_variant"] = model.weights_variant
    if model.spec.has_processor:
        made[_PROCESSOR] = fingerprint(_folders(path, ("processor",)))
    encoder = model.reference_encoder
    if encoder is not None:
        made["image_encoder"] = encoder
        folder = TINY if encoder == "tiny" else _local(encoder, "config.json")
        made["image_encoder_files"] = fingerprint([folder] if folder is not None and folder.is_dir() else [])
        if folder is not None and (pixels := changed_normalization(folder)) is not None:
            made["image_encoder_normalization"] = [list(values) for values in pixels]
    return made


def base_files(model: Model) -> dict[str, str | None]:
    """Fingerprints of the files that a model is made of, by part. None where they are not here."""
    networks = _folders(component_path(model.path, model.family), ("transformer", "unet"))
    if model.transformer is not None:
        folder = transformer_folder(model.transformer)
        networks = [] if folder is None else [folder]
    found = {name: value for name, value in identity(model).items() if name.endswith("_files")}
    if model.merged_lora is not None:
        found["distillation_lora_files"] = fingerprint(_lora_files(model.merged_lora))
    return {"network_files": fingerprint(networks), **found}


def _lora_files(lora: DistillationLora) -> list[Path]:
    """The file of a LoRA, or the folder that it is the only one in; none of the hub that is not here or has no name."""
    path = Path(lora.path).expanduser()
    if path.exists():
        return [path / lora.weight_name if lora.weight_name and path.is_dir() else path]
    named = lora.weight_name if is_hub_id(lora.path) else None
    found = try_to_load_from_cache(lora.path, named) if named else None
    return [Path(found)] if isinstance(found, str) else []


def _folders(path: str, prefixes: tuple[str, ...]) -> list[Path]:
    """Subfolders of a model whose names start so; none where it is not on this machine."""
    folder = _local(path, "model_index.json")
    if folder is None:
        return []
    return sorted(sub for sub in folder.iterdir() if sub.is_dir() and sub.name.startswith(prefixes))


def _local(path: str, file: str) -> Path | None:
    """The folder itself, or where the hub's files are kept; None where it is not on this machine any more."""
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    if path.count("/") != 1:  # no hub id
        return None
    found = try_to_load_from_cache(path, file)
    return Path(found).parent if isinstance(found, str) else None


def _read_identity(file: Path) -> dict[str, Any]:
    try:
        made = plain_json.loads(read_bounded(file, 1 << 20))
    except OSError:
        raise ConfigError(
            f"model.embeddings: {file.parent} holds no embeddings (no cache.json); run `retouch data precompute "
            f"RUN.yaml --out {file.parent}`"
        ) from None
    except ValueError:
        made = None
    if not isinstance(made, dict):
        raise ConfigError(f"model.embeddings: {file} is damaged; delete the folder and run `retouch data precompute`")
    return made  # pyright: ignore[reportUnknownVariableType]


def _digest(tensors: Mapping[str, Tensor], path: Path) -> str:
    """SHA-256 of the key of an entry and of names, types, shapes and bytes of its tensors."""
    found = hashlib.sha256(path.stem.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _bytes(pixels: Tensor) -> bytes:
    values = pixels.detach().cpu().contiguous()
    return f"{tuple(values.shape)} {values.dtype}".encode() + values.numpy().tobytes()
