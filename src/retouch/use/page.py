"""A page on loopback to try trained weights: paint over a part of a picture, and see it drawn by base and trained."""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from retouch.config import ConfigError
from retouch.config.needs import takes_references
from retouch.families.facts import FACTS
from retouch.use.items import SampleRequest, items_to_sample
from retouch.use.sampling import draw
from retouch.use.trained import Loaded, Trained

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"

_PAINT = "paint over what is to be drawn anew"

Drawing = Mapping[str, Any]
"""What the page's editor gives: `background`, and `layers` of paint, RGBA of its size."""


@dataclass(frozen=True)
class Asked:
    """What the page asks for beside picture and mask; "" and None for what is left out."""

    text: str = ""
    prompt: str = ""
    reference: Image.Image | None = None
    seed: int = 0
    steps: int | None = None


class Studio:
    """A model in memory, with the base's weights and trained ones.

    Raises:
        ConfigError: a text encoder was trained, which takes another path, or there is no picture to paint on.
    """

    def __init__(self, trained: Trained) -> None:
        if trained.config.algorithm.trains_text_encoder:
            raise ConfigError("demo-ui: the run trained a text encoder; try it with `retouch sample`")
        family = trained.config.model.family
        if "source" not in FACTS[family].needs:
            raise ConfigError(
                f"demo-ui: {family} draws from prompts, not on pictures; try it with `retouch sample --data`"
            )
        self.edits = FACTS[family].edits
        self.trained = trained
        self.loaded = Loaded(trained.config, keep_base=trained.newest is not None)

    @property
    def takes_references(self) -> bool:
        return takes_references(self.trained.config, scored=False)

    def repaint(self, drawing: Drawing | None, asked: Asked) -> list[Image.Image]:
        """The picture as the base draws it and, where there are trained weights, as these do: from the same noise, as
        `retouch sample` would.

        Raises:
            ConfigError, DataError, ImageProblem: something is missing, or does not fit the run.
        """
        request = _request(drawing, asked, edits=self.edits)
        if self.takes_references and asked.reference is None:
            raise ConfigError("choose a picture whose style to take")
        section, items = items_to_sample(self.trained.config, request)
        pictures: list[Image.Image] = []
        for weights in [None] if self.trained.newest is None else [None, self.trained.newest]:
            self.loaded.load(weights)
            pictures += draw(self.loaded, items[0], section, request)
        return pictures


def serve(trained: Trained, port: int) -> None:
    """Show the page on loopback until stopped.

    Raises:
        ConfigError: the port is taken.
    """
    gradio: Any = importlib.import_module("gradio")  # its absence is told before a network is loaded
    with socket.socket() as probe:
        if probe.connect_ex((_HOST, port)) == 0:
            raise ConfigError(f"--port: something listens on {port}; give another")
    page(gradio, Studio(trained)).launch(server_name=_HOST, server_port=port, share=False)


def page(gradio: Any, studio: Studio) -> Any:
    """The page, not yet shown."""

    def repaint(drawing: Any, text: str, prompt: str, seed: float, steps: float | None, reference: Any = None) -> Any:
        asked = Asked(text, prompt, reference, int(seed or 0), int(steps) if steps else None)
        try:
            pictures = studio.repaint(drawing, asked)
        except (ValueError, RuntimeError) as error:
            raise gradio.Error(_said(error)) from None
        return pictures if len(pictures) > 1 else [*pictures, None]

    todo = "say what is to be changed, and paint over it to keep the rest" if studio.edits else _PAINT
    with gradio.Blocks(title="retouch", analytics_enabled=False) as blocks:
        gradio.Markdown(f"## {studio.trained.config.name}: {todo}")
        with gradio.Row():
            drawing = gradio.ImageEditor(type="pil", label="Picture", brush=gradio.Brush(colors=["#ffffff"]))
            with gradio.Column():
                text = gradio.Textbox(label="Text to write")
                prompt = gradio.Textbox(label="Whole prompt, instead of the text")
                seed = gradio.Number(0, label="Seed", precision=0)
                steps = gradio.Number(None, label="Steps; empty: the run's", precision=0)
                given = [drawing, text, prompt, seed, steps]
                if studio.takes_references:
                    given.append(gradio.Image(type="pil", label="Style"))
                button = gradio.Button("Draw", variant="primary")
        with gradio.Row():
            shown = [gradio.Image(label=name, format="png") for name in ("Base", "Trained")]
        button.click(repaint, given, shown, api_name="draw")
    return blocks


def _said(error: Exception) -> str:
    """For the page: what is ours says what to do; of the rest a line, and all of it in the log."""
    if type(error).__module__.startswith("retouch"):
        return str(error)
    logger.error("not drawn", exc_info=error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'see the log')}"


def _request(drawing: Drawing | None, asked: Asked, *, edits: bool) -> SampleRequest:
    """The request that `retouch sample` makes from its options.

    Args:
        edits: whether nothing painted means the whole picture.
    """
    if drawing is None or drawing["background"] is None:
        raise ConfigError("choose a picture first")
    source = drawing["background"].convert("RGB")
    paint = [np.asarray(layer.convert("RGBA"))[..., 3] for layer in drawing["layers"]]
    mask = np.maximum.reduce(paint) if paint else np.zeros((source.height, source.width), np.uint8)
    painted = bool(mask.any())
    if not painted and not edits:
        raise ConfigError(_PAINT)
    if not asked.text.strip() and not asked.prompt.strip():
        raise ConfigError("write a text, or a whole prompt")
    return SampleRequest(
        data=None,
        image=source,
        mask=Image.fromarray(mask) if painted else None,
        text=asked.text or None,
        prompt=asked.prompt or None,
        reference=asked.reference,
        seed=asked.seed,
        count=1,
        steps=asked.steps,
        size=None,
        fit=None,
        feather=0.0,
        invert_mask=False,
    )
