"""Config, reward protocol, client and server live without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import REPOSITORY, TINY

CONFIGS = REPOSITORY / "configs"

HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft")


def heavy_modules_after(code: str) -> list[str]:
    """The heavy packages that a fresh interpreter holds after running `code`."""
    script = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


LIGHT = (
    "retouch",
    "retouch.api",
    "retouch.config",
    "retouch.rewards.protocol",
    "retouch.rewards.client.client",
    "retouch.rewards.server.front",
    "retouch.rewards.server.process",
    "retouch.rewards.scorers.ocr",
    "retouch.tiny.signs",
    "retouch.data.validate",
    "retouch.doctor.diagnosis",
    "retouch.cli",
    "retouch.engine.saved",
    "retouch.use.comparison",
    "retouch.use.exporting",
    "retouch.use.items",
    "retouch_glyphs.scorers.glyph_structure",
    "retouch_glyphs.scorers.recognizer",
    "examples.demo",
    "examples.geneval_detector",
)
"""In any order: what one of them imports, all do."""


def test_importing_them_imports_no_torch() -> None:
    """Nor does the process that starts the workers of the tests, with their conftest."""
    assert heavy_modules_after(f"import {', '.join(LIGHT)}, tests.conftest") == []


def test_the_probe_sees_what_is_imported() -> None:
    # a stand-in: importing torch itself takes seconds
    assert heavy_modules_after("import types; sys.modules['torch'] = types.ModuleType('torch')") == ["torch"]


CHECKED = [
    [str(TINY)],
    [str(CONFIGS / "flux_fill_grpo.yaml"), "model.quantize=nf4", "--memory"],
    [str(CONFIGS / "flux_fill_ip_grpo.yaml"), "--memory"],
    [
        str(CONFIGS / "sd_inpaint_ip_grpo.yaml"),
        "model.train.weights=kv_lora",
        "model.train.initial_adapter=null",
        "--memory",
    ],
    [str(CONFIGS / "flux_fill_reward_gradient.yaml"), "--memory"],
]


def test_check_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it with the memory of a released model, whose sizes come with the package."""
    for name in ("MODEL_PATH", "SIGLIP_PATH", "CLIP_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DATA_PATH", "somewhere")
    code = f"""
from retouch.cli import main
for arguments in {CHECKED!r}:
    sys.argv = ["retouch", "check", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, arguments
    assert "torch" not in sys.modules, arguments
"""
    assert heavy_modules_after(code) == []


def test_a_run_file_imports_only_the_components_that_it_names() -> None:
    code = f"""
import sys
from retouch.algorithms import ALGORITHMS
from retouch.config import load_run
from retouch.data.formats import FORMATS
from retouch.families import FAMILIES
from retouch.rewards import REWARDS
load_run({str(TINY)!r})
for registry in (FAMILIES, ALGORITHMS, REWARDS, FORMATS):
    modules = sorted({{place.partition(":")[0] for place in registry._places.values()}})
    print(len(modules) > 4, *[module for module in modules if module in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "True retouch.families.flux_fill.spec",
        "True retouch.algorithms.grpo.config",
        "True retouch.rewards.scorers.ocr",
        "True retouch.data.formats.calligrapher",
    ]


HERE = ("data.path=.", "warmup_data=null", "algorithm.sft_steps=0", "evaluation.data=null", "logging.dir=.")
"""All files of a run are there; it has not looked into them."""

OLD_RUNS = Path(__file__).parents[1] / "old_runs/1c9919ed/runs"
OF_NFT, INSIDE = (str(sorted((OLD_RUNS / run / "checkpoints").iterdir())[-1]) for run in ("nft-1", "grpo-2"))
"""Checkpoints of another algorithm, and inside an epoch of other options."""

USAGE_ERRORS = [
    ["sample", "--config", str(TINY), "--out", "x", "--data", "x", "--crop", "al"],
    ["sample", "--config", str(TINY), "--out", "x", "--image", "no.png", "--box", "0,0,9,9", "--text", "A"],
    ["eval", "--config", str(TINY), "--data", "no-such-folder"],
    ["sample", "--config", str(TINY), "--out", "x", "--data", ".", "--resolution", "36x65"],
    ["train", str(TINY), *HERE, "resume=no-such-checkpoint"],
    ["train", str(TINY), *HERE, "name=held"],
    ["train", str(TINY), *HERE, f"resume={OF_NFT}"],
    ["train", str(TINY), *HERE, f"resume={INSIDE}"],
    ["export", "no-such-checkpoint", "--to", "diffusers"],
    ["export", ".", "--to", "difusers"],
]


@pytest.mark.parametrize(
    "errors",
    [pytest.param(USAGE_ERRORS, id="all"), *(pytest.param([one], marks=pytest.mark.full) for one in USAGE_ERRORS)],
)
def test_a_usage_error_imports_no_torch(errors: list[list[str]], tmp_path: Path) -> None:
    """It is reported within a second, not after the seconds that torch takes to import: one after the other in the same
    interpreter, or each in its own."""
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    code = f"""
import os
from retouch.cli import main
os.chdir({str(tmp_path)!r})
for arguments in {errors!r}:
    sys.argv = ["retouch", *arguments]
    try:
        main()
        raise AssertionError(arguments)
    except SystemExit as end:
        assert end.code == 2, (arguments, end.code)
    assert "torch" not in sys.modules, arguments
"""
    assert heavy_modules_after(code) == []


CALLS = """
import cProfile, pstats, sys
profile = cProfile.Profile()
profile.enable()
try:
    exec({code!r})
except SystemExit as end:
    assert not end.code
profile.disable()
print(pstats.Stats(profile).total_calls)
"""


def calls(code: str) -> int:
    """Function calls of a program in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", CALLS.format(code=code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def test_check_calls_less_than_twice_as_many_functions_as_the_import_of_its_libraries() -> None:
    """They take .3 to .5 s, and a command must answer within a second. Calls, because they are the same each time: the
    seconds of a shared machine differ by half. A model of pydantic belongs to the libraries: `import pydantic` alone
    imports nothing of it."""
    libraries = calls(
        "import numpy, PIL.Image, typer, yaml; from pydantic import BaseModel; type('A', (BaseModel,), {})"
    )
    checked = calls(f"""
import sys
from retouch.cli import main
sys.argv = ["retouch", "check", {str(TINY)!r}]
main()
""")
    assert checked < 2 * libraries
