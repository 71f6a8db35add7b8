"""A page on loopback to mask an image, or enter a prompt, and compare samples of the base and the trained weights."""

from __future__ import annotations

import importlib
import logging
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from retouch.config import RunConfig
from retouch.config.base import MOST_STEPS
from retouch.config.needs import takes_references
from retouch.data.base import DataSection, ItemFiles
from retouch.errors import ConfigError, RetouchError
from retouch.files.complete import complete_checkpoints
from retouch.imaging.reading import as_shown, to_rgb
from retouch.use.items import SampleRequest, items_to_sample, takes_source
from retouch.use.loaded import Loaded, for_items, free_memory
from retouch.use.sampling import generate
from retouch.use.trained import Trained, weights_folder

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"

_PAINT = "paint over the region to repaint"

_BRUSH = ("#ff2d55", 0.5)
"""Colour and opacity of the brush: the image stays visible below it."""

_MOST = 8
"""Samples of a click."""

Drawing = Mapping[str, Any]
"""The value of the page's editor: `background`, and `layers` of paint, RGBA of its size."""


@dataclass(frozen=True)
class Asked:
    """The inputs other than image and mask; "" or None if empty.

    Attributes:
        count: samples of the base, and of the trained weights.
        strength: share of the trained change that is applied.
        checkpoint: name of one of `Studio.checkpoints`; "" is the newest.
    """

    text: str = ""
    prompt: str = ""
    reference: Image.Image | None = None
    seed: int = 0
    steps: int | None = None
    count: int = 1
    strength: float = 1.0
    checkpoint: str = ""


class Studio:
    """A model in memory with the base's and the trained weights.

    Attributes:
        edits: nothing painted means the whole image.
        takes_image: the model reads a source image; else it generates from the prompt.
        checkpoints: name -> folder of the weights that can be compared with the base, newest first.

    Raises:
        ConfigError: a run that trained a text encoder.
    """

    def __init__(self, trained: Trained) -> None:
        if trained.config.algorithm.trains_text_encoder:
            raise ConfigError("demo-ui: the run trained a text encoder; use `retouch sample`")
        self.edits = trained.config.model.edits_whole_images
        self.takes_image = takes_source(trained.config)
        self.trained = trained
        self.checkpoints = checkpoints_of(trained)
        self._config = trained.config
        self._loaded: Loaded | None = None
        if self._config.model.embeddings is None:  # else the first item decides which encoders are needed
            self._loaded = self._load(self._config)

    @property
    def takes_references(self) -> bool:
        return takes_references(self.trained.config, scored=False)

    @property
    def steps(self) -> int:
        """Solver steps of the run."""
        return self.trained.config.evaluation.num_steps or self.trained.config.rollout.num_steps

    def repaint(self, drawing: Drawing | None, asked: Asked) -> list[Image.Image]:
        """Samples of the base, and then as many of the trained weights, if any, from the same noise; equal to `retouch
        sample`.

        Raises:
            ConfigError, DataError, ImageProblem: a missing input, or one that the run cannot take.
        """
        request = _request(drawing, asked, edits=self.edits, takes_image=self.takes_image)
        if self.takes_references and asked.reference is None:
            raise ConfigError("choose a style reference")
        section, items = items_to_sample(self.trained.config, request)
        loaded = self._for(items, section)
        images: list[Image.Image] = []
        for weights in [None] if not self.checkpoints else [None, self._weights(asked.checkpoint)]:
            loaded.load(weights, asked.strength if weights is not None else 1.0)
            images += [sample.image() for sample in generate(loaded, items[0], section, request)]
        return images

    def _weights(self, name: str) -> Path:
        """The verified weights of a checkpoint."""
        folder = self.checkpoints[name] if name else next(iter(self.checkpoints.values()))
        if folder != self.trained.newest:
            weights_folder(folder.parent, raw=folder.name == "weights")
        return folder

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
        return Loaded(config, keep_base=bool(self.checkpoints))


def checkpoints_of(trained: Trained) -> dict[str, Path]:
    """Name -> weights of every checkpoint of a run, newest first; those that were named alone of other weights."""
    newest = trained.newest
    if newest is None:
        return {}
    found = complete_checkpoints(newest.parent.parent) if newest.parent.parent.name == "checkpoints" else []
    steps = {f"step {int(match[1])}": one for one in found if (match := re.fullmatch(r"step-(\d+)", one.name))}
    named = {name: one / newest.name for name, one in reversed(steps.items()) if (one / newest.name).is_dir()}
    return named or {"trained": newest}


def serve(trained: Trained, port: int) -> None:
    """Serve the page on loopback until stopped.

    Raises:
        ConfigError: the port is taken.
    """
    gradio: Any = importlib.import_module("gradio")  # a missing package is reported before a model is loaded
    with socket.socket() as probe:
        if probe.connect_ex((_HOST, port)) == 0:
            raise ConfigError(f"--port: given {port}, which is in use; set another")
    blocks = page(gradio, Studio(trained))
    # quiet: gradio prints how to publish the page
    blocks.launch(server_name=_HOST, server_port=port, share=False, quiet=True, prevent_thread_lock=True, **LOOK)
    logger.info("the page is at http://%s:%d until Ctrl-C", _HOST, port)
    blocks.block_thread()


LOOK: Mapping[str, Any] = {"footer_links": []}
"""Options of gradio for the look of the page: no links to other pages."""


class Form:
    """The inputs of the page, and what its buttons do."""

    def __init__(self, gradio: Any, studio: Studio) -> None:
        self.gradio, self.studio = gradio, studio
        self.names = ["drawing"] * studio.takes_image
        self.inputs = [self._editor()] if studio.takes_image else []
        for name, component in self._components():
            self.names.append(name)
            self.inputs.append(component)

    def _editor(self) -> Any:
        gradio = self.gradio
        brush = gradio.Brush(colors=[_BRUSH], default_color=_BRUSH, color_mode="fixed")
        return gradio.ImageEditor(
            type="pil", label="Image", brush=brush, layers=False, sources=("upload", "clipboard"), elem_id="editor"
        )

    def _components(self) -> list[tuple[str, Any]]:
        gradio, studio = self.gradio, self.studio
        text = gradio.Textbox(label="Target text", elem_id="text")
        prompt = gradio.Textbox(label="Whole prompt, instead of the text", elem_id="prompt")
        with gradio.Row():
            seed = gradio.Number(0, label="Seed", precision=0, min_width=80, elem_id="seed")
            another = gradio.Button("New seed", min_width=80, elem_id="new-seed")
        another.click(lambda: secrets.randbelow(2**31), None, seed, api_name=False)
        with gradio.Row():
            count = gradio.Slider(1, _MOST, value=1, step=1, label="Samples", min_width=120, elem_id="count")
            steps = gradio.Textbox(
                label="Steps", placeholder=f"{studio.steps} (the run's)", min_width=120, elem_id="steps"
            )
        found = [("text", text), ("prompt", prompt), ("seed", seed), ("count", count), ("steps", steps)]
        if studio.checkpoints:
            with gradio.Row():
                names = list(studio.checkpoints)
                chosen = gradio.Dropdown(names, value=names[0], label="Checkpoint", min_width=120, elem_id="checkpoint")
                strength = gradio.Slider(0, 2, value=1, step=0.05, label="Strength", min_width=120, elem_id="strength")
            found += [("checkpoint", chosen), ("strength", strength)]
        if studio.takes_references:
            found.append(("reference", gradio.Image(type="pil", label="Style", elem_id="style")))
        return found

    def sample(self, *values: Any) -> tuple[Any, ...]:
        """The first pair, all samples with their names, and all pairs, of the values of the inputs."""
        given = dict(zip(self.names, values, strict=True))
        drawing = given.pop("drawing", None)
        try:
            images = self.studio.repaint(drawing, _asked(given))
        except (ValueError, RuntimeError) as error:
            raise self.gradio.Error(_said(error), print_exception=False) from None
        half = len(images) // 2 if self.studio.checkpoints else 0
        base, trained = images[:half], images[half:]
        left = base or [_source(drawing)] * len(trained)
        pairs = [pair for pair in zip(left, trained, strict=True) if pair[0] is not None]
        kinds = {"base": base, "trained": trained} if base else {"base": trained}
        named = [(one[k], f"{kind} {k + 1}") for k in range(len(trained)) for kind, one in kinds.items()]
        return (pairs[0] if pairs else None), named, pairs

    def choose(self, pairs: Sequence[Any], event: Any) -> Any:
        """The pair of a sample that was clicked."""
        each = 2 if self.studio.checkpoints else 1
        return pairs[event.index // each] if pairs else None


def page(gradio: Any, studio: Studio) -> Any:
    """Build the page."""
    edit = "describe the edit, and optionally paint over the region to keep it to"
    todo = (edit if studio.edits else _PAINT) if studio.takes_image else "enter a text or a prompt"
    with gradio.Blocks(title="retouch", analytics_enabled=False) as blocks:
        gradio.Markdown(f"## {studio.trained.config.name}: {todo}")
        pairs = gradio.State([])
        with gradio.Row():
            with gradio.Column(min_width=300):
                form = Form(gradio, studio)
                button = gradio.Button("Sample", variant="primary", elem_id="sample")
            with gradio.Column(min_width=300):
                left = "base" if studio.checkpoints else "input"
                slider = gradio.ImageSlider(
                    label=f"{left} | {'trained' if studio.checkpoints else 'sample'}", type="pil", format="png",
                    interactive=False, elem_id="compared",
                )  # fmt: skip
                all_of_them = gradio.Gallery(
                    label="All samples; click one to compare it", format="png", columns=2, height="max-content",
                    object_fit="contain", allow_preview=False, interactive=False, elem_id="gallery",
                )  # fmt: skip

        def choose(found: Any, event: Any) -> Any:
            return form.choose(found, event)

        choose.__annotations__ = {"found": list, "event": gradio.SelectData}  # gradio passes the event by its type
        button.click(form.sample, form.inputs, [slider, all_of_them, pairs], api_name="sample")
        all_of_them.select(choose, pairs, slider, api_name=False)
    return blocks


def _asked(given: Mapping[str, Any]) -> Asked:
    """The inputs as the page returns them, in which an empty number is None or text.

    Raises:
        ConfigError: steps that are no number.
    """
    steps = str(given["steps"] or "").strip()
    if steps and not (steps.isdecimal() and 1 <= int(steps) <= MOST_STEPS):
        raise ConfigError(f"steps: given {steps[:20]}; enter a number of 1 to {MOST_STEPS}, or nothing for the run's")
    numbers = {"seed": int(given["seed"] or 0), "count": int(given["count"] or 1)}
    numbers["steps"] = int(steps) if steps else None  # type: ignore[assignment]
    return Asked(**{**given, **numbers})


def _source(drawing: Drawing | None) -> Image.Image | None:
    """The image of the editor as it is read."""
    return None if drawing is None or drawing["background"] is None else to_rgb(as_shown(drawing["background"]))


def _said(error: Exception) -> str:
    """The message for the page; unexpected errors are logged."""
    if isinstance(error, RetouchError):
        return str(error)
    logger.error("no sample", exc_info=error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'see the log')}"


def _request(drawing: Drawing | None, asked: Asked, *, edits: bool, takes_image: bool = True) -> SampleRequest:
    """The request for `items_to_sample`; with `edits` an empty mask means the whole image."""
    # A model that takes no image may still get one from a caller: `takes_image` decides. Without paint an edit repaints
    # all of the image, and an inpainting has nothing to repaint.
    source = _source(drawing)
    mask = None if source is None or drawing is None else _mask(drawing["layers"] or (), source.size)
    if takes_image and source is None:
        raise ConfigError("choose an image first")
    if takes_image and mask is None and not edits:
        raise ConfigError(_PAINT)
    if not asked.text.strip() and not asked.prompt.strip():
        raise ConfigError("enter a target text or a whole prompt")
    return SampleRequest(
        image=source if takes_image else None,
        masks=() if mask is None or not takes_image else (mask,),
        texts=(asked.text,) if asked.text else (),
        prompt=asked.prompt or None,
        reference=asked.reference,
        seed=asked.seed,
        steps=asked.steps,
        count=asked.count,
        invert_mask=False,
    )


def _mask(layers: Sequence[Image.Image], size: tuple[int, int]) -> Image.Image | None:
    """The painted region, white, of layers of translucent paint; None if nothing is painted."""
    paint = np.zeros((size[1], size[0]), np.uint8)
    for layer in layers:
        paint = np.maximum(paint, np.asarray(layer.convert("RGBA").resize(size))[..., 3])
    full = paint.astype(np.float32) / _BRUSH[1]  # the middle of a stroke is white, and its edge half of that
    return Image.fromarray(np.minimum(full, 255).round().astype(np.uint8)) if paint.any() else None
