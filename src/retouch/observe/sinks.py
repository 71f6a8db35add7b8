"""Where a run's numbers and pictures go besides metrics.jsonl: TensorBoard, wandb, trackio.

All are given the same names: `train/loss`, `eval/ocr`, `time/step`, and a grid by what it shows. TensorBoard writes
files of the run directory. The other two are services, which may be slow or away: each is written to by a thread of its
own, and what goes wrong there is told once and costs the run nothing but what was to be shown.

A run has one id, `RUN/run_id`, whichever process goes on with it. A resumed run goes on in the same run of the service,
where the steps after its checkpoint are there a second time: what was sent cannot be taken back.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from retouch.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

SERVICES = ("wandb", "trackio")

_WAITING = 10_000
"""Records that may wait for a service; those beyond are dropped."""

_UPLOAD_S = 60
"""What wandb may take at the end to send the rest; afterwards `wandb sync` can."""

_CLOSE_S = 150.0
"""What a service may take at the end of a run: wandb gives up on a server that does not answer after 90 s."""


class Sink(Protocol):
    """Takes numbers and pictures by name."""

    def numbers(self, values: Mapping[str, float], step: int) -> None: ...

    def picture(self, name: str, image: Image, step: int) -> None: ...

    def close(self, *, failed: bool) -> None: ...


def open_sinks(config: RunConfig, folder: Path, resume_step: int | None) -> list[Sink]:
    """Those that the run file names, each once.

    Args:
        folder: the run directory.
        resume_step: step of the checkpoint that the run goes on from.
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
    """Refuse services that cannot be written to here, before minutes go into loading a model.

    Raises:
        ConfigError: a package is missing, or wandb is to send and does not know for whom.
    """
    for name in SERVICES:
        if name not in config.logging.sinks:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name is none: wandb leaves them behind
            raise ConfigError(
                f'logging.sinks: {name} is not installed: pip install "retouch[{name}]", or take it out of the sinks'
            )
    if "wandb" in config.logging.sinks:
        require_login()


def require_login() -> None:
    """Refuse wandb where it is to send, and does not know for whom: it would ask at the terminal.

    Raises:
        ConfigError: no key, or one that cannot be any.
    """
    import wandb
    from wandb.errors import AuthenticationError

    quiet = wandb.setup(wandb.Settings(silent=True))  # it would say, and ask its server, who is logged in
    if quiet.settings.mode != "online":
        return
    try:
        known = wandb.login(prompt=False, verify=False)
    except AuthenticationError as error:
        raise ConfigError(f"logging.sinks: wandb refuses the key it was given: {error}; run `wandb login`") from None
    if not known:
        raise ConfigError(
            "logging.sinks: wandb has no API key; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        )


def _run_id(folder: Path) -> str:
    """The run's own, made on first use; a run that begins anew has another, as the old one was put aside."""
    file = folder / "run_id"
    if not file.exists():
        temporary = file.with_suffix(".tmp")
        temporary.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        temporary.replace(file)  # all of it or none: a run without an id of its own would share one with others
    return file.read_text(encoding="utf-8").strip()


class TensorBoard:
    """Event files, of which a resumed run cuts off the steps that come again."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)  # type: ignore[no-untyped-call]

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, name: str, image: Image, step: int) -> None:
        import numpy as np

        self._writer.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of wandb; its own settings come from its environment variables (WANDB_MODE, WANDB_ENTITY, ...).

    The step is a number like the others, and the axis of all of them: by wandb's own steps, which only rise, it would
    drop those that a resumed run takes again. A server that cannot be reached leaves the run in `RUN/wandb`, for `wandb
    sync`, which puts several parts with one id together.
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
        except Exception as error:  # whatever a server or what lies before it answers
            wandb.teardown()  # which has the id in use
            self._run = wandb.init(**options, mode="offline")
            logger.warning("wandb: %s; the run is kept for `wandb sync` in %s", _line(error), self._run.dir)
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            logger.info("wandb: %s", self._run.url)

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def picture(self, name: str, image: Image, step: int) -> None:
        self._run.log({name: self._image(image), "step": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio, on this machine or in the Space that TRACKIO_SPACE_ID names.

    It finds a run by its name, so that the name has the id in it. What it prints stands among the command's output:
    standard output is one for all threads, and this is not the main one.
    """

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

    def picture(self, name: str, image: Image, step: int) -> None:
        self._run.log({name: self._image(image)}, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


class Beside:
    """Writes to a service in a thread of its own, which opens it as well; no call waits, and none raises.

    Args:
        name: of the service, for messages.
        opening: makes what is written to.
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

    def picture(self, name: str, image: Image, step: int) -> None:
        self._later(lambda sink: sink.picture(name, image, step))

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
            self._warn(f"takes nothing, with {_WAITING} records waiting for it")

    def _work(self, opening: Callable[[], Sink]) -> None:
        try:
            sink = opening()
        except Exception as error:  # of a service: anything
            self._warn(_line(error))
            return
        while (call := self._calls.get()) is not None:
            try:
                call(sink)
            except Exception as error:
                self._warn(_line(error))

    def _warn(self, problem: str) -> None:
        if not self._warned:
            logger.warning("%s: %s; training goes on, and metrics.jsonl has everything", self._name, problem)
        self._warned = True


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
