"""Small runs on the committed tiny base, for every folder: seconds each, no OCR unless a test is about it.

One torch thread per test process: the networks are tiny, and workers share the cores. The process that starts workers
runs no test, and imports torch as little: five seconds of processor time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import os
import signal
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

from retouch.config import RunConfig, parse_run, yaml12
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)
from tests import forked, tiers
from tests.browser import browser as browser
from tests.browser import page as page
from tests.command_line import retouch
from tests.families.facts import text_length

settings.register_profile("fast", max_examples=30, deadline=None)
settings.register_profile("full", max_examples=200, deadline=None)

_CACHE = tempfile.TemporaryDirectory(prefix="retouch-cache-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", metavar="FILE", help="write the processor seconds of every test to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Only the tests under tests/cuda see a GPU (`make test-gpu`): the others compare with what a CPU computes. What
    is remembered of checked data, and of the runs that were trained, is kept out of the home of whoever runs them."""
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) == signal.SIG_IGN:  # nohup's choice, which shells cannot take back in tests of them
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # so are commands that a shell starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_STATE_HOME"] = _CACHE.name
    if recorded := config.getoption("--record-durations"):
        config.pluginmanager.register(tiers.Recorder(Path(recorded)))
    settings.load_profile("fast" if "not full" in config.option.markexpr else "full")
    if "gpu" not in config.option.markexpr or "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before the server imports torch, whose forks the workers are
    if config.args_source is config.ArgsSource.TESTPATHS and getattr(config.option, "numprocesses", None):
        forked.share_server()


def pytest_sessionstart(session: pytest.Session) -> None:
    """What is written need not outlive the machine, and published run files are read for hundreds of tests."""
    if getattr(session.config.option, "numprocesses", None):
        return
    import torch

    from retouch.families import tiny
    from tests import remembered

    torch.set_num_threads(1)
    os.fsync = lambda fd: None
    yaml12.parse = remembered.parses(yaml12.parse)
    importlib.metadata.version = functools.cache(importlib.metadata.version)  # every run asks for those of its packages
    ssl.create_default_context = functools.cache(ssl.create_default_context)  # every client reads the authorities
    tiny.tiny_pipeline = remembered.pipelines(tiny.tiny_pipeline)


LONG = ("tests/distributed/", "tests/test_secrets.py", "tests/algorithms/test_killed.py", "tests/examples/")
"""Tests that wait for other processes for many seconds each."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Where several workers start at once, each begins with another share of the files: those that have no bytecode yet
    are rewritten (pytest's assertions) and compiled once, and not by every worker, which takes half of a collection."""
    worker = getattr(session.config, "workerinput", {})
    if not worker.get("whole"):
        return
    root, count, number = session.config.rootpath, worker["workercount"], int(worker["workerid"].removeprefix("gw"))
    for file in sorted(root.glob("tests/**/test_*.py"))[number::count]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection says what is wrong with it
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These first: at the end, the last of them would keep the other workers waiting."""
    tiers.mark(items)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish() -> None:
    """What was imported and collected lives as long as the process: an eighth of the time went into looking through it
    for garbage. Tiny models are read for hundreds of tests."""
    from tests import remembered

    if loading := sys.modules.get("retouch.families.loading"):
        vars(loading)["read_component"] = remembered.components(vars(loading)["read_component"])
    if meta := sys.modules.get("retouch.families.meta"):
        vars(meta)["component_on_meta"] = remembered.networks_on_meta(vars(meta)["component_on_meta"])
        vars(meta)["_from_config"] = remembered.released_on_meta(vars(meta)["_from_config"])
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_configure_node(node: Any) -> None:
    node.workerinput["whole"] = node.config.args_source is node.config.ArgsSource.TESTPATHS


def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """The workers are forks of the shared server, and import nothing of what it imported."""
    if forked.SHARED in os.environ:
        for spec in specs:
            spec.python = forked.WORKER


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: tests of servers and of several processes wait for a fifth of the time."""
    return (os.cpu_count() or 1) + 1


SIZE = (32, 64)


@pytest.fixture(autouse=True)
def _hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that stand in for what comes from the hub run alike with and without one."""
    monkeypatch.setattr("retouch.files.hub._probe", lambda endpoint, timeout_s: None)


@pytest.fixture(scope="session")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `targets`, `prompts` (no targets) and `held_out`."""
    with made_once(tmp_path_factory, "signs") as (root, made):
        if not made:
            write_signs(root / "targets", draw_words(8, "train", 1), SIZE, 1)
            write_signs(root / "prompts", draw_words(8, "train", 2), SIZE, 2, with_targets=False, first_id=100)
            write_signs(root / "held_out", draw_words(4, "held_out", 3), SIZE, 3, first_id=200)
        return root


@pytest.fixture
def shallow() -> None:
    """Runs of `run_file` and `config` on the tiny FLUX.1-Fill have two of its six blocks and take three fifths of the
    time: for files whose tests compare runs with each other. One of them that needs what the whole network has learned
    asks for `model__path="tiny"`."""


@pytest.fixture
def run_file(signs: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """A GRPO run of the smallest kind as a mapping; keyword arguments are dotted overrides with `__` for dots."""
    from tests.tiny_models import shallow_flux

    few = "shallow" in request.fixturenames

    def make(**overrides: Any) -> dict[str, Any]:
        own = {"model__path": shallow_flux()} if few and not {"model", "model__family"} & overrides.keys() else {}
        return small_run(signs, tmp_path / "runs", **{**own, **overrides})

    return make


@pytest.fixture
def config(run_file: Callable[..., dict[str, Any]]) -> Callable[..., RunConfig]:
    return lambda **overrides: parse_run(run_file(**overrides))


@pytest.fixture(scope="session")
def finished(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a finished run that trained "full" or "lora" weights: two steps of warm-up, two of RL, averaged,
    at a learning rate that shows. Made on first use, for all workers; do not write to it."""

    from tests.tiny_models import shallow_flux

    def directory(kind: str) -> Path:
        with made_once(tmp_path_factory, f"finished-{kind}") as (root, made):
            if made:
                return root / kind
            train = {"kind": "full"} if kind == "full" else {"kind": "lora", "rank": 4, "alpha": 8}
            run = small_run(
                signs,
                root,
                name=kind,
                model__path=shallow_flux(),
                model__train=train,
                algorithm__sft_steps=2,
                optimizer__lr=3e-3 if kind == "lora" else 1e-3,
                ema={"decay": 0.9},
                logging__rollout_images_every=1,
            )
            (root / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
            outcome = retouch("train", root / "run.yaml")
            assert outcome.code == 0, outcome.err
            return root / kind

    return directory


@contextlib.contextmanager
def made_once(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """A folder of that name, which the workers share, and whether one of them has filled it; what is written inside
    counts unless it raises, and the others wait for it."""
    base = factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    root.mkdir(exist_ok=True)
    with Path(f"{root}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = root / "done"
        yield root, done.exists()
        done.touch()


def small_run(signs: Path, runs: Path, **overrides: Any) -> dict[str, Any]:
    """See `run_file`; run directories go to `runs`."""
    data: dict[str, Any] = {
        "name": "t",
        "seed": 5,
        "model": {
            "family": "flux_fill",
            "path": "tiny",
            "dtype": "fp32",
            "train": {"kind": "full"},
        },
        "data": {"format": "self_bench", "path": str(signs / "prompts"), "resolution": [32, 64], "target": "none"},
        "warmup_data": {"format": "self_bench", "path": str(signs / "targets"), "resolution": [32, 64]},
        "rollout": {
            "group_size": 2,
            "global_groups_per_batch": 2,
            "batch_size_per_device": 4,
            "num_steps": 3,
            "noise_level": 0.7,
            "window": {"size": 2, "range": [0, 1]},
        },
        "algorithm": {"name": "grpo", "clip_range": 1e-3},
        "rewards": {"preservation": {}},
        "optimizer": {"lr": 1e-4, "batch_size_per_device": 2, "gradient_accumulation": 1},
        "training": {
            "max_steps": 4,
            "checkpoint_every": 0,
            "eval_every": 0,
            "mixed_precision": "no",
            "gradient_checkpointing": False,
        },
        "evaluation": {
            "data": {"format": "self_bench", "path": str(signs / "held_out"), "resolution": [32, 64]},
            "num_examples": 2,
            "grid_examples": 1,
        },
        "logging": {"dir": str(runs), "sinks": []},
    }
    for dotted, value in overrides.items():
        node = data
        *path, last = dotted.split("__")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    if length := text_length(data["model"].get("family")):
        data["model"] = {"max_sequence_length": length, **data["model"]}
    return data
