"""The share of a reader's gain that untouched readers confirm: by hand, and by Fieller's interval of a ratio."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retouch.config import dump_run, parse_run
from retouch.observe.report import _transfer_section
from retouch.observe.settings import alike, alike_after
from retouch.observe.statistics import student
from retouch.observe.transfer import transfers
from retouch.rewards.scorers.ocr import OcrReward
from retouch.training.evaluation import Evaluation, save_evaluation
from retouch.training.evaluations import _earlier, record_evaluation
from retouch.use import comparison
from retouch.use.comparison import compare, comparison_table, confirmed
from retouch.use.trained import Trained


def rows(readers: Mapping[str, Sequence[float | None]], images: int = 1) -> list[dict[str, Any]]:
    """One row for each value: `images` of an example, in order."""
    count = len(next(iter(readers.values())))
    return [
        {"example": i // images, "index": i % images} | {f"{name}.ned": values[i] for name, values in readers.items()}
        for i in range(count)
    ]


GAINS = (0.4, 0.2, 0.3, 0.1, 0.4, 0.2, 0.3, 0.1)
HALF = tuple(gain / 2 for gain in GAINS)
BEFORE = rows({"ocr": [0.25] * 8, "a": [0.5] * 8, "b": [0.125] * 8})


def after(ocr: Sequence[float], a: Sequence[float], b: Sequence[float]) -> list[dict[str, Any]]:
    gains = {"ocr": (0.25, ocr), "a": (0.5, a), "b": (0.125, b)}
    return rows({name: [start + gain for gain in each] for name, (start, each) in gains.items()})


def test_shares_and_index_by_hand() -> None:
    """Reader `a` confirms half of every gain, `b` nothing: shares .5 and 0, index .25 - (.125 + 0) / 2 = .1875, with
    s = .75 x .1195229 and t(7) = 2.364624."""
    (found,) = transfers(BEFORE, after(GAINS, HALF, [0.0] * 8), ["ocr", "preservation"], ["a", "b", "lpips"])
    assert (found.trained, found.examples) == ("ocr", 8)
    assert found.gain == pytest.approx((0.25, 0.25 - 0.0999237, 0.25 + 0.0999237), abs=1e-6)
    assert found.gains["a"][0] == pytest.approx(0.125) and found.gains["b"] == pytest.approx((0, 0, 0))
    assert found.shares == {"a": pytest.approx((0.5, 0.5, 0.5)), "b": pytest.approx((0.0, 0.0, 0.0))}
    assert found.index == pytest.approx((0.1875, 0.1875 - 0.0749428, 0.1875 + 0.0749428), abs=1e-6)
    assert found.measures() == {
        "ocr.hacking_index": pytest.approx(0.1875),
        "a.transfer_of_ocr": pytest.approx(0.5),
        "b.transfer_of_ocr": pytest.approx(0.0),
    }
    assert found.text() == (
        "ocr.ned rose by +0.250 [+0.150, +0.350]; share that untouched readers confirm: a 0.50 [0.50, 0.50], "
        "b 0.00 [0.00, 0.00]; hacking index +0.188 [+0.113, +0.262]"
    )


def test_the_interval_of_a_share_is_that_of_a_ratio_of_means() -> None:
    """Fieller's: the ratios r for which the mean of y - r x is within t standard errors of 0."""
    draw = np.random.default_rng(0)
    x = draw.normal(0.3, 0.25, 192)
    y = 0.6 * x + draw.normal(0, 0.2, 192)
    start = rows({"ocr": [0.0] * 192, "a": [0.0] * 192})
    (found,) = transfers(start, rows({"ocr": list(x), "a": list(y)}), ["ocr"], ["a"])
    t2 = student(191) ** 2 / 192
    cov = np.cov(x, y)
    a, b, c = x.mean() ** 2 - t2 * cov[0, 0], x.mean() * y.mean() - t2 * cov[0, 1], y.mean() ** 2 - t2 * cov[1, 1]
    half = np.sqrt(b * b - a * c) / a
    share, low, high = found.shares["a"]
    assert share == pytest.approx(y.mean() / x.mean())
    assert (low, high) == pytest.approx((b / a - half, b / a + half), abs=0.2 * half)


def test_images_of_one_example_are_averaged_first() -> None:
    one = transfers(BEFORE, after(GAINS, HALF, HALF), ["ocr"], ["a", "b"])
    noise = (-0.05, 0.05)
    both = [{**row, "index": j, **{k: v + noise[j] for k, v in row.items() if "." in k}} for row in
            after(GAINS, HALF, HALF) for j in (0, 1)]  # fmt: skip
    twice = [{**row, "index": j} for row in BEFORE for j in (0, 1)]
    (found,) = transfers(twice, both, ["ocr"], ["a", "b"])
    assert found.gain == pytest.approx(one[0].gain) and found.index == pytest.approx(one[0].index)
    assert found.shares["a"] == pytest.approx(one[0].shares["a"])


@pytest.mark.parametrize(
    ("before", "now", "trained", "gold"),
    [
        (BEFORE, after([0.3, -0.1] * 4, HALF, HALF), ["ocr"], ["a"]),  # no clear gain: .1 ± .18
        (BEFORE, after([-g for g in GAINS], HALF, HALF), ["ocr"], ["a"]),  # a loss
        (BEFORE[:5], after(GAINS, HALF, HALF)[:5], ["ocr"], ["a"]),  # fewer examples than a verdict takes
        (BEFORE, after(GAINS, HALF, HALF), ["ocr"], []),  # no untouched reader
        (BEFORE, after(GAINS, HALF, HALF), ["ocr"], ["preservation"]),  # it does not read
        (BEFORE, after(GAINS, HALF, HALF), [], ["a"]),  # nothing that reads is trained on
        ([{k: v for k, v in r.items() if k != "a.ned"} for r in BEFORE], after(GAINS, HALF, HALF), ["ocr"], ["a"]),
        ([], after(GAINS, HALF, HALF), ["ocr"], ["a"]),
    ],
)
def test_where_nothing_is_told(
    before: list[dict[str, Any]], now: list[dict[str, Any]], trained: list[str], gold: list[str]
) -> None:
    assert transfers(before, now, trained, gold) == []


def test_an_image_that_one_reader_failed_on_is_of_none() -> None:
    """Example 0 has the largest gain of `ocr` alone; without its reading by `a` it is left out of every mean."""
    now = after((4.0, *GAINS[1:]), HALF, HALF)
    now[0]["a.ned"] = None
    (found,) = transfers(BEFORE, now, ["ocr"], ["a", "b"])
    assert found.examples == 7 and found.gain[0] == pytest.approx(np.mean(GAINS[1:]))
    assert found.shares["b"] == pytest.approx((0.5, 0.5, 0.5))


# --- where it is shown ---


class Directory:
    """The parts of a run directory that an evaluation is written to."""

    def __init__(self, path: Path) -> None:
        self.path, self.logged = path, list[dict[str, Any]]()

    def log(self, kind: str, step: int, record: dict[str, Any], seconds: Mapping[str, float]) -> None:
        line = {"kind": kind, "step": step, **record}
        self.logged.append(line)
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def test_the_evaluations_of_a_run_have_it_since_the_first_of_rl(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither that of the base, at step 0, nor those of the warm-up count; the names are those of the run file."""
    entries = {"ocr": OcrReward(), "a": OcrReward(role="gold")}
    names = list(entries)
    rewards = SimpleNamespace(entries=entries, evaluated=names, trained=["ocr"], weights={"ocr": 1.0, "a": 0.0})
    config = SimpleNamespace(training=SimpleNamespace(stop_on_plateau=False))
    run: Any = SimpleNamespace(config=config, rewards=rewards, dir=Directory(tmp_path), eval_is_held_out=True)
    worse = rows({"ocr": [0.0] * 8, "a": [0.0] * 8})
    last = after(GAINS, HALF, HALF)
    with caplog.at_level(logging.INFO, "retouch"):
        for step, evaluated in ((0, worse), (20, BEFORE), (60, BEFORE), (80, last)):
            since = 20 if step >= 20 else None
            measures = [{**row, "ocr": row["ocr.ned"], "a": row["a.ned"]} for row in evaluated]
            record_evaluation(run, step, "step", Evaluation(measures, []), {}, images=0, compared_from=since)
    records = {record["step"]: record for record in run.dir.logged}
    assert all("ocr.hacking_index" not in records[step] for step in (0, 20, 60))
    assert records[80]["ocr.hacking_index"] == pytest.approx(0.125)
    assert records[80]["a.transfer_of_ocr"] == pytest.approx(0.5)
    told = [line for line in caplog.messages if "hacking index" in line]
    assert told == [f"since step 20: {transfers(BEFORE, last, ['ocr'], ['a'])[0].text()}"]


def test_evaluations_of_no_common_example_are_compared_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As those on votes of earlier versions, whose examples had other ids: their guards would be silent for good."""
    entries = {"ocr": OcrReward(), "a": OcrReward(role="gold")}
    rewards = SimpleNamespace(entries=entries, evaluated=[*entries], trained=["ocr"], weights={"ocr": 1.0, "a": 0.0})
    config = SimpleNamespace(training=SimpleNamespace(stop_on_plateau=False))
    run: Any = SimpleNamespace(config=config, rewards=rewards, dir=Directory(tmp_path), eval_is_held_out=True)
    others = [{**row, "example": row["example"] + 100} for row in BEFORE]
    for step, evaluated in ((0, others), (20, others), (40, BEFORE), (60, after(GAINS, HALF, HALF))):
        measures = [{**row, "ocr": row["ocr.ned"], "a": row["a.ned"]} for row in evaluated]
        record_evaluation(run, step, "step", Evaluation(measures, []), {}, images=0, compared_from=0)
    [first, *_, last] = run.dir.logged
    assert "ocr.hacking_index" not in first and last["ocr.hacking_index"] == pytest.approx(0.125)
    [told] = [line for line in caplog.messages if "later ones are not compared with them" in line]
    assert told.startswith(f"{tmp_path}: evaluations up to step 20 have no example in common with later ones")
    assert [record["step"] for record in alike(tmp_path, run.dir.logged)] == [40, 60]
    assert alike(tmp_path, run.dir.logged[:2]) == run.dir.logged[:2] and alike(tmp_path, []) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, None),
        ({"optimizer__lr": 1e-3, "rewards": {"preservation": {"weight": 2.0}}, "evaluation__num_examples": 1}, None),
        ({"evaluation__num_steps": 1}, "num_steps"),
        ({"rollout__num_steps": 4}, "num_steps"),
        ({"rollout__guidance_scale": 2.0}, "rollout.guidance_scale"),
        ({"evaluation__data": None}, "evaluation.data.path, evaluation.data.target"),
        ({"ema": {"decay": 0.9}}, "evaluation.weights"),
        ({"ema": {"decay": 0.9}, "evaluation__weights": "raw"}, None),
        ({"rewards": {"preservation": {"crop": "mask_box"}}}, "rewards.preservation.crop"),
        ({"model__dtype": "bf16"}, "model.dtype"),
        ({"model__transformer": {"path": "other/network"}}, "model.transformer.path"),
        ({"training__mixed_precision": "bf16"}, "training.mixed_precision"),
        ({"model__vae_batch": "tiles"}, "model.vae_batch"),
        ({"model__vae_batch": "one"}, None),
        ({"model__path": "elsewhere/tiny", "model__offload_vae": True, "evaluation__data__max_bad_items": 3}, None),
    ],
)
def test_evaluations_of_other_settings_are_no_earlier_ones(
    changes: dict[str, Any],
    key: str | None,
    run_file: Callable[..., dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A resumed run may change them: a gold reward falls, and a plateau ends, by the settings alone."""
    for name, given in (("config-000040", {}), ("config-000060", changes), ("config", changes)):
        run = parse_run(run_file(**{"evaluation__num_steps": None, **given}))
        text = dump_run(run)
        if name == "config-000040":  # as of a version before that key
            text = re.sub(r"(?m)^ *invert_mask: false\n", "", text)
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    assert alike_after(tmp_path) == (-1 if key is None else 40)
    told = [line for line in caplog.messages if "are not compared with them" in line]
    assert [f"up to step 40 were sampled or scored with other settings ({key})" in line for line in told] == [
        True
    ] * bool(key)
    alone = [{"example": 1, "index": 0, "ocr": 0.5}]
    records = [json.dumps({"kind": "eval", "step": step, "images": 1}) for step in (0, 40, 50, 60)]
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in records), encoding="utf-8")
    for step in (0, 40, 50, 55, 60):  # that of step 55 is of a run that was killed, and went on from step 50
        save_evaluation(Evaluation(alone, []), tmp_path / "evaluations" / f"step-{step:06d}", 0)
    assert [*_earlier(tmp_path, 0, 60)] == ([0, 40, 50] if key is None else [50])


def test_the_section_of_the_report() -> None:
    rewards: dict[str, dict[str, Any]] = {"ocr": {}, "a": {"role": "gold"}, "b": {"role": "gold"}}
    shown = _transfer_section([BEFORE, after(GAINS, HALF, [0.0] * 8)], rewards)
    for words in (
        "Transfer to other readers",
        "<td>ocr (trained)</td><td>+0.250 [+0.150, +0.350]</td><td>–</td>",
        "<td>a</td><td>+0.125 [+0.075, +0.175]</td><td>0.50 [0.50, 0.50]</td>",
        "<td>hacking index</td><td>+0.188 [+0.113, +0.262]</td><td>–</td>",
    ):
        assert words in shown, (words, shown)
    assert _transfer_section([BEFORE, BEFORE], rewards) == _transfer_section([BEFORE], rewards) == ""
    logged = {**rewards, "ocr": {"weight": 0.0}}
    assert _transfer_section([BEFORE, after(GAINS, HALF, HALF)], logged) == ""
    assert _transfer_section(
        [BEFORE, after(GAINS, HALF, HALF)], {**rewards, "ocr": {"weight": 0.0, "gradient_weight": 0.5}}
    )


def test_the_lines_of_an_evaluation_of_a_run() -> None:
    rewards = {"ocr": OcrReward(), "a": OcrReward(role="gold"), "b": OcrReward(weight=0.0)}
    last = after(GAINS, HALF, HALF)
    (found,) = confirmed(Evaluation(last, []), Evaluation(BEFORE, []), rewards)
    assert list(found.shares) == ["a"]
    result = {"means": {"base": {}, "last": {}}, "gains": {}, "against": "base", "images": 8, "examples": 8}
    lines = comparison_table({**result, "transfer": {"last - base": [found.text()]}}).splitlines()
    assert f"last - base: {found.text()}" in lines


@pytest.mark.parametrize("after_rl", [frozenset({"trained"}), frozenset[str]()])
def test_given_weights_that_rewards_have_trained_have_a_transfer(
    after_rl: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`retouch eval --weights`, as the evaluations of the run; a warm-up reads no rewards."""
    rewards = {"ocr": OcrReward(), "a": OcrReward(role="gold")}
    results = {"base": Evaluation(BEFORE, []), "trained": Evaluation(after(GAINS, HALF, HALF), [])}
    monkeypatch.setattr(comparison, "_examples", lambda *_: [])
    monkeypatch.setattr(comparison, "_scoring", lambda *_: nullcontext())
    monkeypatch.setattr(comparison, "_evaluated", lambda *_: results)
    config: Any = SimpleNamespace(rewards=rewards, reward_client=None, evaluation=SimpleNamespace(num_examples=8))
    result = compare(Trained(config, {"trained": Path("weights")}, None, after_rl), None, None, None)
    (found,) = confirmed(results["trained"], results["base"], rewards)
    assert result.get("transfer") == ({"trained - base": [found.text()]} if after_rl else None)
