"""The official arithmetic of the benchmarks: against outputs of the published scripts, and by hand. No torch."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.benchmarks.base import Benchmark, ImageRow
from retouch.benchmarks.load import load_benchmark
from retouch.benchmarks.result import ResultColumn, benchmark_table, result_of
from retouch.data.base import ItemFiles
from retouch.data.item import read_item
from retouch.imaging.reading import open_image
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.rewards.text_distance import edit_distance
from retouch.types import Failure, Outcome, Score
from retouch_bench.benchmarks.brushbench import BrushBench, _gaussian_blur, blend
from retouch_bench.formats.brushbench import Runs
from retouch_bench.scorers.clip_r_precision import rank_of_first

DATA = Path(__file__).parents[1] / "benchmarks_data"


def row(metadata: Mapping[str, Any], **outcomes: Outcome) -> ImageRow:
    return ImageRow("key", 0, metadata, outcomes)


def benchmark(name: str, **keys: object) -> Any:
    found = load_benchmark(name, Path("data"))
    return type(found).model_validate({"name": name, "path": "data", **keys})


# --- BrushBench, against its evaluate_brushnet.py ---


@pytest.fixture(scope="module")
def brushnet() -> dict[str, Any]:
    return json.loads((DATA / "brushbench.json").read_text(encoding="utf-8"))


def pixels(png: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"))


def mask_of(recorded: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    runs: Runs = np.array(recorded["runs"]).reshape(-1, 2) - (1, 0)
    flat = np.zeros(np.prod(recorded["size"]), np.uint8)
    for start, length in runs:
        flat[start : start + length] = 255
    return flat.reshape(recorded["size"])


@pytest.mark.parametrize("case", ["other", "near", "composite"])
def test_the_kept_area_is_measured_as_brushnet_does(brushnet: dict[str, Any], case: str) -> None:
    """The usual MSE is a third of it, the usual PSNR 4.77 dB higher."""
    recorded, source, mask = brushnet["cases"][case], pixels(brushnet["source"]), mask_of(brushnet)
    item = RewardItem(0, "", pixels(recorded["image"]), mask=mask, source=source)
    [outcome] = make_scorer("kept_area").score([item])
    assert isinstance(outcome, Score)
    assert outcome.detail["brushbench_psnr"] == pytest.approx(recorded["psnr"], abs=2e-5)  # float32 there
    assert outcome.detail["brushbench_mse"] == pytest.approx(recorded["mse"], rel=1e-6)
    kept = mask == 0
    usual = np.mean(((item.image[kept].astype(float) - source[kept]) / 255) ** 2)
    assert outcome.detail["mse"] == pytest.approx(usual, rel=1e-12)
    if case == "composite":
        assert (outcome.value, outcome.detail["brushbench_psnr"]) == (100.0, 1000.0)
    else:
        assert outcome.value == outcome.detail["psnr"] == pytest.approx(recorded["psnr"] + 10 * np.log10(3), abs=2e-5)


def test_a_full_mask_keeps_nothing_to_compare() -> None:
    grey = np.full((4, 4, 3), 127, np.uint8)
    [outcome] = make_scorer("kept_area").score([RewardItem(0, "", grey, np.full((4, 4), 255, np.uint8), grey)])
    assert isinstance(outcome, Failure)


def test_outputs_are_blended_as_brushnet_does(brushnet: dict[str, Any]) -> None:
    """To the level, OpenCV's blur in fixed point included."""
    image = pixels(brushnet["cases"][brushnet["blended"]["image"]]["image"])
    found = blend(pixels(brushnet["source"]), image, mask_of(brushnet))
    assert np.array_equal(found, pixels(brushnet["blended"]["result"]))


@pytest.mark.parametrize("size", [(512, 512), (40, 33), (21, 11)])
def test_the_blur_of_a_mask_is_opencvs(size: tuple[int, int]) -> None:
    cv2 = pytest.importorskip("cv2")
    mask = np.random.default_rng(0).random(size) < np.linspace(0, 1, size[1])
    expected = cv2.GaussianBlur(mask.astype(np.uint8) * 255, (21, 21), 0)
    assert np.array_equal(_gaussian_blur(255 * mask.astype(np.int64)), expected)


def _pattern(k: int) -> np.ndarray[Any, Any]:
    y, x = np.mgrid[0:512, 0:512].astype(np.float64)
    waves = 127.5 + 127.5 * np.sin(x / (17 + k) + y / 29), 127.5 + 127.5 * np.cos(y / (13 + k)), (x + y + 40 * k) / 6
    return np.stack(waves, axis=-1).astype(np.uint8)


def _recorded_mask(told: Any) -> list[int]:
    """The runs of a mask, which are recorded as they are or as a rectangle."""
    if isinstance(told, list):
        return told
    rows = range(told["first_row"], told["first_row"] + told["rows"])
    return [value for row in rows for value in (row * 512 + 1 + told["left"], told["width"])]


@pytest.mark.parametrize(("name", "recorded"), [("brushbench", "BrushBench"), ("editbench", "EditBench")])
def test_an_evaluation_equals_that_of_brushnet(
    name: str, recorded: str, brushnet: dict[str, Any], tmp_path: Path
) -> None:
    """Its whole evaluation of a folder; EditBench has the same script. The values of its networks are recorded."""
    told = brushnet["evaluations"][recorded]
    entries = {
        key: {"image": f"{key}.png", "caption": f"thing {key}", "inpainting_mask": _recorded_mask(item["mask"])}
        for key, item in told["items"].items()
    }
    (tmp_path / "mapping_file.json").write_text(json.dumps(entries), encoding="utf-8")
    for key, item in told["items"].items():
        Image.fromarray(_pattern(item["source"])).save(tmp_path / f"{key}.png")
    opened: Benchmark = load_benchmark(name, tmp_path)
    rows: list[ImageRow] = []
    for item in opened.data().items():
        assert isinstance(item, ItemFiles) and item.source_path is not None and item.mask_path is not None
        was = told["items"][str(item.id)]
        source, mask = open_image(item.source_path), open_image(item.mask_path)
        seen = opened.prepared(Image.fromarray(_pattern(was["output"])), source, mask)
        asked = RewardItem(0, item.prompt, np.asarray(seen), np.asarray(mask), np.asarray(source.convert("RGB")))
        [kept] = make_scorer("kept_area").score([asked])
        assert isinstance(kept, Score)
        assert kept.detail["brushbench_psnr"] == pytest.approx(was["psnr"], rel=1e-6)
        values = was["recorded"]
        rows.append(
            row(
                {}, kept_area=kept, clip=Score(values["clip"] / 100 or -0.02), hpsv2=Score(values["hps"]),
                imagereward=Score(values["image_reward"]), aesthetic_v1=Score(values["aes"]),
            )
        )  # fmt: skip
    found, means = opened.summary(rows), told["means"]
    assert found["psnr"] == pytest.approx(means["PSNR"], rel=1e-6)
    assert found["mse"] == pytest.approx(1000 * means["MSE"], rel=1e-6)
    assert found["clip"] == pytest.approx(means["CLIP Similarity"], abs=1e-6)
    assert found["hps_v2.1"] == pytest.approx(100 * means["HPS V2.1"], abs=1e-6)
    assert found["image_reward"] == pytest.approx(10 * means["Image Reward"], abs=1e-6)
    assert found["aesthetic_v1"] == pytest.approx(means["Aesthetic Score"], abs=1e-6)


def test_clip_r_precision_equals_its_script() -> None:
    """The share of images whose own prompt ranks first, from recorded embeddings."""
    told = json.loads((DATA / "clip_r_precision.json").read_text(encoding="utf-8"))
    scored: list[ImageRow] = []
    for case in told["cases"]:
        image, texts = np.array(case["image"]), np.array(case["texts"])
        cosines = texts @ image / np.linalg.norm(texts, axis=1) / np.linalg.norm(image)
        rank = rank_of_first(cosines.tolist())
        assert (rank == 1) == (case["best"] == 0)
        scored.append(row({}, clip_r_precision=Score(float(rank == 1))))
    found = benchmark("editbench").summary(scored)
    assert found["clip_r_precision"] == pytest.approx(100 * told["r_precision"], abs=1e-6)


def test_editbench_compares_with_99_other_captions(tmp_path: Path) -> None:
    entries = {str(n): {"image": "a.png", "caption": f"thing {n % 120}", "inpainting_mask": [1, 5]} for n in range(130)}
    (tmp_path / "mapping_file.json").write_text(json.dumps(entries), encoding="utf-8")
    opened: Benchmark = load_benchmark("editbench", tmp_path)
    items = [item for item in opened.data().items() if isinstance(item, ItemFiles)]
    for item in items:
        others = item.metadata["other_prompts"]
        assert len(set(others)) == 99 and item.prompt not in others
    again = [item for item in opened.data().items() if isinstance(item, ItemFiles)]
    assert [item.metadata for item in again] == [item.metadata for item in items]
    alone: Benchmark = load_benchmark("brushbench", tmp_path)
    first = alone.data().items()[0]
    assert isinstance(first, ItemFiles) and "other_prompts" not in first.metadata


def test_brushbench_averages_over_images_and_names_the_usual_forms() -> None:
    def scored(psnr: float, clip: float) -> ImageRow:
        detail = {"brushbench_psnr": psnr, "brushbench_mse": psnr / 1000, "psnr": psnr + 5, "mse": psnr / 3000}
        return row({}, kept_area=Score(psnr, detail), clip=Score(clip), hpsv2=Score(0.3), imagereward=Score(1.5))

    failed = row({}, kept_area=Failure("bad_item", "broken"), clip=Score(0.4))
    found = benchmark("brushbench").summary([scored(20, 0.2), scored(30, -0.1), failed])
    assert found == pytest.approx(
        {
            "psnr": 25, "mse": 25, "psnr_usual": 30, "mse_usual": 25 / 3,
            "clip": 100 * (0.2 + 0 + 0.4) / 3, "hps_v2.1": 30, "image_reward": 15,
        }
    )  # fmt: skip


def test_brushbench_compares_only_with_rows_of_its_settings() -> None:
    inside, blended = benchmark("brushbench", saved_as="jpeg"), benchmark("brushbench", blended=True)
    assert (inside.departures(), next(r.model for r in inside.published_rows())) == ([], "BrushNet")
    assert [r.model for r in blended.published_rows()] == ["BrushNet, blended"]
    assert blended.departures() == ["scored as PNG; saved_as: jpeg compresses as the paper does"]
    assert benchmark("brushbench", region="outside").published_rows() == ()


def test_a_row_stands_with_its_interval_above_the_published_one() -> None:
    """Under the settings of Follow-Your-Preference, whose `eval.py` has BrushNet's arithmetic. Means and Student's
    intervals of 40 fixed scores are computed here."""
    source = np.random.default_rng(0)
    square, cosine = source.uniform(2e-4, 2e-3, 40), source.normal(0.26, 0.02, 40)  # per pixel, of three channels
    reward, preference = source.normal(1.2, 0.4, 40), source.normal(0.28, 0.02, 40)
    psnr = -10 * np.log10(square)
    scored = [
        ImageRow(
            str(i), 0, {},
            {
                "kept_area": Score(psnr[i], {
                    "brushbench_psnr": psnr[i], "brushbench_mse": square[i],
                    "psnr": -10 * np.log10(square[i] / 3), "mse": square[i] / 3,
                }),
                "clip": Score(cosine[i]), "imagereward": Score(reward[i]), "hpsv2": Score(preference[i]),
            },
        )
        for i in range(40)
    ]  # fmt: skip
    given = benchmark("brushbench", blended=True, saved_as="jpeg", num_steps=20)
    columns = {"FluPA": ResultColumn(scored, [], {})}
    result = result_of(
        given, columns, {"items": 600}, {"clip": {"revision": "clip openai/clip-vit-large-patch14 32bd"}}
    )
    shown, intervals = benchmark_table(result).splitlines(), result["intervals"]["FluPA"]
    measured = {
        "psnr": psnr, "mse": 1000 * square, "clip": 100 * cosine, "image_reward": 10 * reward,
        "hps_v2.1": 100 * preference, "psnr_usual": psnr + 10 * np.log10(3),
    }  # fmt: skip
    for name, values in measured.items():
        low, high = intervals[name]
        half = 2.0227 * values.std(ddof=1) / 40**0.5
        assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.2 * half)
        [line] = [line for line in shown if line.startswith(f"{name} ")]
        assert line.split(maxsplit=1)[1] == f"{values.mean():.4g} [{low:.4g}, {high:.4g}]"
    theirs = "psnr 31.94, mse 0.8, clip 26.39, image_reward 12.64, hps_v2.1 27.78"
    assert shown[-1] == f"published, BrushNet, blended: {theirs} (arXiv 2403.06976, inside)"


def test_jpeg_files_are_not_compressed_again() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8).astype(np.uint8))
    jpeg: BrushBench = benchmark("brushbench", saved_as="jpeg")
    once = jpeg.prepared(noise, None, None)
    assert not np.array_equal(np.asarray(once), np.asarray(noise))
    noise.format = "JPEG"
    assert jpeg.prepared(noise, None, None) is noise


# --- others, by hand ---


def test_complex_edit_has_the_means_of_its_three_scores() -> None:
    def scored(complexity: int, *parts: float) -> ImageRow:
        names = ("instruction_following", "identity_preservation", "perceptual_quality")
        return row({"complexity": complexity}, complex_edit=Score(0.5, dict(zip(names, parts, strict=True))))

    rows = [scored(8, 0.9, 0.6, 0.3), scored(8, 0.7, 1.0, 0.7)]
    parts = {"instruction_following": 8, "identity_preservation": 8, "perceptual_quality": 5, "overall": 7}
    assert benchmark("complex_edit").summary(rows) == pytest.approx(parts)
    both = benchmark("complex_edit").summary(
        [*rows, scored(1, 0.2, 0.2, 0.2), row({"complexity": 1}, complex_edit=_NO)]
    )
    assert (both["overall C8"], both["overall C1"]) == pytest.approx((7, 2))
    assert both["overall"] == pytest.approx((7 + 7 + 2) / 3)


_NO = Failure("scorer_error", "no answer")


def test_mmmg_has_means_by_level_and_discipline() -> None:
    def scored(level: str, discipline: str, value: float) -> ImageRow:
        return row({"level": level, "discipline": discipline}, mmmg=Score(value, {"fidelity": value + 0.1}))

    rows = [scored("PhD", "Biology", 0.2), scored("PhD", "Math", 0.4), scored("preschool", "Math", 0.9)]
    rows.append(row({"level": "PhD", "discipline": "Math"}, mmmg=_NO))
    assert benchmark("mmmg").summary(rows) == pytest.approx(
        {"mmmg_style": 50, "fidelity": 60, "preschool": 90, "PhD": 30, "Biology": 20, "Math": 65}
    )


def test_mmmg_is_called_so_only_by_its_whole_protocol(tmp_path: Path) -> None:
    (tmp_path / "question.txt").write_text("[ELEM_DEPEND]", encoding="utf-8")
    keys = {"wording": "published", "prompts": str(tmp_path / "question.txt"), "readability": "my:regions"}
    published = benchmark("mmmg", rewards={"mmmg": keys})
    assert published.departures() == []
    assert "mmmg" in published.summary([row({"level": "PhD", "discipline": "Math"}, mmmg=Score(1, {"fidelity": 1}))])
    assert benchmark("mmmg").departures() == ["MMMG-style: without the published question, distance and readability"]


@pytest.fixture(scope="module")
def calligrapher() -> dict[str, Any]:
    return json.loads((DATA / "calligrapher.json").read_text(encoding="utf-8"))


@pytest.fixture
def calligrapher_folder(calligrapher: dict[str, Any], tmp_path: Path) -> Path:
    """The recorded run's folder of made-up images, under the published names."""
    for key, item in calligrapher["items"].items():
        (width, height), box = item["size"], item["box"]
        y, x = np.mgrid[0:height, 0:width].astype(np.float64)
        n = int(key)
        waves = 127.5 + 127.5 * np.sin(x / (17 + n) + y / 29), 127.5 + 127.5 * np.cos(y / (13 + n)), (x + y) / 8 % 256
        source = Image.fromarray(np.stack(waves, -1).astype(np.uint8))
        source.save(tmp_path / f"test{key}_source.png")
        mask = Image.new("L", source.size)
        mask.paste(255, tuple(box))
        mask.save(tmp_path / f"test{key}_mask.png")
        source.crop(tuple(box)).save(tmp_path / f"test{key}_ref.png")
    self_lines = [f"{key}-{item['text']}" for key, item in calligrapher["items"].items()]
    cross_lines = [f"{key}-{line}" for key, line in calligrapher["cross_list"].items()]
    for name, lines in (("self", self_lines), ("cross", cross_lines)):
        (tmp_path / f"{name}_bench.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_calligrapher_items_are_what_its_scripts_pass_to_the_model(
    kind: str, calligrapher: dict[str, Any], calligrapher_folder: Path
) -> None:
    """The same prompts, references, sources and masks, and as many images of each; the scripts go over file names."""
    opened: Benchmark = load_benchmark(f"calligrapher_{kind}", calligrapher_folder)
    section = opened.data()
    found = {
        (item.source_path.name, item.reference_path.name): item
        for item in section.items()
        if isinstance(item, ItemFiles) and isinstance(item.source_path, Path) and isinstance(item.reference_path, Path)
    }
    recorded = calligrapher[kind]
    assert found.keys() == {(told["source"], told["reference_file"]) for told in recorded}
    for told in recorded:
        item = found[told["source"], told["reference_file"]]
        example, _ = read_item(item, section)
        mask, source = example.mask, example.source
        assert mask is not None and source is not None
        assert (item.prompt, opened.count, list(opened.size or ())) == (told["prompt"], told["images"], told["size"])
        area = int((np.asarray(mask) >= 128).sum())
        assert area == pytest.approx(told["mask_pixels"], rel=0.005)  # nearest pixels there, halves of areas here
        assert np.asarray(source).mean() == pytest.approx(told["source_mean"], abs=0.1)  # bicubic there, Lanczos here


def test_calligrapher_readings_equal_a_second_derivation(calligrapher: dict[str, Any]) -> None:
    """No evaluator is published: the edit distances are those of the package Levenshtein."""
    scored: list[ImageRow] = []
    for told in calligrapher["readings"]:
        ned = 1 - edit_distance(told["asked"], told["found"]) / max(len(told["asked"]), len(told["found"]))
        assert ned == pytest.approx(told["ned"], abs=1e-12)
        scored.append(row({}, ocr=Score(ned, {"ned": ned, "exact": told["asked"] == told["found"]})))
    found = benchmark("calligrapher_self").summary(scored)
    assert found == pytest.approx({"ned": calligrapher["ned"], "exact": calligrapher["exact"]}, abs=1e-12)


def test_calligrapher_has_the_means_of_reading_and_style() -> None:
    def scored(ned: float, exact: bool, style: Outcome) -> ImageRow:
        return row({}, ocr=Score(ned, {"ned": ned, "exact": exact}), style=style)

    cross: Benchmark = benchmark("calligrapher_cross")
    found = cross.summary([scored(1.0, True, Score(0.8)), scored(0.5, False, _NO)])
    assert found == {"ned": 0.75, "exact": 0.5, "style": 0.8}
