"""A page on loopback to mask an image and compare samples of the base and the trained weights."""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from retouch.config import RunConfig
from retouch.config.needs import takes_references
from retouch.data.base import DataSection, ItemFiles
from retouch.errors import ConfigError, RetouchError
from retouch.imaging.reading import as_shown, to_rgb
from retouch.use.items import SampleRequest, items_to_sample
from retouch.use.loaded import Loaded, for_items, free_memory
from retouch.use.sampling import generate
from retouch.use.trained import Trained

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"

_PAINT = "paint over the region to repaint"

Drawing = Mapping[str, Any]
"""The value of the page's editor: `background`, and `layers` of paint, RGBA of its size."""


@dataclass(frozen=True)
class Asked:
    """The inputs other than image and mask; "" or None if empty."""

    text: str = ""
    prompt: str = ""
    reference: Image.Image | None = None
    seed: int = 0
    steps: int | None = None


class Studio:
    """A model in memory with the base's and the trained weights.

    Raises:
        ConfigError: a run that trained a text encoder, or a family that takes no source image.
    """

    def __init__(self, trained: Trained) -> None:
        if trained.config.algorithm.trains_text_encoder:
            raise ConfigError("demo-ui: the run trained a text encoder; use `retouch sample`")
        spec = trained.config.model.spec
        if "source" not in spec.needs and not spec.edits:
            raise ConfigError(
                f"demo-ui: {spec.family} generates from prompts, without a source image; use `retouch sample --data`"
            )
        self.edits = trained.config.model.edits_whole_images
        self.trained = trained
        self._config = trained.config
        self._loaded: Loaded | None = None
        if self._config.model.embeddings is None:  # else the first item decides which encoders are needed
            self._loaded = self._load(self._config)

    @property
    def takes_references(self) -> bool:
        return takes_references(self.trained.config, scored=False)

    def repaint(self, drawing: Drawing | None, asked: Asked) -> list[Image.Image]:
        """Samples of the base and of the trained weights, if any, from the same noise; equal to `retouch sample`.

        Raises:
            ConfigError, DataError, ImageProblem: a missing input, or one that the run cannot take.
        """
        request = _request(drawing, asked, edits=self.edits)
        if self.takes_references and asked.reference is None:
            raise ConfigError("choose a style reference")
        section, items = items_to_sample(self.trained.config, request)
        loaded = self._for(items, section)
        images: list[Image.Image] = []
        for weights in [None] if self.trained.newest is None else [None, self.trained.newest]:
            loaded.load(weights)
            images += [sample.image() for sample in generate(loaded, items[0], section, request)]
        return images

    def _for(self, items: Sequence[ItemFiles], section: DataSection) -> Loaded:
        """The model; with its encoders from the first item on that `model.embeddings` has no entry for."""
        config = for_items(self._config, items, section)
        if self._loaded is None or config is not self._config:
            self._loaded = None
            free_memory()
            self._loaded = self._load(config)
            self._config = config
        return self._loaded

    def _load(self, config: RunConfig) -> Loaded:
        return Loaded(config, keep_base=self.trained.newest is not None)


def serve(trained: Trained, port: int) -> None:
    """Serve the page on loopback until stopped.

    Raises:
        ConfigError: the port is taken.
    """
    gradio: Any = importlib.import_module("gradio")  # a missing package is reported before a model is loaded
    with socket.socket() as probe:
        if probe.connect_ex((_HOST, port)) == 0:
            raise ConfigError(f"--port: given {port}, which is in use; set another")
    page(gradio, Studio(trained)).launch(server_name=_HOST, server_port=port, share=False)


def page(gradio: Any, studio: Studio) -> Any:
    """Build the page."""

    def repaint(drawing: Any, text: str, prompt: str, seed: float, steps: float | None, reference: Any = None) -> Any:
        asked = Asked(text, prompt, reference, int(seed or 0), int(steps) if steps else None)
        try:
            images = studio.repaint(drawing, asked)
        except (ValueError, RuntimeError) as error:
            raise gradio.Error(_said(error)) from None
        return images if len(images) > 1 else [*images, None]

    todo = "describe the edit, and optionally paint over the region to keep it to" if studio.edits else _PAINT
    with gradio.Blocks(title="retouch", analytics_enabled=False) as blocks:
        gradio.Markdown(f"## {studio.trained.config.name}: {todo}")
        with gradio.Row():
            drawing = gradio.ImageEditor(type="pil", label="Image", brush=gradio.Brush(colors=["#ffffff"]))
            with gradio.Column():
                text = gradio.Textbox(label="Target text")
                prompt = gradio.Textbox(label="Whole prompt, instead of the text")
                seed = gradio.Number(0, label="Seed", precision=0)
                steps = gradio.Number(None, label="Steps; empty: the run's", precision=0)
                given = [drawing, text, prompt, seed, steps]
                if studio.takes_references:
                    given.append(gradio.Image(type="pil", label="Style"))
                button = gradio.Button("Sample", variant="primary")
        with gradio.Row():
            shown = [gradio.Image(label=name, format="png") for name in ("Base", "Trained")]
        button.click(repaint, given, shown, api_name="sample")
    return blocks


def _said(error: Exception) -> str:
    """The message for the page; unexpected errors are logged."""
    if isinstance(error, RetouchError):
        return str(error)
    logger.error("no sample", exc_info=error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'see the log')}"


def _request(drawing: Drawing | None, asked: Asked, *, edits: bool) -> SampleRequest:
    """The request for `items_to_sample`; with `edits` an empty mask means the whole image."""
    if drawing is None or drawing["background"] is None:
        raise ConfigError("choose an image first")
    source = to_rgb(as_shown(drawing["background"]))
    paint = [np.asarray(layer.convert("RGBA"))[..., 3] for layer in drawing["layers"]]
    mask = np.maximum.reduce(paint) if paint else np.zeros((source.height, source.width), np.uint8)
    painted = bool(mask.any())
    if not painted and not edits:
        raise ConfigError(_PAINT)
    if not asked.text.strip() and not asked.prompt.strip():
        raise ConfigError("enter a target text or a whole prompt")
    return SampleRequest(
        image=source,
        masks=(Image.fromarray(mask),) if painted else (),
        texts=(asked.text,) if asked.text else (),
        prompt=asked.prompt or None,
        reference=asked.reference,
        seed=asked.seed,
        steps=asked.steps,
        invert_mask=False,
    )
