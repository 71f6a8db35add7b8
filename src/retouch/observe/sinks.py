"""TensorBoard, wandb and trackio, which receive the numbers and images of a run in addition to metrics.jsonl.

All get the same names: `train/loss`, `eval/ocr`, `time/step`, and the names of grids. TensorBoard writes to the run
directory. wandb and trackio are services that may be slow or unreachable: each has a thread, and a failure is logged
once and does not affect the run.

A run has one id, `RUN/run_id`, also when it is resumed. A resumed run continues in the same run of the service, which
then has the steps after the checkpoint twice: sent values cannot be withdrawn.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import queue
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from retouch.config import ConfigError, RunConfig
from retouch.files.disk import write_whole

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

SERVICES = ("wandb", "trackio")

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

_WAITING = 10_000
"""Maximum number of records waiting for a service; more are dropped."""

_UPLOAD_S = 60
"""Time for wandb to send the rest at the end, in seconds; afterwards `wandb sync` can."""

_CLOSE_S = 150.0
"""Time for a service to end, in seconds: wandb gives up on a server that does not answer after 90 s."""


class Sink(Protocol):
    """Receives numbers and images by name."""

    def numbers(self, values: Mapping[str, float], step: int) -> None: ...

    def image(self, name: str, image: Image, step: int) -> None: ...

    def close(self, *, failed: bool) -> None: ...


def open_sinks(config: RunConfig, folder: Path, resume_step: int | None) -> list[Sink]:
    """The sinks of `logging.sinks`, each once.

    Args:
        folder: the run directory.
        resume_step: step of the checkpoint that the run resumes from.
    """
    names = dict.fromkeys(config.logging.sinks)
    run_id = _run_id(folder) if any(name in SERVICES for name in names) else ""
    make: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", resume_step),
        "wandb": lambda: Beside("wandb", lambda: Wandb(config, folder, run_id)),
        "trackio": lambda: Beside("trackio", lambda: Trackio(config, run_id)),
    }
    return [make[name]() for name in names]


def require_sinks(config: RunConfig) -> None:
    """Check that the services can be used, before a model is loaded.

    Raises:
        ConfigError: a package is missing, or wandb is online without a login.
    """
    for name in SERVICES:
        if name not in config.logging.sinks:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: a folder of that name, which wandb leaves behind
            raise ConfigError(
                f'logging.sinks: {name} is not installed: pip install "retouch[{name}]", or remove it from the sinks'
            )
    if "wandb" in config.logging.sinks:
        require_login()


def require_login() -> None:
    """Check the login of wandb if it is online: it would prompt at the terminal.

    Raises:
        ConfigError: no API key, or an invalid one.
    """
    import wandb
    from wandb.errors import AuthenticationError

    quiet = wandb.setup(wandb.Settings(silent=True))  # not silent, it would query its server for the user
    if quiet.settings.mode != "online":
        return
    try:
        known = wandb.login(prompt=False, verify=False)
    except AuthenticationError as error:
        raise ConfigError(f"logging.sinks: wandb rejects the API key: {error}; run `wandb login`") from None
    if not known:
        raise ConfigError(
            "logging.sinks: wandb has no API key; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        )


def _run_id(folder: Path) -> str:
    """The id of the run, created on first use."""
    file = folder / "run_id"
    known = file.read_text(encoding="utf-8", errors="replace").strip() if file.exists() else None
    if known is None or not _ID.fullmatch(known):  # an empty id would be shared with other runs
        if known is not None:
            logger.warning("%s: damaged; the run goes on under a new id in %s", file, " and ".join(SERVICES))
        known = secrets.token_hex(4)
        write_whole(file, known + "\n")
    return known


class TensorBoard:
    """Event files; a resumed run drops the steps after its checkpoint."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        # tensorboard's own switch: it would import tensorflow, which takes seconds and may not fit protobuf or numpy
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)  # type: ignore[no-untyped-call]

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def image(self, name: str, image: Image, step: int) -> None:
        import numpy as np

        self._writer.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of wandb, configured by its environment variables (WANDB_MODE, WANDB_ENTITY, ...).

    The step is logged as a metric and set as the x axis: wandb's own steps only increase, and it would drop the steps
    that a resumed run repeats. If the server cannot be reached, the run is kept in `RUN/wandb` for `wandb sync`,
    which merges parts with one id.
    """

    def __init__(self, config: RunConfig, folder: Path, run_id: str) -> None:
        import wandb

        self._image: Any = wandb.Image
        options: dict[str, Any] = {
            "project": config.logging.project,
            "group": config.logging.group,
            "name": config.name,
            "id": run_id,
            "dir": folder,
            "config": config.model_dump(mode="json"),
            "resume": "allow",
            "allow_val_change": True,
            "reinit": "create_new",
            "settings": wandb.Settings(silent=True, console="off", finish_timeout=_UPLOAD_S),
        }
        try:
            self._run: Any = wandb.init(**options)
        except Exception as error:  # any answer of a server or proxy
            wandb.teardown()  # it has the id in use
            self._run = wandb.init(**options, mode="offline")
            logger.warning("wandb: %s; the run is kept for `wandb sync` in %s", _line(error), self._run.dir)
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            logger.info("wandb: %s", self._run.url)

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def image(self, name: str, image: Image, step: int) -> None:
        self._run.log({name: self._image(image), "step": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio, on this machine or in the Space of TRACKIO_SPACE_ID. Its name contains the run's id, because
    trackio resumes runs by name."""

    def __init__(self, config: RunConfig, run_id: str) -> None:
        trackio: Any = importlib.import_module("trackio")
        self._image: Any = trackio.Image
        self._run: Any = trackio.init(
            project=config.logging.project,
            group=config.logging.group,
            name=f"{config.name}-{run_id}",
            config=config.model_dump(mode="json"),
            resume="allow",
            embed=False,
        )

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def image(self, name: str, image: Image, step: int) -> None:
        self._run.log({name: self._image(image)}, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


class Beside:
    """Opens a service and writes to it in a thread; no call waits or raises.

    Args:
        name: name of the service in messages.
        opening: opens the service.
    """

    def __init__(self, name: str, opening: Callable[[], Sink]) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[Sink], None] | None] = queue.SimpleQueue()
        self._warned = False
        self._thread = threading.Thread(target=self._work, args=(opening,), name=f"sink-{name}", daemon=True)
        self._thread.start()

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        kept = dict(values)
        self._later(lambda sink: sink.numbers(kept, step))

    def image(self, name: str, image: Image, step: int) -> None:
        self._later(lambda sink: sink.image(name, image, step))

    def close(self, *, failed: bool) -> None:
        self._calls.put(lambda sink: sink.close(failed=failed))
        self._calls.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"did not end within {_CLOSE_S:g} s")

    def _later(self, call: Callable[[Sink], None]) -> None:
        if not self._thread.is_alive():
            return
        if self._calls.qsize() < _WAITING:
            self._calls.put(call)
        else:
            self._warn(f"does not respond, with {_WAITING} records waiting")

    def _work(self, opening: Callable[[], Sink]) -> None:
        try:
            sink = opening()
        except Exception as error:  # a service may raise anything
            self._warn(_line(error))
            return
        while (call := self._calls.get()) is not None:
            try:
                call(sink)
            except Exception as error:
                self._warn(_line(error))

    def _warn(self, problem: str) -> None:
        if not self._warned:
            logger.warning("%s: %s; training continues, and metrics.jsonl has every record", self._name, problem)
        self._warned = True


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
