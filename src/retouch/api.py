"""The Python interface: train a run file, open a run directory, sample, evaluate, export.

Each function does the same as the command of its name, in this process. torch is imported on the first call that
needs it.

The commands let torch's threads on the CPU sleep while they wait (OMP_WAIT_POLICY=PASSIVE, unless it is set). `train`
and `load` do so too, but not where torch was imported before: set the variable in the environment of the program then.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from PIL import Image

from retouch.config import ConfigError, RunConfig, dump_run, load_run
from retouch.config.load import overlaid, parse_run
from retouch.errors import Stopped
from retouch.imaging.masks import Box
from retouch.observe.run_dir import read_metrics
from retouch.process.console import outlasting_readers
from retouch.process.machine import let_threads_sleep
from retouch.use.exporting import export_weights
from retouch.use.items import SampleRequest, items_to_sample
from retouch.use.trained import Trained

if TYPE_CHECKING:
    from retouch.use.loaded import Loaded

logger = logging.getLogger(__name__)

ImageInput = Image.Image | Path | str
"""An image, or the path of one."""


def train(run: Path | str | Mapping[str, Any], /, **overrides: Any) -> Run:
    """Train a run file to its end, or to its time limit, in this process -> the run.

    Args:
        run: path of a run file, or its content as a mapping.
        overrides: sections and keys that replace those of the run file: `rollout={"group_size": 4}` and
            `**{"rollout.group_size": 4}` mean the same.

    Raises:
        RetouchError: `retouch.errors` lists the classes. `Stopped`: on a signal or a reward outage; train again with
            `resume="auto"`.
    """
    _let_threads_sleep()
    config = (
        load_run(run, overrides, trust=True) if isinstance(run, Path | str) else parse_run(overlaid(run, overrides))
    )
    from retouch.algorithms import train as recipes

    try:
        with outlasting_readers():
            return _written(recipes.train(config), config)
    except Stopped as stopped:
        if stopped.code:
            raise
        logger.info("%s", stopped)  # as the run file asks
    return _written(Path(config.logging.dir).expanduser() / config.name, config)


@cache
def _let_threads_sleep() -> None:
    """Do so, or log once that it is too late."""
    if not let_threads_sleep():
        logger.info(
            "torch was imported before retouch, and its threads spin while they wait: on a machine that other programs "
            "keep busy, set OMP_WAIT_POLICY=PASSIVE in the environment"
        )


def _written(run_dir: Path, config: RunConfig) -> Run:
    """The run that was just trained: what its run file names is trusted, also where consent cannot be recorded."""
    return load(run_dir, trust=(run_dir / "config.yaml").read_bytes() == dump_run(config).encode())


def load(
    run_dir: Path | str, *, checkpoint: Path | str | None = None, raw: bool | None = None, trust: bool = False
) -> Run:
    """Open a run directory.

    Args:
        checkpoint: checkpoint or weights folder; None: the newest checkpoint of the run.
        raw: raw weights (True) or EMA weights (False); None: those of the run's `evaluation.weights`.
        trust: use the code and the hosts that its run file names, if `train` did not write it here: a run directory may
            come from anybody.

    Raises:
        ConfigError: not a run directory, or code or hosts without consent.
    """
    _let_threads_sleep()
    path = Path(run_dir).expanduser()
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"run_dir: given {str(path)!r}; expected a run directory (it has no config.yaml)")
    return Run(path, None if checkpoint is None else Path(checkpoint).expanduser(), raw, trust)


class Run:
    """A run directory and its weights. The first `sample` or `evaluate` chooses the checkpoint; open the run again to
    use a newer one. The first `sample` loads the model and keeps it.

    Attributes:
        path: the run directory.
        config: the run file, defaults included.
    """

    def __init__(
        self, path: Path, checkpoint: Path | None = None, raw: bool | None = None, trust: bool = False
    ) -> None:
        self.path = path
        self.config: RunConfig = load_run(path / "config.yaml", trust=trust)
        self._trust = trust
        self._checkpoint = checkpoint
        self._raw = raw
        self._found: Trained | None = None
        self._loaded: Loaded | None = None

    def __repr__(self) -> str:
        steps = [record["step"] for record in self.metrics if record["kind"] == "train"]
        return f"Run({str(self.path)!r}, {self.config.algorithm.name}, step {max(steps, default=0)})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, each with `step` and `kind` (train, rollout, eval, event)."""
        return read_metrics(self.path / "metrics.jsonl")

    def sample(
        self,
        image: ImageInput,
        mask: ImageInput | Sequence[ImageInput] | None = None,
        *,
        text: str | Sequence[str] | None = None,
        prompt: str | None = None,
        reference: ImageInput | None = None,
        seed: int = 0,
        count: int = 1,
        steps: int | None = None,
        resolution: int | tuple[int, int] | None = None,
        fit: str | None = None,
        feather: float = 0.0,
        box: Box | Sequence[Box] | None = None,
        crop: str = "auto",
        context: float = 0.25,
        more_images: Sequence[ImageInput] = (),
    ) -> list[Image.Image]:
        """Repaint an image inside its mask, as `retouch sample` does -> `count` images with the size of `image`.

        Args:
            mask: white where to repaint, or several masks; None with `box`, or to edit the whole image with an editing
                family.
            text: target text; the prompt is the run's template with it. A list has several texts, for one mask or box,
                or each for the mask or box of the same number.
            prompt: the whole prompt, instead of `text`.
            reference: style reference, for a run that trained with one.
            seed: random seed for the noise; each of `count` images has a seed derived from it.
            steps: solver steps; None: the run's.
            resolution: side, or (height, width), to sample at; None: the run's.
            fit: "crop" or "stretch", for an image of another aspect ratio; None: the run's.
            feather: radius of the soft edge inside the mask in pixels.
            box: (left, top, right, bottom) in pixels to repaint, or a list of such boxes, instead of a mask.
            crop: "auto", "mask" or "none": whether the model receives a box around the mask or the whole image.
            context: margin of that box on each side, as a share of the mask box's longer side.
            more_images: source images beside `image`, for a model that reads several.

        Raises:
            ConfigError: a missing mask, text or reference.
            DataError, ImageProblem: a file that is no image, or an empty mask.
            CheckpointError: the run has no complete checkpoint yet.
        """
        request = SampleRequest(
            image=_given(image),
            masks=_images(mask),
            texts=() if text is None else (text,) if isinstance(text, str) else tuple(text),
            prompt=prompt,
            reference=_given(reference),
            seed=seed,
            count=count,
            steps=steps,
            size=(resolution, resolution) if isinstance(resolution, int) else resolution,
            fit=fit,
            feather=feather,
            boxes=_boxes(box),
            crop=crop,
            context=context,
            more_images=_images(more_images),
        )
        trained = self._trained()
        chosen = items_to_sample(trained.config, request)
        from retouch.use.sampling import sample_to_folder

        with tempfile.TemporaryDirectory(prefix="retouch-sample-") as folder:
            written = sample_to_folder(trained, request, chosen, Path(folder), self._model)
            return [_in_memory(path) for path in written]

    def evaluate(
        self,
        data: Path | str | None = None,
        *,
        images: int | None = None,
        out: Path | str | None = None,
        reference: ImageInput | None = None,
    ) -> dict[str, Any]:
        """Compare the weights with the base on the same examples and seeds, as `retouch eval` does.

        Args:
            data: folder or manifest of the examples; None: the run's `evaluation.data`, or without one its
                training examples.
            images: images per example; None: the run's.
            out: folder for a grid of the images and their measures; None writes nothing.
            reference: style reference for every example, instead of its own.

        Returns:
            {"examples", "images", "means": {weights: {measure: value}}, "gains": {"b - a": {measure: [mean, low,
            high]}}, ...}: gains are paired differences with their 95 % intervals.

        Raises:
            ConfigError: examples or a style reference that do not fit the run.
            CheckpointError: the run has no complete checkpoint yet.
        """
        from retouch.use.comparison import compare

        self._loaded = None  # `compare` loads the model itself: two may not fit in memory
        given, folder = (None if path is None else Path(path).expanduser() for path in (data, out))
        return compare(self._trained(), given, images, folder, _given(reference))

    def export(self, to: str, out: Path | str | None = None) -> Path:
        """Write the weights in the format of another program, as `retouch export` does -> the path written.

        Args:
            to: comfyui, diffusers, diffusers-ip-adapter, diffusers-lora, ip-adapter or safetensors.
            out: empty or new folder; None: below `exports` of the run.

        Raises:
            ConfigError: a format that does not fit the weights, or an `out` that holds files.
            CheckpointError: weights that are missing or damaged.
        """
        folder = None if out is None else Path(out).expanduser()
        return export_weights(self._checkpoint or self.path, to, folder, raw=self._raw, trust=self._trust)

    def report(self) -> Path:
        """Write RUN/report.html, one file that needs no network -> its path."""
        from retouch.observe.report import write_report

        return write_report(self.path)

    def _trained(self) -> Trained:
        """The weights, found and verified once."""
        if self._found is None:
            self._found = Trained.find(self.path, None, self._checkpoint, self._raw, trust=self._trust)
        return self._found

    def _model(self, config: RunConfig, *, embedded: bool) -> Loaded:
        """The model, loaded once; again with the text encoders if it was loaded without and they are needed now."""
        from retouch.use.loaded import Loaded, free_memory

        has_all = config.model.embeddings is not None or (
            self._loaded is not None and self._loaded.config.model.embeddings is None
        )
        if self._loaded is not None and ((self._loaded.embedded and not embedded) or not has_all):
            self._loaded = None
            free_memory()
        if self._loaded is None:
            self._loaded = Loaded(config, embedded=embedded)
        return self._loaded


def _images(given: ImageInput | Sequence[ImageInput] | None) -> tuple[Path | Image.Image, ...]:
    """No image, one, or several."""
    several = [given] if given is None or isinstance(given, Image.Image | Path | str) else given
    return tuple(image for one in several if (image := _given(one)) is not None)


def _boxes(given: Box | Sequence[Box] | None) -> tuple[Box, ...]:
    """No box, one, or several."""
    if given is None or len(given) == 0:
        return ()
    return (cast("Box", given),) if isinstance(given[0], Real) else tuple(cast("Sequence[Box]", given))


def _given(image: ImageInput | None) -> Path | Image.Image | None:
    """An image, or the path of a file."""
    return image if image is None or isinstance(image, Image.Image) else Path(image).expanduser()


def _in_memory(path: Path) -> Image.Image:
    with Image.open(path, formats=("PNG",)) as image:
        return image.copy()
