"""Win rates of two weights by a judge of two images: mirrored when they are swapped, and free of position bias."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.scorers import judge_client as judge
from retouch.rewards.scorers.ocr import OcrReward
from retouch.rewards.scorers.openai_judge import OpenAIJudgeReward
from retouch.rewards.scorers.pairing import Preference
from retouch.rewards.scorers.pairwise import PairwiseReward
from retouch.tiny.signs import draw_words, write_signs
from retouch.types import Example
from retouch.use.comparison import _scoring
from retouch.use.duels import pair_judges, win_rate_lines, win_rate_of, win_rates
from tests.command_line import retouch
from tests.rewards.openai_server import KEY, OpenAIServer, pictures, text_of


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()
    yield


@dataclass(frozen=True)
class Result:
    rows: Sequence[dict[str, Any]]
    images: Sequence[np.ndarray[Any, Any]]
    raw: Sequence[np.ndarray[Any, Any]] = ()


def result(levels: Sequence[int]) -> Result:
    """Two images of each example, of one level of grey each."""
    rows = [{"example": i // 2, "index": i % 2} for i in range(len(levels))]
    return Result(rows, [np.full((8, 8, 3), level, np.uint8) for level in levels])


EXAMPLES = [Example(i, f"wall {i}") for i in range(3)]
RESULTS = {"base": result([100, 90, 80, 120, 60, 70]), "newest": result([130, 80, 140, 130, 60, 130])}


def entry(server: OpenAIServer, **options: Any) -> PairwiseReward:
    return PairwiseReward(model="judge", address=server.url, **options)


@pytest.mark.parametrize("bias", [0.0, 0.2])
def test_the_win_rate_is_the_mean_preference_and_has_no_position_bias(bias: float) -> None:
    with OpenAIServer(prefers_first=bias) as server:
        judges = {"better": entry(server)}
        found = win_rates(judges, RESULTS, EXAMPLES, [("base", "newest"), ("newest", "base")])
        assert {one["messages"][0]["content"][0]["text"][-6:] for one in server.asked[2:]} >= {"wall 0", "wall 2"}
    lead = [a - b for a, b in zip((130, 80, 140, 130, 60, 130), (100, 90, 80, 120, 60, 70), strict=True)]
    there, back = found["newest over base"]["better"], found["base over newest"]["better"]
    assert there["win_rate"][0] == pytest.approx(0.5 + np.mean(lead) / 510, abs=1e-6)
    assert there["margin"] == -back["margin"]  # mirrored, to the bit
    assert there["win_rate"][1:] == pytest.approx([1 - one for one in back["win_rate"][:0:-1]], abs=0.02)
    assert there["win_rate"][1] < there["win_rate"][0] < there["win_rate"][2]
    assert there["position_bias"] == pytest.approx(bias, abs=1e-6) and there["pairs"] == 6
    assert (there["order_dependent"] == 1.0) is (bias > 0)


def test_a_pair_without_an_answer_is_missing() -> None:
    with OpenAIServer() as server:
        judges = {"better": entry(server)}
        server.breaks = lambda asked: 400 if "wall 1" in text_of(asked) else 0
        [told] = win_rates(judges, RESULTS, EXAMPLES, [("base", "newest")])["newest over base"].values()
        assert (told["pairs"], told["missing"]) == (4, 2)
        server.breaks = lambda asked: 400 if "wall" in text_of(asked) else 0
        assert win_rates(judges, RESULTS, EXAMPLES, [("base", "newest")]) == {}


def test_win_rates_count_in_the_budget_of_the_run(tmp_path: Path) -> None:
    with OpenAIServer() as server:
        judges = {"better": entry(server, budget_requests=14)}  # a first question, and six pairs in both orders
        first, again = (win_rates(judges, RESULTS, EXAMPLES, [("base", "newest")], tmp_path) for _ in range(2))
        assert first["newest over base"]["better"]["pairs"] == 6 and again == {} and len(server.asked) == 14


def test_rewards_of_an_evaluation_count_in_the_budget_of_the_run(tmp_path: Path) -> None:
    with OpenAIServer() as server:
        judge = OpenAIJudgeReward(model="judge", address=server.url)
        with _scoring({"mine": judge}, RewardClientConfig(), tmp_path):
            pass
    assert (tmp_path / "judge-spending/mine.d").is_dir()


def test_the_judge_gets_the_crop_and_the_source() -> None:
    mask = np.zeros((8, 8), np.uint8)
    mask[:2, :4] = 255
    source = Image.fromarray(np.full((8, 8, 3), 9, np.uint8))
    examples = [Example(i, "wall", source=source, mask=Image.fromarray(mask)) for i in range(3)]
    with OpenAIServer() as server:
        chosen = entry(server, task="fill", crop="mask_box", box_min_side=4)
        win_rates({"better": chosen}, RESULTS, examples, [("base", "newest")])
        shown = pictures(server.asked[-1])
    assert [picture.shape for picture in shown] == [(4, 4, 3)] * 3 and int(shown[0].max()) == 9


@pytest.mark.parametrize("paste_back", [True, False])
def test_the_judge_gets_the_composite_or_the_raw_image_as_its_entry_says(paste_back: bool) -> None:
    raw = {name: Result(one.rows, one.images, [255 - image for image in one.images]) for name, one in RESULTS.items()}
    with OpenAIServer() as server:
        judges = {"better": entry(server, paste_back=paste_back)}
        win_rates(judges, raw, EXAMPLES[:3], [("base", "newest")])
        shown = {int(picture[0, 0, 0]) for asked in server.asked[2:] for picture in pictures(asked)}
    levels = {int(image[0, 0, 0]) for one in RESULTS.values() for image in one.images}
    assert shown == (levels if paste_back else {255 - level for level in levels})


def test_images_of_an_example_are_one_unit() -> None:
    """Four copies of each preference narrow no interval; other examples do."""
    found = [Preference(p, 1 - p) for p in (0.2, 0.9, 0.6, 0.4)]
    once = win_rate_of([0, 1, 2, 3], found)
    copies = win_rate_of([0, 1, 2, 3] * 4, found * 4)
    assert copies["win_rate"] == pytest.approx(once["win_rate"]) and copies["pairs"] == 16
    more = win_rate_of(range(16), found * 4)
    assert more["win_rate"][2] - more["win_rate"][1] < 0.7 * (once["win_rate"][2] - once["win_rate"][1])


def test_the_interval_is_that_of_the_normal_approximation_for_many_examples() -> None:
    noise = np.random.default_rng(0).uniform(0, 1, 400)
    rate, low, high = win_rate_of(range(400), [Preference(float(p), 1 - float(p)) for p in noise])["win_rate"]
    half = 1.96 * noise.std() / 20
    assert (rate, low, high) == pytest.approx((noise.mean(), noise.mean() - half, noise.mean() + half), abs=0.005)


def test_rewards_that_score_one_image_are_no_judges_of_pairs() -> None:
    assert pair_judges({"ocr": OcrReward(), "far": PairwiseReward(url="http://127.0.0.1:1")}) == {}


def test_a_line_for_the_terminal() -> None:
    told = {"win_rate": [0.61, 0.55, 0.67], "pairs": 64, "order_dependent": 0.12, "position_bias": 0.08, "missing": 0}
    [line] = win_rate_lines({"b over a": {"better": told}})
    assert line.startswith("better: b over a in 61.0% [55.0%, 67.0%] of 64 pairs, both orders; 12% depend on the order")


@pytest.mark.full
def test_retouch_eval_prints_the_win_rate_of_the_trained_weights_over_the_base(tmp_path: Path) -> None:
    """A judge of role gold is used there only: the run asks it once, when it starts."""
    write_signs(tmp_path / "signs", draw_words(2, "train", 1), (32, 64), 1)
    data = {"format": "self_bench", "path": str(tmp_path / "signs"), "resolution": [32, 64]}
    with OpenAIServer() as server:
        better = {"scorer": "pairwise", "role": "gold", "model": "judge", "address": server.url, "paste_back": False}
        run = {
            "name": "small", "data": data,
            "model": {"family": "flux_fill", "path": "tiny", "dtype": "fp32", "train": {"kind": "lora"}},
            "rollout": {"group_size": 2, "global_groups_per_batch": 2, "num_steps": 2},
            "algorithm": {"name": "grpo"}, "rewards": {"jpeg_size": {}, "better": better},
            "optimizer": {"lr": 0.01, "gradient_accumulation": 1}, "logging": {"dir": str(tmp_path), "sinks": []},
            "training": {"max_steps": 2, "eval_every": 0, "mixed_precision": "no"},
            "evaluation": {"num_examples": 2},
        }  # fmt: skip
        (tmp_path / "run.yaml").write_text(json.dumps(run), encoding="utf-8")
        outcome = retouch("train", tmp_path / "run.yaml")
        assert outcome.code == 0, outcome.err
        assert len(server.asked) == 1
        outcome = retouch("eval", "--run", tmp_path / "small", "--data", tmp_path / "signs", "--images", 2, "--json")
        assert outcome.code == 0, outcome.err
        told = json.loads(outcome.out)["win_rates"]
        [label] = told
        assert len(server.asked) == 1 + 2 + 8  # four pairs, both orders; the scorer loads twice
    rate, low, high = told[label]["better"]["win_rate"]
    assert label.endswith(" over base") and low <= rate <= high and told[label]["better"]["pairs"] == 4
