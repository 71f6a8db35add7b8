"""The curves of a page: their points, their order, and what is said of each."""

from __future__ import annotations

import math
import random
from typing import Any

from retouch.observe.charts import MOST_POINTS, charts_of
from retouch.observe.measures import SECTIONS, meaning_of
from retouch.observe.metrics import REDUCTIONS


def train(values: dict[int, float | None], name: str = "loss") -> dict[str, list[dict[str, Any]]]:
    return {"train": [{"step": step, "kind": "train", name: value} for step, value in values.items()]}


def test_a_line_of_several_seeds_is_their_mean_with_a_band() -> None:
    """Over the steps that all have reached; values that are no numbers are left out, and the last of a step counts."""
    runs = [train({1: 1.0, 2: 2.0, 3: None, 4: 9.0}), train({1: 3.0, 2: 6.0, 4: math.nan}), {"train": []}]
    [chart] = charts_of([runs, [train({5: 1 / 3})]], {})
    first, second = chart["lines"]
    assert chart["note"] == "A mean over seeds is of 2 of 3, and of steps 1 to 2, which all of them have."
    assert charts_of([runs[:1] * 2], {})[0]["note"] == ""
    assert first == {"x": [1, 2], "y": [2.0, 4.0], "low": [1.0, 2.0], "high": [3.0, 6.0]}
    assert second == {"x": [5], "y": [0.333333]}
    repeated = {"train": [{"step": 1, "loss": 1.0}, {"step": 1, "loss": 2.0}]}
    assert charts_of([[repeated]], {})[0]["lines"] == [{"x": [1], "y": [2.0]}]


def test_a_long_line_keeps_the_lowest_and_the_highest_of_each_bin() -> None:
    """Also the first and the last point; a single outlier is never lost."""
    draw = random.Random(0)
    values = {step: draw.random() for step in range(1, 10_001)} | {7777: 50.0, 3333: -50.0}
    [chart] = charts_of([[train(dict(values))]], {})
    [line] = chart["lines"]
    assert len(line["x"]) <= MOST_POINTS + 2 and line["x"] == sorted(line["x"])
    assert all(y == float(f"{values[x]:.6g}") for x, y in zip(line["x"], line["y"], strict=True))
    assert {1, 3333, 7777, 10_000} <= set(line["x"])
    assert chart["note"] == "The lowest and the highest of every 5 steps are shown."
    for start in range(1, 10_001, 5):
        inside = [y for x, y in zip(line["x"], line["y"], strict=True) if start <= x < start + 5]
        true = [values[step] for step in range(start, start + 5)]
        assert (min(inside), max(inside)) == (float(f"{min(true):.6g}"), float(f"{max(true):.6g}"))


def test_a_long_band_keeps_its_edges() -> None:
    """The mean of two seeds hides where one is high and the other low; a mean of extremes would be no smooth curve."""
    draw = random.Random(0)
    seeds = [{step: draw.random() for step in range(1, 10_001)} for _ in range(3)]
    seeds[0][5001], seeds[1][5001] = 50.0, -50.0
    del seeds[2][10_000]
    [chart] = charts_of([[train(dict(values)) for values in seeds]], {})
    [line] = chart["lines"]
    assert line["thinned"] and len(line["x"]) == len(line["low"]) <= MOST_POINTS + 2 and line["x"] == sorted(line["x"])
    assert chart["note"].startswith("A mean over seeds is of 3 of 3, and of steps 1 to 9999, which all of them have. ")
    assert chart["note"].endswith("The lowest and the highest of every 10 steps are shown.")
    for start in range(1, 10_000, 10):
        shown = [at for at, step in enumerate(line["x"]) if start <= step < start + 10]
        true = [sorted(seed[step] for seed in seeds) for step in range(start, min(start + 10, 10_000))]
        assert min(line["low"][at] for at in shown) == float(f"{min(of[0] for of in true):.6g}")
        assert max(line["high"][at] for at in shown) == float(f"{max(of[-1] for of in true):.6g}")


def test_the_order_is_that_of_the_sections_and_gold_rewards_come_first() -> None:
    record = {"step": 1, "lr": 1.0, "grad_norm": 1.0, "kl": 1.0, "ratio": 1.0, "loss": 1.0}
    evaluation = {"step": 1, "ocr": 0.5, "ocr.ned": 0.5, "judge": 0.5, "picture.saturation": 1.0}
    run = {"train": [record], "eval": [evaluation], "rollout": [{"step": 1, "combined_score": 1.0, "reward/ocr": 1.0}]}
    charts = charts_of([[run]], {"ocr": {}, "judge": {"role": "gold"}})
    assert [chart["key"] for chart in charts] == [
        *("rollout/combined_score", "rollout/reward/ocr", "eval/judge", "eval/ocr", "eval/ocr.ned", "train/loss"),
        *("train/ratio", "train/kl", "train/grad_norm", "eval/picture.saturation", "train/lr"),
    ]
    assert charts[2]["sentence"].startswith("Gold reward, which nothing is trained on")


def test_a_logarithmic_axis_is_for_positive_values_that_differ_by_much() -> None:
    def wide(values: list[float], name: str) -> tuple[bool, bool]:
        [chart] = charts_of([[train(dict(enumerate(values)), name)]], {})
        return chart["wide"], chart["log"]

    assert wide([1e-3, 1.0], "grad_norm") == (True, True) and wide([1e-3, 1.0], "kl") == (True, False)
    assert wide([0.0, 1e-3, 1.0], "grad_norm") == (True, True)  # a log axis leaves the zero out
    assert wide([0.5, 1.0], "grad_norm") == (False, False) and wide([-1.0, 1e-3, 1.0], "loss") == (False, False)


def test_every_metric_of_a_step_is_explained_in_a_sentence() -> None:
    logged = [
        *REDUCTIONS,
        "grad_norm",
        "lr",
        "overflow",
        "skipped",
        "rows",
        "combined_std",
        "zero_std_groups",
        "failed",
    ]
    for name in logged:
        section, meaning = meaning_of("train", name, {})
        assert section in SECTIONS and meaning.sentence.endswith(".") and "As logged" not in meaning.sentence, name
    for name, better in {
        "ocr.ned": "higher",
        "ocr": "higher",
        "outside_l1": "lower",
        "ocr.hacking_index": "lower",
    }.items():
        assert meaning_of("eval", name, {"ocr": {}})[1].better == better
    assert meaning_of("eval", "gold.transfer_of_ocr", {})[0] == "measures"
    assert meaning_of("eval", "seam.inside", {"seam": {}})[0] == meaning_of("eval", "other", {})[0] == "rest"
