"""The plug-in of examples/plugin: installed as any package, then trained with, sampled and resumed."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests import forked
from tests.docs.pages import REPOSITORY
from tests.families.facts import text_length
from tests.tiny_models import shallow_flux

PLUGIN = REPOSITORY / "examples/plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plug-in installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(folder), str(PLUGIN)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tsv")
    with (folder / "signs.tsv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["image", "mask", "caption", "text"], delimiter="\t")
        writer.writeheader()
        for i in range(5):
            Image.new("RGB", (64, 32), (40 * i, 90, 200 - 30 * i)).save(folder / f"{i}.png")
            mask = Image.new("L", (64, 32))
            mask.paste(255, (16, 8, 48, 24))
            mask.save(folder / f"{i}_mask.png")
            row = {"image": f"{i}.png", "mask": f"{i}_mask.png", "caption": f"The text is '{i}'.", "text": str(i)}
            writer.writerow(row)
    return folder / "signs.tsv"


def program(site: Path, cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`retouch ...` where the plug-in is installed."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return forked.run([sys.executable, "-m", "retouch", *map(str, arguments)], cwd=cwd, env=environment, anew=True)


def overrides(data: Path) -> list[str]:
    small = ("rollout.global_groups_per_batch=2", "rollout.num_steps=2", "evaluation.num_examples=1")
    text = f"model.max_sequence_length={text_length('flux_fill')}"
    return [f"model.path={shallow_flux()}", text, f"data.path={data}", *small]


def test_it_trains_and_resumes_to_the_bit(site: Path, data: Path, tmp_path: Path) -> None:
    for name, steps in (("whole", (2,)), ("legs", (1, 2))):
        for last in steps:
            own = (f"name={name}", f"training.max_steps={last}", "resume=auto")
            done = program(site, tmp_path, "train", PLUGIN / "run.yaml", *overrides(data), *own)
            assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/whole/metrics.jsonl").read_text("utf-8").splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in trained] == [1, 2] and all(row["skipped"] == 0 for row in trained)
    assert any("reward/warmth" in row for row in rows)
    whole, legs = (weights(tmp_path / f"runs/{name}/checkpoints/step-000002") for name in ("whole", "legs"))
    assert whole.keys() == legs.keys() and all(bool((whole[k] == legs[k]).all()) for k in whole)
    assert any(bool(tensor.any()) for name, tensor in whole.items() if "lora_B" in name)
    sampled = program(site, tmp_path, "sample", "--run", "runs/whole", "--data", data, "--out", "images")
    assert sampled.returncode == 0 and list((tmp_path / "images").glob("*.png")), sampled.stderr


def test_its_step_rule_samples_for_grpo(site: Path, data: Path, tmp_path: Path) -> None:
    own = (
        "algorithm={name: grpo}",
        "rollout.step_rule=ancestral",
        "rollout.eta=0.5",
        "rollout.num_steps=4",
        "training.max_steps=1",
    )
    done = program(site, tmp_path, "train", PLUGIN / "run.yaml", *overrides(data), *own)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/plugin/metrics.jsonl").read_text("utf-8").splitlines()]
    first = next(row for row in rows if row["kind"] == "train")
    assert first["max_abs_log_ratio"] < 1e-5  # on policy


def test_the_script_lists_generated_signs_for_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "signs").mkdir()
    (tmp_path / "signs/self_bench.txt").write_text("0-KIGE\n11-A-B\n", encoding="utf-8")
    subprocess.run([sys.executable, str(PLUGIN / "make_tsv.py")], cwd=tmp_path, check=True)
    with (tmp_path / "signs.tsv").open(encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file, delimiter="\t")
    assert first["image"] == "signs/test0_source.png" and first["text"] == "KIGE"
    assert second["mask"] == "signs/test11_mask.png" and second["caption"] == "A sign with the text 'A-B'."


def test_the_shortest_step_rule_of_the_page_is_euler_with_noise_of_a_constant_rate() -> None:
    page = (REPOSITORY / "docs/extending.md").read_text(encoding="utf-8")
    (block,) = re.findall(r'```python\n("""my_rules\.py.*?)```', page, re.DOTALL)
    rules: dict[str, Any] = {}
    exec(block.split("STEP_RULES.register")[0], rules)
    x, velocity = torch.ones(2, 3, 4, 4), torch.full((2, 3, 4, 4), 2.0)
    mean, std = rules["constant_step"](x, velocity, torch.tensor([1.0, 0.5]), torch.tensor([0.75, 0.25]), 0.1)
    torch.testing.assert_close(mean, torch.full_like(x, 0.5))  # 1 + 2 (-1/4)
    torch.testing.assert_close(std, torch.tensor([0.05, 0.05]))  # 0.1 sqrt(1/4)


def test_its_format_is_recognised_and_unknown_names_list_its_components(site: Path, data: Path, tmp_path: Path) -> None:
    found = program(site, tmp_path, "data", "validate", data)
    assert found.returncode == 0 and "5 items" in found.stdout + found.stderr, found.stderr
    refused = program(site, tmp_path, "check", PLUGIN / "run.yaml", *overrides(data), "rewards={warmht: {}}")
    assert refused.returncode == 2 and "did you mean 'warmth'?" in refused.stderr


def test_its_list_is_divided_with_its_header(site: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(data.parent, tmp_path / "tsv")
    done = program(site, tmp_path, "data", "split", "tsv/signs.tsv", "--share", "0.4")
    assert done.returncode == 0, done.stderr
    parts = [(tmp_path / f"tsv/signs_{part}.tsv").read_text("utf-8").splitlines() for part in ("train", "held_out")]
    assert all(lines[0] == "image\tmask\tcaption\ttext" for lines in parts)
    whole = data.read_text("utf-8").splitlines()[1:]
    assert sorted(parts[0][1:] + parts[1][1:]) == whole and all(len(lines) > 1 for lines in parts)


def test_the_run_file_of_the_page_checks_with_its_shortest_step_rule(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/extending.md").read_text(encoding="utf-8")
    (rule,) = re.findall(r'```python\n("""my_rules\.py.*?)```', page, re.DOTALL)
    (run,) = re.findall(r"```yaml\n(# run\.yaml.*?)```", page, re.DOTALL)
    (tmp_path / "my_rules.py").write_text(rule, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(run, encoding="utf-8")
    made = program(tmp_path / "none", tmp_path, "data", "synth", "--out", "signs", "--count", 16, "--size", "32x64")
    assert made.returncode == 0, made.stderr
    done = program(tmp_path / "none", tmp_path, "check", "run.yaml")
    assert done.returncode == 0 and "run.yaml: ok" in done.stdout, done.stderr


@pytest.mark.full
def test_a_module_named_in_the_run_file_needs_no_installation(data: Path, tmp_path: Path) -> None:
    """`plugins` finds modules in the working directory, and the server of `url: auto` imports them too."""
    reward = (PLUGIN / "retouch_example/warmth.py").read_text(encoding="utf-8")
    registered = f"{reward}\n\nfrom retouch.rewards import REWARDS\n\nREWARDS.register('warmth', WarmthReward)\n"
    (tmp_path / "my_rewards.py").write_text(registered, encoding="utf-8")
    own = (
        "plugins=[my_rewards]",
        "model={family: flux_fill, path: tiny, dtype: fp32, max_sequence_length: 24}",
        "algorithm={name: nft}",
    )
    manifest = tmp_path / "signs.json"
    item = {
        "id": 0,
        "prompt": "a",
        "image_path": str(data.parent / "0.png"),
        "mask_path": str(data.parent / "0_mask.png"),
    }
    manifest.write_text(json.dumps([{**item, "id": i} for i in range(4)]), encoding="utf-8")
    own += (f"data={{format: manifest, path: {manifest}, resolution: [32, 64]}}", "training.max_steps=1")
    done = program(tmp_path / "none", tmp_path, "train", PLUGIN / "run.yaml", *own, "rewards.warmth.url=auto")
    assert done.returncode == 0, done.stderr
    missing = program(tmp_path / "none", tmp_path, "check", PLUGIN / "run.yaml", *own, "plugins=[nowhere]")
    assert missing.returncode == 2 and "plugins: given 'nowhere', which cannot be imported" in missing.stderr


def weights(checkpoint: Path) -> dict[str, Any]:
    (file,) = (checkpoint / "weights").glob("*.safetensors")
    return load_file(file)
