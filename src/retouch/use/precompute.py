"""`retouch data precompute`: outputs of the frozen encoders for the data of a run, on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from retouch.config import RunConfig
from retouch.config.needs import DATA_SECTIONS, data_sections, needed_pictures, require_usable_embeddings
from retouch.data.base import DataSection, ItemError, ItemFiles
from retouch.data.dataset import Dataset, load_dataset
from retouch.engine.speed import choose_kernels
from retouch.families.diffusion import FamilyModel
from retouch.families.embeddings import EmbeddingCache
from retouch.families.inputs import image_pixels
from retouch.families.loading import load_model
from retouch.families.prompts import PromptCheck
from retouch.families.text import TextEncoders
from retouch.imaging.fitting import stack_above


def precompute(config: RunConfig, folder: Path) -> dict[str, int]:
    """Encode the prompts, references and images of a run, each example alone as training does, into a folder -> new
    entries by kind. Uses a GPU and its kernels if there is one, as training does: the last bits would differ elsewhere.

    Raises:
        ConfigError, DataError, ModelFilesError: a run that can use no embeddings; a folder of another model; no usable
            data or model.
    """
    require_usable_embeddings(config)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    choose_kernels(device, config.training)
    given = config.model.model_copy(update={"embeddings": None})
    cache = EmbeddingCache(folder.expanduser(), given, create=True)
    model: FamilyModel = load_model(given, device, filling=cache)  # type: ignore[assignment]
    sections = datasets(config)
    with model.encoding():  # the networks are moved to the device once
        for prompt in [*(prompt for data in sections for prompt in data.prompts), *given.fixed_prompts]:
            cache.add_text(prompt, lambda missing: model.texts().rows([missing])[0])
    model.text = TextEncoders({}, device, stored=cache)  # they are not beside the networks for images, nor in memory
    with model.encoding():
        for example in (example for data in sections for example in data):
            if model.image_encoder is not None and example.reference is not None:
                cache.add_reference(example.reference, model.image_encoder)
            model.encode([example], 1.0)
            for image in (example.target, example.win, example.lose):  # of supervised steps and given pairs
                if image is not None:
                    model.encode_images(image_pixels(stack_above(example.strip, image))[None])
    return cache.added


def datasets(config: RunConfig) -> list[Dataset]:
    """Every data section of a run. Items whose text no encoder reads are counted, but stay: training leaves them out
    only where it has the tokenizers, and requires the embeddings of the others."""
    check = PromptCheck(config)

    def tolerant(section: DataSection, items: Sequence[ItemFiles]) -> tuple[Sequence[str], Mapping[int, ItemError]]:
        warnings, problems = check(section, items)
        if len(problems) > section.max_bad_items:
            return warnings, problems
        return [*warnings, *map(str, problems.values())], {}

    needs = {name: needed_pictures(config, training=name == "data") for name in DATA_SECTIONS}
    sections = data_sections(config)
    return [load_dataset(sections[name], name, needs[name], check_prompts=tolerant) for name in sections]
