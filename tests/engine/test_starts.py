"""What a start says when its processes do not join, and when DeepSpeed compiles."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from retouch.config import ConfigError
from retouch.config.run import OptimizerConfig, TrainingConfig
from retouch.engine import Engine
from retouch.engine.engine import require_joined
from retouch.engine.zero import note_compiling


def test_processes_that_do_not_join_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes of a launcher without a GPU: accelerate leaves each alone, and all would write one run."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises(ConfigError, match="WORLD_SIZE: the launcher started 4 processes, which do not join, because"):
        Engine(TrainingConfig(mixed_precision="no"), OptimizerConfig(), 0)
    with monkeypatch.context() as environment:
        environment.setenv("ACCELERATE_USE_CPU", "true")
        require_joined()
    with monkeypatch.context() as environment:
        environment.setattr("torch.accelerator.is_available", lambda: True)
        require_joined()
    monkeypatch.delenv("LOCAL_RANK")  # a WORLD_SIZE of something else, such as a batch system
    require_joined()


@pytest.mark.parametrize(("installed", "compiled", "told"), [(False, False, 1), (True, False, 0), (False, True, 0)])
def test_a_start_of_deepspeed_that_compiles_says_so(
    installed: bool,
    compiled: bool,
    told: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    versions = ModuleType("deepspeed.git_version_info")
    versions.installed_ops = {"utils": installed}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.git_version_info", versions)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    if compiled:
        (tmp_path / "py311_cu130/utils").mkdir(parents=True)
        (tmp_path / "py311_cu130/utils/utils.so").touch()
    with caplog.at_level(logging.INFO, "retouch"):
        note_compiling(main=False)
        note_compiling(main=True)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == told and all("DeepSpeed compiles its operators" in line for line in lines)
