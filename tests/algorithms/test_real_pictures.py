"""The demo's command line on large photographs: resized by config, trained on, repainted at their own size."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from retouch.imaging.glyphs import font
from retouch.imaging.masks import mask_box
from retouch.observe.run_dir import read_metrics
from tests.command_line import retouch

DEMO = Path(__file__).parents[2] / "configs" / "tiny" / "flux_fill_grpo.yaml"


def photograph(folder: Path, number: int, text: str) -> None:
    """A 1024 px triplet: soft coloured noise as of a blurred photograph, a word across it, a wide mask, its crop."""
    draw = np.random.default_rng(number)
    ground = Image.fromarray(draw.integers(0, 256, (8, 8, 3), np.uint8)).resize((1024, 1024), Image.Resampling.BICUBIC)
    grain = draw.normal(0, 6, (1024, 1024, 1))
    picture = Image.fromarray((np.asarray(ground) + grain).clip(0, 255).astype(np.uint8))
    face = font("CaladeaBold", 200)
    box = ImageDraw.Draw(picture).textbbox((220, 400), text, font=face)
    ImageDraw.Draw(picture).text((220, 400), text, font=face, fill="white", stroke_width=6, stroke_fill="black")
    mask = Image.new("L", picture.size)
    ImageDraw.Draw(mask).rounded_rectangle((box[0] - 30, box[1] - 30, box[2] + 30, box[3] + 30), 40, fill=255)
    mask = mask.filter(ImageFilter.GaussianBlur(3))  # as painted
    picture.save(folder / f"test{number}_source.png")
    mask.save(folder / f"test{number}_mask.png")
    picture.crop(mask_box(mask)).save(folder / f"test{number}_ref.png")
    with (folder / "self_bench.txt").open("a", encoding="utf-8") as listing:
        listing.write(f"{number}-{text}\n")


def train_and_repaint(data: Path, work: Path) -> None:
    """A warm-up and a few epochs of GRPO with the OCR reward, then `sample` at the pictures' own size."""
    outcome = retouch(
        *("train", DEMO, "name=photos", f"logging.dir={work}", "logging.rollout_images_every=1"),
        *(f"data.path={data}", "data.target=auto", "data.resolution=[64, 128]", "warmup_data=null"),
        f"evaluation.data={{format: self_bench, path: {data}, resolution: [64, 128]}}",
        "evaluation.allow_overlap=true",
        *("rollout.group_size=4", "rollout.global_groups_per_batch=1", "rollout.batch_size_per_device=4"),
        *("optimizer.batch_size_per_device=4", "optimizer.gradient_accumulation=1"),
        *("algorithm.sft_steps=4", "training.max_steps=8", "training.eval_every=0"),
        *("rewards.ocr.url=null", "rewards.preservation={weight: 0.3}"),
    )
    assert outcome.code == 0, outcome.err
    run = work / "photos"
    records = read_metrics(run / "metrics.jsonl")
    assert [r["phase"] for r in records if r["kind"] == "train"] == ["warmup"] * 4 + ["rl"] * 4
    assert {r["examples"] for r in records if r["kind"] == "eval"} == {"train"}  # though evaluation.data is set
    rollouts = [r for r in records if r["kind"] == "rollout"]
    assert len(rollouts) == 4
    assert all(r["images"] == 4 and r["failed"] == 0 and "reward/ocr" in r for r in rollouts)
    assert all(r["max_abs_log_ratio"] <= 1e-6 for r in records if r.get("phase") == "rl" and not r["skipped"])
    grid = Image.open(run / "images" / "step-000008" / "evaluation.png")
    assert grid.width > 4 * 128  # input, before, after warm-up, step 8
    outcome = retouch("sample", "--run", run, "--data", data, "--out", work / "samples")
    assert outcome.code == 0, outcome.err
    for line in outcome.out.splitlines():
        number = int(Path(line).stem.removeprefix("test").removesuffix("_source"))
        source, mask, made = (
            np.asarray(Image.open(path).convert(mode)).astype(int)
            for path, mode in (
                (data / f"test{number}_source.png", "RGB"),
                (data / f"test{number}_mask.png", "L"),
                (Path(line), "RGB"),
            )
        )
        assert made.shape == source.shape == (1024, 1024, 3)
        assert np.array_equal(made[mask < 128], source[mask < 128])
        assert np.abs(made - source)[mask >= 128].mean() > 5


@pytest.mark.full
def test_photographs(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number, text in ((11, "Azir"), (12, "Moon")):
        photograph(data, number, text)
    train_and_repaint(data, tmp_path)


def test_the_benchmark_itself(tmp_path: Path) -> None:
    shared = os.environ.get("RETOUCH_SHARED_DATA")
    folder = Path(shared or "") / "self_bench"
    if not shared or not folder.is_dir():
        pytest.skip("RETOUCH_SHARED_DATA names no folder with self_bench/")
    train_and_repaint(folder, tmp_path)
