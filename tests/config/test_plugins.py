"""Modules that a run file names under `plugins`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from retouch.config import ConfigError, RunConfig
from retouch.core.rules import StepRule
from retouch.registry import import_plugins

CODE = """
import sys
from retouch.config import load_run
first = load_run(sys.argv[1])  # builds the sections before the plug-in is known
from retouch.rewards import REWARDS
from retouch.rewards.scorers.seam import SeamReward
print(type(load_run(sys.argv[1], ["plugins=[mine]", "rewards={own: {}}"]).rewards["own"]).__name__)
try:
    REWARDS.register("ocr", SeamReward)
except ValueError as error:
    print(error)
"""

PLUGIN = """
from typing import Literal

from retouch.rewards import REWARDS
from retouch.rewards.scorers.seam import SeamReward


class OwnReward(SeamReward):
    scorer: Literal["own"] = "own"


REWARDS.register("own", OwnReward)
"""


def test_a_run_after_another_one_takes_in_its_plugins_and_a_taken_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN, encoding="utf-8")
    config = Path(__file__).parents[2] / "configs/tiny/flux_fill_grpo.yaml"
    command = [sys.executable, "-c", CODE, str(config)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "OwnReward",
        "reward 'ocr': the name is taken; register it under another name",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            PLUGIN.replace('register("own"', 'register("mine"'),
            (
                "reward 'mine': given scorer='own' in OwnReward; expected the registered name; "
                "set scorer: Literal['mine'] = 'mine', or register it as 'own', at mistaken.py:12); correct the module"
            ),
        ),
        ("raise SystemExit(0)", "mistaken ends the program when it is imported, with code 0); correct the module"),
        ("import retouch.step_rules", "No module named 'retouch.step_rules', at mistaken.py:1); correct the module"),
        (None, "No module named 'mistaken'); install its package, or run the command in the folder of its file"),
    ],
)
def test_the_message_about_a_plugin_that_cannot_be_imported_names_its_own_remedy(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    if text is not None:
        (tmp_path / "mistaken.py").write_text(text, encoding="utf-8")
    with pytest.raises(ImportError, match=re.escape(message)):
        import_plugins(["mistaken"])


def test_a_step_rule_rejects_values_that_no_run_file_can_use() -> None:
    with pytest.raises(ValueError, match=r"StepRule\.prediction: given 'velocity'; set one of 'flow', 'epsilon'"):
        StepRule(prediction="velocity", strength="eta", default=1.0, step="a:b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"StepRule\.strength: given 'rate'; set one of 'noise_level', 'eta'"):
        StepRule(prediction="flow", strength="rate", default=1.0, step="a:b")  # type: ignore[arg-type]


@pytest.mark.parametrize("step", ["nowhere_at_all:step", "retouch.core.steps:nope", "retouch.core.steps"])
def test_a_step_rule_whose_function_is_missing_names_it(step: str) -> None:
    rule = StepRule(prediction="flow", strength="eta", default=1.0, step=step)
    with pytest.raises(ConfigError, match=rf"StepRule\.step: given '{step}'.*; set it to 'module:function'"):
        _ = rule.mean_std


def test_a_section_of_another_registry_is_not_taken(run_with: Callable[..., RunConfig]) -> None:
    """Validation takes objects, but only those of the class that the registry has under their name."""
    run = run_with("name=grpo")
    assert run.model_validate({**dict(run), "model": run.model}).model is run.model
    with pytest.raises(ValidationError, match="model"):
        run.model_validate({**dict(run), "model": run.data})
    with pytest.raises(ValidationError, match="algorithm"):
        run.model_validate({**dict(run), "algorithm": run})  # which has a name, too
