"""Settings, names, records and results of benchmarks, without a model. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from retouch.benchmarks import BENCHMARKS
from retouch.benchmarks.base import Benchmark, ImageRow, numbered
from retouch.benchmarks.load import load_benchmark
from retouch.benchmarks.observations import Observations, OutputIdentity, reward_digest
from retouch.benchmarks.outputs import Output, Shard, find_file, outputs_of, own, unused_files
from retouch.benchmarks.result import ResultColumn, benchmark_table, is_of, result_of
from retouch.config import ConfigError
from retouch.data.base import ItemFiles
from retouch.observe.statistics import bootstrap_intervals
from retouch.rewards.base import RewardEntry
from retouch.rewards.client.revisions import Revisions
from retouch.rewards.scorers.complex_edit import ComplexEditReward
from retouch.rewards.scorers.ocr import OcrReward
from retouch.rewards.scorers.pairwise import PairwiseReward
from retouch.types import Failure, Outcome, Score


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "benchmark.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- settings ---


def test_given_keys_lie_over_the_benchmarks_own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.delenv("JUDGE_MODEL", raising=False)
    text = "name: complex_edit\npath: x\nlimit: 3\nrewards: {complex_edit: {samples: 2}, clip: {path: mine}}\n"
    found = load_benchmark(file(tmp_path, text), tmp_path)
    entry: Any = found.rewards["complex_edit"]
    assert (entry.samples, entry.temperature, entry.model) == (2, 1.0, "gpt-4o-2024-11-20")
    assert (entry.address, entry.paste_back) == ("http://127.0.0.1:9/v1", False)
    assert (found.rewards["clip"].paste_back, found.path) == (False, str(tmp_path))
    questions = "the judge is asked this package's questions, not the published ones"
    samples = "rewards.complex_edit.samples is 2 instead of 20"
    assert found.departures() == ["only the first 3 items", samples, questions]


def test_null_removes_a_reward_and_a_server_has_its_own_options(tmp_path: Path) -> None:
    text = "name: calligrapher_self\npath: x\nrewards: {ocr: null, style: {url: 'http://127.0.0.1:9'}}\n"
    found = load_benchmark(file(tmp_path, text), None)
    assert list(found.rewards) == ["style"]
    assert found.rewards["style"].url == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: brushbenc\npath: x\n", "{}: name: given 'brushbenc'; did you mean 'brushbench'?"),
        ("name: brushbench\npath: x\nlimt: 3\n", "{}: limt: unknown key; did you mean 'limit'?"),
        ("name: brushbench\npath: x\nrewards: {clip: {pth: x}}\n", "{}: rewards.clip.pth: unknown key; did you mean"),
        ("name: brushbench\n", "--path: not set; give the data of brushbench (arXiv 2403.06976"),
        ("name: brushbench\npath: ${NOT_SET_HERE}\n", "path: ${{NOT_SET_HERE}} is not set in the environment"),
    ],
)
def test_mistakes_in_a_benchmark_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_benchmark(path, None)
    assert str(raised.value).startswith(message.format(path))


def test_sizes_and_counts_are_the_official_ones_unless_given(tmp_path: Path) -> None:
    plain = load_benchmark("calligrapher_self", tmp_path)
    assert (plain.count, plain.data().size, plain.departures()) == (2, (512, 512), [])
    text = "name: calligrapher_self\npath: x\nimages_per_item: 1\nresolution: [32, 64]\n"
    other = load_benchmark(file(tmp_path, text), None)
    assert (other.count, other.data().size) == (1, (32, 64))
    assert other.departures() == [
        "1 image per item instead of 2",
        "sampled at 32 x 64 pixels instead of 512 x 512",
    ]


# --- outputs ---


def output(name: str, position: int = 0, index: int = 0) -> Output:
    return Output(ItemFiles(position, "p"), str(position), position, index, name)


def test_shards_divide_the_batches_of_one_process() -> None:
    outputs = [output(f"{i}.png", i) for i in range(7)]
    whole = own(outputs, Shard(), 2)
    parts = [own(outputs, Shard(i, 3), 2) for i in range(3)]
    assert [len(part) for part in parts] == [2, 1, 1]
    assert sorted(batch[0].file for part in parts for batch in part) == [batch[0].file for batch in whole]
    assert all(batch in whole for part in parts for batch in part)


def test_a_shard_is_counted_from_one() -> None:
    assert Shard.parse("2/4") == Shard(1, 4)
    assert str(Shard(1, 4)) == "2/4"
    for wrong in ("0/4", "5/4", "2", "a/b", "-1/2"):
        with pytest.raises(ConfigError, match=r"--shard: given .*write I/N with I from 1 to N"):
            Shard.parse(wrong)


def test_an_output_is_found_under_other_suffixes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/1.jpg", "a/2.png", "a/3.webp", "b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    (tmp_path / "a" / "note.txt").write_text("x", encoding="utf-8")
    asked = [output("a/1.png"), output("a/2.png"), output("a/3.jpg"), output("a/4.png")]
    found = [find_file(tmp_path, one.file) for one in asked]
    assert [None if path is None else path.name for path in found] == ["1.jpg", "2.png", "3.webp", None]
    assert [path.name for path in unused_files(tmp_path, asked)] == ["b.png"]
    assert output("a/1.jpg").own_file == "a/1.png"


def test_two_outputs_of_one_name_are_a_fault(tmp_path: Path) -> None:
    benchmark = load_benchmark("calligrapher_self", tmp_path)
    items = [ItemFiles(3, "p"), ItemFiles(3, "p")]
    with pytest.raises(ConfigError, match="two outputs have one file name"):
        outputs_of(benchmark, items)
    assert [o.file for o in outputs_of(benchmark, items[:1])] == ["test3_0.png", "test3_1.png"]
    assert (numbered("a/b.c.png", 0), numbered("a/b.c.png", 2)) == ("a/b.c.png", "a/b.c_2.png")


# --- observations ---

ONE, TWO = OutputIdentity("1.png", "image", "item"), OutputIdentity("2.png", "image", "item")
AWAY = Failure("unavailable", "no answer", True)


def test_outcomes_are_read_back_for_the_same_image_item_and_revision(tmp_path: Path) -> None:
    record = Observations(tmp_path, "base")
    record.add([(ONE, {"ocr": Score(0.5, {"text": "é"}), "judge": AWAY})], {"ocr": "r1", "judge": "r2"})
    back = Observations(tmp_path, "base")
    assert back.outcome(ONE, "ocr", "r1") == Score(0.5, {"text": "é"})
    assert back.outcome(ONE, "judge", "r2") == AWAY
    assert back.outcome(ONE, "ocr", "other revision") is None
    assert back.outcome(OutputIdentity("1.png", "other image", "item"), "ocr", "r1") is None
    assert back.outcome(OutputIdentity("1.png", "image", "other item"), "ocr", "r1") is None
    assert Observations(tmp_path, "other").outcome(ONE, "ocr", "r1") is None


def test_a_line_that_a_kill_cut_off_is_missing_and_harms_no_other(tmp_path: Path) -> None:
    Observations(tmp_path, "base").add([(ONE, {"ocr": Score(1.0)}), (TWO, {"ocr": Score(2.0)})], {"ocr": "r"})
    path = tmp_path / "base.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    resumed = Observations(tmp_path, "base")
    assert (resumed.outcome(ONE, "ocr", "r"), resumed.outcome(TWO, "ocr", "r")) == (Score(1.0), None)
    resumed.add([(TWO, {"ocr": Score(3.0)})], {"ocr": "r"})
    again = Observations(tmp_path, "base")
    assert (again.outcome(ONE, "ocr", "r"), again.outcome(TWO, "ocr", "r")) == (Score(1.0), Score(3.0))


def test_files_of_shards_are_read_together_and_a_score_outweighs_a_failure(tmp_path: Path) -> None:
    for part, outcome in (("1-of-2", Score(1.0)), ("2-of-2", AWAY)):
        Observations(tmp_path, "base", part).add([(ONE, {"ocr": outcome})], {"ocr": "r"})
    assert Observations(tmp_path, "base").outcome(ONE, "ocr", "r") == Score(1.0)


def test_a_reward_is_known_by_what_changes_its_scores() -> None:
    plain = reward_digest(OcrReward(), "v1")
    assert reward_digest(OcrReward(weight=2.0, threads=1), "v1") == plain
    assert reward_digest(OcrReward(detect=False), "v1") != plain
    assert reward_digest(OcrReward(), "v2") != plain


@pytest.mark.parametrize(
    ("entry", "before"),
    [
        (PairwiseReward(model="m"), "b8bf0ed4922152f16b2209a7"),
        (ComplexEditReward(model="m"), "77c8029bff5541e47994f160"),
    ],
)
def test_an_option_that_is_retired_makes_no_other_reward(entry: RewardEntry, before: str) -> None:
    """Hashes of the versions that had it: a benchmark that was half scored by them does not pay its judge again."""
    assert reward_digest(entry, "r") == before


# --- intervals and results ---


def test_the_bootstrap_interval_of_a_mean_is_the_normal_one() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = bootstrap_intervals(400, lambda drawn: {"mean": float(values[drawn].mean())})
    half = 1.96 * values.std() / 20
    assert found["mean"] == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03)
    assert bootstrap_intervals(400, lambda drawn: {"mean": float(values[drawn].mean())}) == found
    assert bootstrap_intervals(1, lambda drawn: {"mean": 0.0}) == {}
    rare = bootstrap_intervals(50, lambda drawn: {"rare": 1.0} if drawn[0] == 0 else {})
    assert rare == {}


def rows(values: Mapping[int, Sequence[float | None]]) -> list[ImageRow]:
    """Images of items with these NEDs; None is a failure."""

    def outcome(value: float | None) -> Outcome:
        return AWAY if value is None else Score(value, {"ned": value, "exact": value == 1})

    return [
        ImageRow(str(item), k, {}, {"ocr": outcome(value), "style": Score(0.5)})
        for item, of in values.items()
        for k, value in enumerate(of)
    ]


def test_columns_are_compared_over_the_items_that_both_have(tmp_path: Path) -> None:
    """Items 0 to 3 gain .1 each, whatever their level: the interval of the difference has no width."""
    levels = (0.1, 0.4, 0.6, 0.8)
    before = rows({i: [level, level] for i, level in enumerate(levels)} | {9: [0.0, None]})
    after = rows({i: [level + 0.1, level + 0.1] for i, level in enumerate(levels)})
    columns = {"base": ResultColumn(before, [], {}), "trained": ResultColumn(after, ["test9_0.png", "test9_1.png"], {})}
    result = result_of(load_benchmark("calligrapher_self", tmp_path), columns, {"items": 5}, {})
    assert json.loads(json.dumps(result)) == result
    assert result["measures"]["base"]["ned"] == pytest.approx(2 * sum(levels) / 9)
    assert result["differences"]["trained - base"]["ned"] == pytest.approx([0.1, 0.1, 0.1])
    low, high = result["intervals"]["trained"]["ned"]
    assert low < result["measures"]["trained"]["ned"] < high
    assert result["weights"]["base"]["failures"] == {"ocr": {"unavailable": 1}}
    assert result["weights"]["trained"]["missing_files"] == ["test9_0.png", "test9_1.png"]
    assert result["published"]["reasons"] == [
        "no evaluator and no table are published", "base: 1 failed score", "trained: 2 missing images",
    ]  # fmt: skip
    table = benchmark_table(result)
    assert "trained - base [95 %]" in table.splitlines()[0]
    assert "+0.1 [+0.1, +0.1]" in table
    assert "base: 10 images, failed scores: 1 x ocr" in table
    assert "trained: 8 images, 2 missing" in table
    assert "not comparable with published numbers: no evaluator" in table


@pytest.mark.parametrize("detail", [{}, {"correct": "yes"}, {"correct": None}])
def test_details_of_another_server_are_an_error_of_the_benchmark_file(tmp_path: Path, detail: dict[str, Any]) -> None:
    text = f"name: geneval\npath: {tmp_path}\nrewards: {{geneval: {{url: 'http://127.0.0.1:9'}}}}\n"
    (row,) = rows({0: [0.5]})
    row = replace(row, metadata={"tag": "colors"}, outcomes={"geneval": Score(1.0, detail)})
    with pytest.raises(ConfigError, match=r"has not the form that GenEval needs .*retouch reward serve"):
        result_of(load_benchmark(file(tmp_path, text), None), {"base": ResultColumn([row], [], {})}, {"items": 1}, {})


def test_published_rows_are_shown_where_the_settings_compare(tmp_path: Path) -> None:
    text = f"name: brushbench\npath: {tmp_path}\nsaved_as: jpeg\n"
    detail = {"brushbench_psnr": 20.0, "brushbench_mse": 0.01, "psnr": 25.0, "mse": 0.003}
    scored = [ImageRow(str(i), 0, {}, {"kept_area": Score(25.0, detail), "clip": Score(0.25)}) for i in range(2)]

    def table(more: str = "", items: int = 600, clip: str = "openai/clip-vit-large-patch14", resized: int = 0) -> str:
        column = {"base": ResultColumn(scored, [], {}, resized)}
        given = load_benchmark(file(tmp_path, text + more), None)
        return benchmark_table(result_of(given, column, {"items": items}, {"clip": {"revision": f"clip {clip} 32bd"}}))

    shown = table().splitlines()
    assert "published, BrushNet: psnr 21.65, mse 9.31, clip 26.48 (arXiv 2403.06976, inside)" in shown
    model = "clip is scored by 'clip mine 32bd', the published numbers by openai/clip-vit-large-patch14"
    for other, reason in (
        (table("limit: 2\n", items=2), "only the first 2 items"),
        (table(items=599), "599 of 600 items"),
        (table(items=601), "601 items instead of 600"),
        (table(clip="mine"), model),
        (table(resized=3), "base: 3 images of another size than 512 x 512 pixels"),
        (table("rewards: {clip: {text_key: caption}, kept_area: {scorer: jpeg_size}}\n"),
         'rewards.kept_area is jpeg_size instead of kept_area; rewards.clip.text_key is "caption" instead of ""'),
        (table("rewards: {clip: {crop: mask_box}}\n"), 'rewards.clip.crop is "mask_box" instead of "none"'),
        (table("rewards: {kept_area: {paste_back: true}}\n"),
         "rewards.kept_area.paste_back is true instead of false"),
    ):  # fmt: skip
        assert "published," not in other
        assert f"not comparable with published numbers: {reason}" in other.splitlines()


JUDGED = "viescore gpt-4.1 served as {} 0a1b"


@pytest.mark.parametrize(
    ("model", "revision", "names"),
    [
        ("gpt-4.1", JUDGED.format("gpt-4.1"), True),
        ("gpt-4.1", JUDGED.format("gpt-4.1-2025-04-14 fp_1, gpt-4.1-2025-04-14 fp_2"), True),
        ("gpt-4.1", JUDGED.format("gpt-4.1-mini-2025-04-14"), False),
        ("gpt-4.1", JUDGED.format("gpt-4.1, qwen"), False),
        ("gpt-4.1", JUDGED.format("qwen"), False),
        ("gpt-4o-2024-11-20", JUDGED.format("gpt-4o-2024-08-06"), False),
        ("o3", "mmmg o3 served as o3-2025-04-16 ab", True),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "longtext x served as /models/Qwen2.5-VL-7B-Instruct ab", True),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "longtext x served as Qwen/Qwen2.5-VL-7B-Instruct-AWQ ab", False),
        ("openai/clip-vit-large-patch14", "clip openai/clip-vit-large-patch14-336 ab", False),
        ("mask2former_swin-s", "strict mask2former_swin-s_20220504_001756-743b7d99.pth", True),
        ("mask2former_swin-s_coco", "strict mask2former_swin-s_coco.pth ab, clip cd", True),
        ("mask2former_swin-s_coco", "strict mask2former_swin-s_coco_panoptic.pth ab, clip cd", False),
        ("gpt-4.1", " | ".join([JUDGED.format("gpt-4.1")] * 2), True),
        ("gpt-4.1", f"{JUDGED.format('gpt-4.1')} | {JUDGED.format('qwen')}", False),
        ("openai/clip-vit-large-patch14", "clip /m/mine local as openai/clip-vit-large-patch14", False),
        ("openai/clip-vit-large-patch14", "clip /m/clip-vit-large-patch14 ab as /m/other", True),
        ("gpt-4.1", JUDGED.format("gpt-4.1-2025-mini"), False),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "longtext x served as /models/qwen2.5-vl-7b-instruct/ ab", True),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "x served as /hub/models--Qwen--Qwen2.5-VL-7B-Instruct/snapshots/0a1 ab", True),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "longtext x served as /models/Qwen2.5-VL-7B-Instruct/adapter ab", False),
        ("mask2former_swin-s", "strict facebook/mask2former-swin-small ab, clip cd", False),
    ],
)
def test_a_revision_names_its_model(model: str, revision: str, names: bool) -> None:
    assert is_of(model, revision) is names


@pytest.mark.parametrize("digits", [8, 9, 10, 11, 12, 13, 14, 15])
def test_the_revision_of_a_judge_on_a_server(digits: int) -> None:
    """Many fingerprints of one model are of that model; behind a cut, another name may be hidden."""
    names = [f"gpt-4.1-2025-04-14 fp_{i:0{digits}d}" for i in range(40)]
    for shown, comparable in ((names[:8], True), ([*names, "qwen"], False)):
        revisions = Revisions(["viescore"])
        revisions.note("http://a", "viescore", JUDGED.format(", ".join(shown)))
        assert is_of("gpt-4.1", revisions.told("viescore")) is comparable


@pytest.mark.parametrize(
    ("name", "rewards", "departures"),
    [
        ("geneval", {"geneval": {"color_model": "/models/CLIP-ViT-large-patch14/"}}, []),
        ("geneval", {"geneval": {"color_model": "clip-vit-base"}},
         ['rewards.geneval.color_model is "clip-vit-base" instead of "openai/clip-vit-large-patch14"']),
        ("geneval", {"geneval": {"value": "soft"}}, ['rewards.geneval.value is "soft" instead of "strict"']),
        ("geneval", {"geneval": {"min_group_std": 0.1, "weight": 3}}, []),
        ("longtext", {"longtext": {"language": "zh", "concurrency": 1, "model": "x"}},
         ['rewards.longtext.language is "zh" instead of "en"']),
    ],
)  # fmt: skip
def test_keys_of_own_rewards_that_compare(name: str, rewards: dict[str, Any], departures: list[str]) -> None:
    given = BENCHMARKS[name].model_validate({"name": name, "path": "x", "rewards": rewards})
    assert given.departures() == departures


@pytest.mark.parametrize(
    ("name", "options", "items"),
    [
        ("gedit", {}, 1212),
        ("gedit", {"language": "cn"}, 606),
        ("complex_edit", {}, 531),
        ("complex_edit", {"complexity": "1-8", "image_type": "all"}, 8 * 1062),
        ("geneval", {}, 553),
        ("textedit", {}, 2148),
        ("textedit", {"part": "miniset"}, 500),
        ("cvtg", {}, 2000),
        ("cvtg", {"part": "CVTG-Style"}, 998),
        ("ocr_prompts", {}, 1018),
        ("editbench", {}, None),
    ],
)
def test_the_number_of_items_depends_on_the_options(name: str, options: dict[str, Any], items: int | None) -> None:
    assert BENCHMARKS[name].model_validate({"name": name, "path": "x", **options}).official_items() == items


@pytest.mark.parametrize("side", [64, 768])
def test_outputs_of_anytext_are_read_at_the_size_of_its_polygons(side: int) -> None:
    given = BENCHMARKS["anytext"].model_validate({"name": "anytext", "path": "x"})
    assert given.prepared(Image.new("RGB", (side, side)), None, None).size == (512, 512)
    assert given.model_copy(update={"resolution": (256, 320)}).prepared(Image.new("L", (9, 9)), None, None).size == (
        320, 256,
    )  # fmt: skip


def test_a_benchmark_without_data_states_what_to_define() -> None:
    class Bare(Benchmark):
        name: Literal["bare"] = "bare"

        def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
            return {}

    with pytest.raises(NotImplementedError, match="Bare has no section; define section, or data"):
        Bare(path="x").data()
