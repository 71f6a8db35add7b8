"""The evaluation: fixed seeds, no dependence on how it is batched, and its numbers by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import retouch.training.evaluation as evaluation
from retouch.config import ConfigError, RunConfig
from retouch.data.dataset import Dataset, load_dataset
from retouch.data.formats import FACETS
from retouch.data.formats.prompts import PromptsData
from retouch.observe import Stopwatch
from retouch.observe.statistics import MIN_EXAMPLES, bootstrap_intervals, paired_difference, student
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.rewards.table import RewardTable
from retouch.training import evaluations
from retouch.training.evaluation import (
    Evaluation,
    evaluate,
    evaluation_grid,
    load_evaluation,
    masked_input,
    save_evaluation,
)
from retouch.types import Example
from retouch.use import comparison
from retouch.use.loaded import Loaded

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.fixture
def loaded(config: Callable[..., RunConfig]) -> Loaded:
    return Loaded(config())


@pytest.fixture
def examples(loaded: Loaded) -> Dataset:
    assert loaded.config.evaluation.data is not None
    return load_dataset(loaded.config.evaluation.data)


def run(loaded: Loaded, examples: Any, batch_size: int, images: int = 2) -> Evaluation:
    rewards = RewardTable({"preservation": PreservationReward()}, RewardClientConfig())
    rewards.start()
    try:
        return evaluate(loaded.model, loaded.network, examples, images, 3, 30.0, batch_size, rewards, Stopwatch())
    finally:
        rewards.close()


def test_batches_do_not_change_the_result(loaded: Loaded, examples: Dataset) -> None:
    """Eight images by eight, three and one: the same pictures within a rounding step, the same again bit for bit."""
    whole, again, thirds, single = (run(loaded, examples, size) for size in (8, 8, 3, 1))
    assert whole.rows == again.rows
    assert all(np.array_equal(a, b) for a, b in zip(whole.images, again.images, strict=True))
    for other in (thirds, single):
        for a, b in zip(whole.images, other.images, strict=True):
            assert np.abs(a.astype(int) - b.astype(int)).max() <= 1
        for measure, value in whole.means().items():
            rounding = 0.02 * value if measure.startswith("picture.") else 1e-4  # a level more or less, as JPEG
            assert other.means()[measure] == pytest.approx(value, abs=rounding)


def test_processes_share_the_pictures_and_score_each_once(
    loaded: Loaded, examples: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven pictures on three processes, of which the last draws two for nothing: as one process has them, one at a
    time."""
    work = evaluation.work_of(examples[:], 2)[:7]
    rewards = RewardTable({"preservation": PreservationReward()}, RewardClientConfig())
    scored = []
    real = RewardTable.submit
    monkeypatch.setattr(RewardTable, "submit", lambda self, items, **o: scored.extend(items) or real(self, items, **o))
    rewards.start()

    def share(own: evaluation.Work, padding: int) -> evaluation.Scored:
        unused = work[:1] * padding
        return evaluation.draw_and_score(loaded.model, loaded.network, own, 3, 30.0, 1, rewards, Stopwatch(), unused)

    try:
        parts = [share(work[:3], 0), share(work[3:6], 0), share(work[6:], 2)]
        assert len(scored) == 7
        whole = share(work, 0)
    finally:
        rewards.close()
    shared = evaluation.measured(work, parts[0] + parts[1] + parts[2])
    assert shared.rows == evaluation.measured(work, whole).rows
    assert all(np.array_equal(a, b) for a, b in zip(parts[2].images, whole.images[6:], strict=True))


def test_an_image_depends_on_its_example_and_index_alone(loaded: Loaded, examples: Dataset) -> None:
    together = run(loaded, examples, 4)
    (last,) = (run(loaded, [examples[3]], 4, images=1).images,)
    assert np.abs(last[0].astype(int) - together.images[6].astype(int)).max() <= 1
    assert not np.array_equal(together.images[6], together.images[7])


def test_rows_say_what_was_measured(loaded: Loaded, examples: Dataset) -> None:
    evaluation = run(loaded, examples, 8)
    assert [(row["example"], row["index"]) for row in evaluation.rows] == [(200 + i // 2, i % 2) for i in range(8)]
    for row, image, example in zip(
        evaluation.rows, evaluation.images, [e for e in examples for _ in "ab"], strict=True
    ):
        assert row["text"] == example.metadata["text"]
        assert row["preservation"] == pytest.approx(1 - row["outside_l1"], abs=1e-6)  # scored before paste-back
        assert row["outside_l1"] > 0
        outside = np.asarray(example.mask) < 128
        assert np.array_equal(image[outside], np.asarray(example.source)[outside])  # shown after it


def test_gold_is_compared_with_rewards_that_train_by_their_value_or_their_gradient() -> None:
    table = {
        "valued": PreservationReward(weight=0.5),
        "followed": PreservationReward(weight=0.0, gradient_weight=4.0),
        "both": PreservationReward(weight=1.0, gradient_weight=2.0),
        "logged": PreservationReward(weight=0.0),
        "gold": PreservationReward(role="gold"),
    }
    found = evaluations.optimized(RewardTable(table, RewardClientConfig()))
    assert found == {"valued": 0.5, "followed": 4.0, "both": 3.0}


def test_a_kind_that_is_no_word_or_number_is_left_out() -> None:
    """The metadata of a manifest may hold anything under these names."""
    about = {"level": ["PhD"], "discipline": None, "complexity": 3, "image_type": "real"}
    image = np.zeros((4, 4, 3), np.uint8)
    row = evaluation._row(Example(1, "p", metadata=about), 0, image, image)
    assert {name: row[name] for name in FACETS if name in row} == {"complexity": 3, "image_type": "real"}


def test_means_leave_failed_rewards_out_and_count_them() -> None:
    rows = [
        {"example": 1, "index": 0, "text": "A", "ocr": 0.5, "ocr.exact": True, "read": "A"},
        {"example": 1, "index": 1, "text": "A", "ocr": None},
        {"example": 2, "index": 0, "text": None, "ocr": 1.0, "ocr.exact": False, "read": ""},
    ]
    assert Evaluation(rows, []).means() == {"ocr": 0.75, "ocr.exact": 0.5, "failed": 1.0}
    assert Evaluation(rows[:1], []).means() == {"ocr": 0.5, "ocr.exact": 1.0}


def test_an_evaluation_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    rows: list[dict[str, Any]] = [{"example": 1, "index": i, "ocr": None, "read": "é"} for i in range(3)]
    save_evaluation(Evaluation(rows, [picture, 255 - picture, picture]), tmp_path, 2)
    back = load_evaluation(tmp_path)
    assert back.rows == rows
    assert [image.tolist() for image in back.images] == [picture.tolist(), (255 - picture).tolist()]


def test_the_grid_has_a_row_for_each_example_and_a_column_for_each_evaluation(
    loaded: Loaded, examples: Dataset
) -> None:
    evaluation = run(loaded, examples[:2], 4)
    small = evaluation_grid(examples[:2], {"before": evaluation}, 1)
    large = evaluation_grid(examples[:2], {"before": evaluation, "after": evaluation}, 2)
    assert large.width == pytest.approx(small.width * 1.5, abs=10)
    assert large.height > 1.7 * small.height
    example = examples[0]
    seen = masked_input(example)
    hole = np.asarray(example.mask) >= 128
    assert (seen[hole] == 127).all()
    assert np.array_equal(seen[~hole], np.asarray(example.source)[~hole])
    assert Image.fromarray(seen).size == (64, 32)


def test_the_grid_shows_what_every_evaluation_has_an_image_of(loaded: Loaded, examples: Dataset) -> None:
    """Of an earlier one fewer images were kept, where `grid_examples` was raised since; one without any is left out."""
    after = run(loaded, examples[:2], 4)
    first = sum(row["example"] == after.rows[0]["example"] for row in after.rows)
    fewer, none = Evaluation(after.rows, after.images[:first]), Evaluation(after.rows, [])
    assert (
        evaluation_grid(examples[:2], {"before": fewer, "after": after}, 2).size
        == evaluation_grid(examples[:2], {"before": after, "after": after}, 1).size
    )
    assert (
        evaluation_grid(examples[:2], {"before": none, "after": after}, 2).size
        == evaluation_grid(examples[:2], {"after": after}, 2).size
    )


@pytest.mark.parametrize(
    ("after", "before", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0], (2.5, 0.4457, 4.5543)),  # s = 1.290994, half = 3.182446 s / 2
        ([0.6, 0.5], [0.5, 0.2], (0.2, -1.0706, 1.4706)),  # s / sqrt(2) = .1, half = 12.706205 x .1
        ([0.7, 0.8], [0.5, 0.6], (0.2, 0.2, 0.2)),  # the same gain everywhere is certain, whatever the level
        ([0.7], [0.5], (0.2, -np.inf, np.inf)),
    ],
)
def test_the_interval_of_a_paired_difference(
    after: list[float], before: list[float], expected: tuple[float, float, float]
) -> None:
    assert paired_difference(after, before) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [
        (1, 12.706204736), (2, 4.302652730), (3, 3.182446305), (4, 2.776445105), (5, 2.570581836), (9, 2.262157163),
        (10, 2.228138852), (30, 2.042272456), (100, 1.983971519), (1000, 1.962339081),
    ],
)  # fmt: skip
def test_the_quantile_is_that_of_the_published_tables(degrees: int, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, abs=1e-8)


def test_the_quantile_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees in (*range(1, 60), 191, 511, 4_095, 20_000):
        assert student(degrees) == pytest.approx(float(stats.t.ppf(0.975, degrees)), abs=1e-9)
        for outside in (0.2, 1e-3, 1e-6):
            expected = float(stats.t.isf(outside / 2, degrees))
            assert student(degrees, 1 - outside) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("pairs", [3, 5, 10, 30])
def test_the_interval_holds_the_true_difference_95_times_of_100(pairs: int) -> None:
    """Of normal differences, for any number of pairs; the normal quantile would hold .81, .88, .92 and .94."""
    trials = np.random.default_rng(pairs).normal(0.3, 1.0, (4000, pairs))
    intervals = [paired_difference(list(trial), [0.0] * pairs) for trial in trials]
    held = np.mean([low <= 0.3 <= high for _, low, high in intervals])
    assert held == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors of 4000 trials


DESIGNS = [(2, 1), (2, 8), (4, 1), (6, 8), (16, 8), (64, 4), (256, 1), (256, 8)]


@pytest.mark.parametrize(("examples", "images"), DESIGNS)
def test_verdicts_without_an_effect_are_one_of_twenty(examples: int, images: int) -> None:
    """The difference of an example, common to its images, is as large as that of its images: where each image counted
    as an example, 21 % of 64 x 4, 38 % of 16 x 8 and 30 % of 2 x 1 had a verdict. Where an effect is as large as one
    standard error of the design, one of six finds it, and at 2.8 standard errors four of five."""
    source = np.random.default_rng(examples * images)
    labels = [example for example in range(examples) for _ in range(images)]
    zeros = [0.0] * len(labels)
    trials = 400
    error = ((1 + 1 / images) / examples) ** 0.5
    found = dict.fromkeys((0.0, 1.0, 2.8), 0)
    for _ in range(trials):
        noise = np.repeat(source.normal(0, 1, examples), images) + source.normal(0, 1, len(labels))
        mean, low, _ = paired_difference(list(noise), zeros, labels)
        for effect in found:
            found[effect] += abs(mean + effect * error) > mean - low
    false, one, large = (count / trials for count in found.values())
    assert false < 0.05 + 3 * (0.05 * 0.95 / trials) ** 0.5
    if examples >= 16:
        assert 0.10 < one < 0.24 and large > 0.7


@pytest.mark.parametrize("examples", [MIN_EXAMPLES, 12, 40])
def test_exact_matches_are_no_exception(examples: int) -> None:
    """Differences of -1, 0 and 1 without any effect. Five examples would have a verdict in 6 % of the runs in which
    each differs, because their differences are equal and the interval has no width."""
    source = np.random.default_rng(examples)
    for changed in (1.0, 0.3):
        signs = source.choice([-1.0, 0.0, 1.0], (600, examples), p=[changed / 2, 1 - changed, changed / 2])
        intervals = [paired_difference(list(one), [0.0] * examples) for one in signs]
        false = np.mean([low > 0 or high < 0 for _, low, high in intervals])
        assert false < 0.05 + 3 * (0.05 * 0.95 / 600) ** 0.5


def test_examples_count_the_same_whatever_their_images() -> None:
    """By hand: examples of 1 and 3 images have means of .2 and .6; s / sqrt(2) = .2."""
    mean, low, high = paired_difference([0.2, 0.5, 0.6, 0.7], [0.0] * 4, ["a", "b", "b", "b"])
    assert (mean, low, high) == pytest.approx((0.4, 0.4 - 12.706205 * 0.2, 0.4 + 12.706205 * 0.2), abs=1e-6)


@pytest.mark.parametrize(("units", "least"), [(6, 0.90), (20, 0.93)])
def test_a_bootstrap_of_few_units_covers(units: int, least: float) -> None:
    """The mean of normal values, where percentiles of 2.5 and 97.5 cover it in 86 and 92 of 100 cases."""
    trials = np.random.default_rng(units).normal(0, 1, (250, units))
    covered = 0
    for values in trials:
        low, high = bootstrap_intervals(units, lambda drawn, v=values: {"m": float(v[drawn].mean())}, 200)["m"]
        covered += low <= 0 <= high
    assert covered / len(trials) >= least


def test_what_is_not_paired_has_no_difference() -> None:
    for after, before in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="are no pairs"):
            paired_difference(after, before)


def test_runs_with_other_style_references_are_not_compared(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given ones beside a cut of the image: their difference would be that of the references."""
    runs: dict[str, Any] = {
        name: SimpleNamespace(config=config(rewards={"style": {}}, evaluation__data__reference=role), run=Path(name))
        for name, role in (("a", "mask_box"), ("b", "given"))
    }
    monkeypatch.setattr(comparison, "_examples", lambda c, *_: Dataset(c.evaluation.data, []))
    told = r"reference: a \(mask_box\) and b \(given\) have different style references; .* with --reference"
    with pytest.raises(ConfigError, match=told):
        comparison.compare_runs(runs, {}, None, None, None)


def test_several_runs_are_sampled_with_the_settings_of_the_first(
    config: Callable[..., RunConfig], caplog: pytest.LogCaptureFixture
) -> None:
    """Steps, guidance, resolution and masks: only the weights differ, and they repaint one region. Guidance of another
    family is its own."""
    first = config(rollout__num_steps=3)
    other = config(evaluation__num_steps=5, rollout__guidance_scale=2.0, evaluation__data__resolution=[64, 128])
    sampled = comparison._sampled_as("a", first, "b", other)
    assert sampled.evaluation.num_steps == 3 and sampled.rollout.guidance_scale is None
    assert sampled.evaluation.data is not None and first.evaluation.data is not None
    assert sampled.evaluation.data.size == first.evaluation.data.size
    changes = ("num_steps 3 instead of 5", "rollout.guidance_scale 30.0 instead of 2.0", "resolution")
    assert "b is sampled with the settings of a: " in caplog.text and all(one in caplog.text for one in changes)
    caplog.clear()
    assert comparison._sampled_as("a", first, "b", first).evaluation.num_steps == 3 and not caplog.records
    edit = config(model={"family": "qwen_image_edit", "path": "tiny", "dtype": "fp32"}, rollout__guidance_scale=4.0)
    assert comparison._sampled_as("a", first, "b", edit).rollout.guidance_scale == 4.0
    inverted = comparison._sampled_as("a", first, "b", config(evaluation__data__invert_mask=True)).evaluation.data
    assert inverted is not None and not inverted.image_options.invert_mask
    alone = first.evaluation.model_copy(update={"data": PromptsData(path="p.txt")})
    prompts = first.model_copy(update={"evaluation": alone})
    kept = comparison._sampled_as("b", prompts, "a", first).evaluation.data  # prompts have no such options
    assert kept is not None and kept.image_options == first.evaluation.data.image_options
