"""Summaries of the benchmarks of text on recorded observations: equal to the official scripts' aggregates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retouch.benchmarks import BENCHMARKS
from retouch.benchmarks.base import Benchmark, ImageRow
from retouch.benchmarks.outputs import outputs_of
from retouch.data.base import ItemFiles
from retouch.types import Failure, Outcome, Score
from retouch_bench.scorers.anytext import compare
from retouch_bench.scorers.textedit_judge import PARTS, shares_of, weighted
from tests.benchmarks_room.text_cases import write_anytext, write_cvtg, write_longtext, write_textedit, write_textflux

ORACLES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "benchmarks_data" / "text_oracles.json").read_text(encoding="utf-8")
)
FAILED = Failure("unavailable", "no server answered")


def made(name: str, path: str, **keys: Any) -> Benchmark:
    return BENCHMARKS[name].model_validate({"name": name, "path": path, **keys})


def rows(reward: str, outcomes: list[Outcome], metadata: dict[str, Any] | None = None) -> list[ImageRow]:
    return [ImageRow(str(i), 0, metadata or {}, {reward: outcome}) for i, outcome in enumerate(outcomes)]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_anytext_means_are_over_lines(language: str) -> None:
    """Images with one, two, ... lines: the mean over images would be another number."""
    cases = [case for case in ORACLES["anytext"]["cases"] if case["table"] == language]
    lines = [{"asked": case["asked"], "found": case["found"]} for case in cases]
    parts = [lines[:1], lines[1:3], lines[3:]]
    scored: list[Outcome] = [Score(0.0, {"lines": part}) for part in parts]
    found = made("anytext", "data", language=language).summary(rows("anytext", [*scored, FAILED]))
    official = ORACLES["anytext"]["score"][language]
    assert found == pytest.approx({f"sen_acc_{language}": official["sen_acc"], f"ned_{language}": official["ned"]})


def test_textflux_equals_its_script(tmp_path: Path) -> None:
    """One image of each item, exact lines and NED on the Chinese table, lines cut to 20 characters; a missing image is
    left out of both means."""
    told = ORACLES["textflux"]
    lines = [{"asked": case["asked"], "found": case["found"]} for case in told["cases"]]
    for line, case in zip(lines, told["cases"], strict=True):
        compared = compare(line["asked"], line["found"], "zh")
        assert (compared.exact, compared.ned) == (bool(case["exact"]), pytest.approx(case["ned"], abs=1e-9))
    benchmark = made("textflux", str(tmp_path))
    found = benchmark.summary(rows("anytext", [Score(0.0, {"lines": [line]}) for line in lines]))
    assert found == pytest.approx({name: 100 * told["score"][name] for name in ("seq_acc", "ned")}, abs=1e-6)
    box = [[0, 0], [9, 0], [9, 9], [0, 9]]
    entries = [
        {"img_name": name, "caption": "a", "annotations": [{"text": text, "polygon": box}]}
        for name, text in told["texts"].items()
    ]
    (tmp_path / "ReCTS_other.json").write_text(json.dumps({"data_list": entries}), encoding="utf-8")
    items = [item for item in benchmark.data().items() if isinstance(item, ItemFiles)]
    asked = {case["asked"] for case in told["cases"]} | {"missing"}
    texts = [item.metadata.get("asked_texts", [item.metadata["text"]])[0] for item in items]
    assert set(texts) == asked and benchmark.count == 1
    assert "a text of more than " in texts  # cut behind a space, which an exact line must have


@pytest.mark.parametrize("language", ["en", "zh"])
def test_longtext_is_micro(language: str) -> None:
    cases = [case for case in ORACLES["longtext"]["cases"] if case["language"] == language]
    scored: list[Outcome] = [Score(0.0, {"matched": case["matched"], "asked": case["units"]}) for case in cases]
    found = made("longtext", "data").summary(rows("longtext", [*scored, FAILED], {"language": language}))
    assert found == pytest.approx({f"text_{language}": ORACLES["longtext"]["score"][language]})


def test_textedit_means_by_group() -> None:
    cases = ORACLES["textedit"]["cases"]
    names = {"target_accuracy": "accuracy", "precision": "precision", "recall": "recall", "f1": "f1", "roi_ned": "ned"}
    scored: list[Outcome] = [Score(0.0, {names[k]: v for k, v in case["scores"].items()}) for case in cases]
    found = made("textedit", "data").summary(rows("textedit", [*scored, FAILED], {"group": "real"}))
    assert found == pytest.approx({f"{own}_real": ORACLES["textedit"]["means"][name] for name, own in names.items()})


def test_textedit_judge_equals_its_script() -> None:
    """The five columns and their weighted mean of each group. The script tells the groups apart by "/1." in a path,
    which the published paths do not have: it then counts all as real."""
    told = json.loads((Path(__file__).parents[1] / "benchmarks_data/textedit_judge.json").read_text(encoding="utf-8"))
    for cutoff, official in ((True, told["cutoff"]), (False, told["no_cutoff"])):
        scored: list[ImageRow] = []
        for i, item in enumerate(told["items"]):
            shares = shares_of([*item["scores"].values()], cutoff)
            group = "virtual" if item["category"].startswith("1.") else "real"
            outcomes: dict[str, Outcome] = {"textedit_judge": Score(weighted(shares), {"shares": shares})}
            scored.append(ImageRow(str(i), 0, {"group": group}, outcomes))
        found = made("textedit", "data", rewards={"textedit_judge": {"address": "http://x/v1"}}).summary(scored)
        for group, columns in official.items():
            assert found[f"judge_{group.lower()}"] == pytest.approx(columns["Weighted Score"], abs=1e-9)
            shares = [found[f"{part}_{group.lower()}"] for part in PARTS]
            assert shares == pytest.approx([*columns["Detail Metrics"].values()], abs=1e-9)
    assert told["published_paths"] == {"Virtual": 0, "Real": len(told["items"])}


def test_textedit_has_the_columns_of_the_rewards_that_are_named() -> None:
    plain = made("textedit", "data")
    assert set(plain.rewards) == {"textedit"}
    named = made("textedit", "data", rewards={"clip": {}, "textedit_judge": {"model": "m"}})
    assert named.rewards["clip"].scorer_options()["text_key"] == "caption"
    outcomes: dict[str, Outcome] = {"clip": Score(0.3), "aesthetic_v1": Score(5.5), "textedit_judge": FAILED}
    low = ImageRow("1", 0, {"group": "real"}, {"clip": Score(-0.1)})
    found = named.summary([ImageRow("0", 0, {"group": "real"}, outcomes), low])
    assert found == pytest.approx({"clip_real": 0.375, "aesthetic_v1_real": 5.5})


def test_cvtg_is_over_words() -> None:
    told = [
        (2, {"asked_words": 4, "found_words": 1, "ratios": 2.0}),
        (5, {"asked_words": 6, "found_words": 6, "ratios": 6.0}),
    ]
    found = made("cvtg", "data").summary(
        [ImageRow(str(n), 0, {"part": f"CVTG/{n}"}, {"cvtg": Score(0.0, detail)}) for n, detail in told]
    )
    assert found == pytest.approx({"word_accuracy": 0.7, "ned": 0.8, "word_accuracy_2": 0.25, "word_accuracy_5": 1.0})


def test_ocr_prompts_report_both_rewards() -> None:
    outcomes: dict[str, Outcome] = {"flow_grpo_ocr": Score(1.0), "ocr": Score(0.5, {"ned": 0.5, "exact": False})}
    found = made("ocr_prompts", "data").summary([ImageRow("0", 0, {}, outcomes), ImageRow("1", 0, {}, {"ocr": FAILED})])
    assert found == {"ocr_accuracy": 1.0, "ned": 0.5, "exact": 0.0}


@pytest.mark.parametrize("name", ["anytext", "anytext_edit", "textflux", "longtext", "cvtg", "textedit", "ocr_prompts"])
def test_nothing_scored_is_no_measure(name: str) -> None:
    benchmark = made(name, "data")
    assert benchmark.summary([]) == {}
    measures = {measure for row in benchmark.published for measure in row.numbers}
    assert benchmark.published and measures and all(row.source for row in benchmark.published)


# --- official names ---


@pytest.mark.parametrize(
    ("name", "write", "keys", "first"),
    [
        ("anytext", write_anytext, {}, ["000_0.jpg", "000_1.jpg", "000_2.jpg", "000_3.jpg"]),
        ("anytext_edit", write_anytext, {}, ["000_0.jpg", "001_0.jpg"]),
        ("textflux", write_textflux, {}, ["image_0.jpg", "image_1.jpg"]),
        ("longtext", write_longtext, {}, ["0079_1.png", "0079_2.png"]),
        ("cvtg", write_cvtg, {}, ["CVTG/2/7.png", "CVTG/3/7.png"]),
        ("textedit", write_textedit, {"part": "miniset"}, ["1.2.2/77.0.jpg", "2.6/77.0.jpg"]),
    ],
)
def test_names_of_outputs(name: str, write: Any, keys: dict[str, Any], first: list[str], tmp_path: Path) -> None:
    benchmark = made(name, str(write(tmp_path)), **keys)
    items = [item for item in benchmark.data().items() if isinstance(item, ItemFiles)]
    files = [output.file for output in outputs_of(benchmark, items)]
    assert files[: len(first)] == first and len(set(files)) == len(files) == len(items) * benchmark.count
    several = made(name, str(tmp_path), images_per_item=3, **keys)
    assert len(outputs_of(several, items)) == 3 * len(items)


def test_the_table_follows_the_path() -> None:
    def table(**keys: Any) -> Any:
        return made("anytext", **keys).rewards["anytext"].scorer_options()["table"]

    assert table(path="/data/laion_word") == "en" and table(path="/data/wukong_word") == "zh"
    assert table(path="/data/wukong_word", language="en") == "en"


def test_longtext_reads_the_language_of_its_file(tmp_path: Path) -> None:
    write_longtext(tmp_path)
    chinese = made("longtext", str(tmp_path / "text_prompts_zh.jsonl"))
    assert chinese.rewards["longtext"].scorer_options()["language"] == "zh"
    (item,) = chinese.data().items()
    assert isinstance(item, ItemFiles) and item.metadata["language"] == "zh"
    assert made("longtext", str(tmp_path)).rewards["longtext"].scorer_options()["language"] == "en"
