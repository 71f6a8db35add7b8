"""The score of an item depends on the item alone (of a scorer of groups: on its group): the same in any order and
batch, after anything else, and in any thread. Every scorer of the registry; networks are of toy size and random."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import chain
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from rapidocr.ch_ppocr_det.main import DetPreProcess, TextDetector

from retouch.imaging.glyphs import font_path
from retouch.rewards import REWARDS
from retouch.rewards.protocol import CheckedScorer, Pixels, RewardItem, Scorer
from retouch.rewards.rubrics import PROMPT
from retouch.rewards.scorers import judge_client, make_scorer, preference_head, regions
from retouch.rewards.scorers.mask_generation import Settings, region_boxes
from retouch.tiny.signs import draw_sign
from retouch.types import Failure, Outcome, Score
from tests.rewards.openai_server import KEY, OpenAIServer, pictures, text_of
from tests.rewards.test_geneval import tiny_detector
from tests.rewards.test_hps import open_clip_weights
from tests.rewards.test_image_distances import tiny_vgg, tiny_vit
from tests.rewards.test_imgedit import write_questions
from tests.rewards.test_other_libraries import KINDS
from tests.rewards.test_preference_heads import tiny_editreward, tiny_hpsv3
from tests.rewards.test_regions import tiny_sam
from tests.taste.voters import random_head
from tests.tiny_models import tiny_clip, tiny_vlm

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in REWARDS if name not in ("fn", "style")),
    ("fn", {"fn": "tests.rewards.user_scorers:brightness"}),
    ("style", {"image_encoder": "tiny"}),
    ("style", {"image_encoder": "tiny", "detect": False}),
    ("ocr", {"detect": False}),
    ("ocr_lines", {"places": False, "order": "kept"}),
    ("glyph_structure", {"boxes": "fitted"}),
    ("recognizer", {"line": "ink"}),
    ("lpips", {"region": "kept"}),
    ("image_similarity", {"against": "reference"}),
    ("clip", {"text_key": "caption"}),
    ("vlm", {"mode": "yes"}),
    ("geneval", {"value": "soft"}),
    ("openai_judge", {"mode": "rubric"}),
    ("unified_reward", {"form": "pair"}),
    ("unified_reward", {"form": "point"}),
    ("pairwise", {"against": "reference"}),
    ("mmmg", {"readability": "sam2"}),
]
"""Scorers of the registry, with options that choose another way to score."""

WITHIN = 1e-4
"""Rounding of a batch in fp32, and of the recogniser's confidence."""


# --- items that every scorer can score ---


def written(lines: Sequence[str], width: int, size: int = 30) -> Pixels:
    """Clean lines of text, one below the other."""
    page = Image.new("RGB", (width, 20 + 50 * len(lines)), "white")
    font = ImageFont.truetype(font_path("FredokaOne"), size)  # whose narrow space is lost in a wide line
    for number, line in enumerate(lines):
        ImageDraw.Draw(page).text((16, 12 + 50 * number), line, font=font, fill="black")
    return np.asarray(page)


@cache
def items() -> list[RewardItem]:
    """Groups of two and three images that have all that any scorer reads; three have places for their lines, one of
    which is wider than what the recogniser is made for."""
    texts = [["TO LET", "OPEN DAILY"], ["MOKA"], ["GRAND HOTEL", "SEA VIEW"], ["BERU"], ["VOLE"]]
    found: list[RewardItem] = []
    for number, lines in enumerate(texts):
        placed = number in (1, 3, 4)
        if placed:
            sign = draw_sign(lines[0], (32, 420) if number == 1 else (48, 96 + 16 * number), number)
            image = np.pad(np.asarray(sign.picture), ((24, 40), (0, 0), (0, 0)), "edge")
            mask = np.pad(np.asarray(sign.mask), ((24, 40), (0, 0)))
        else:
            image = written(lines, 300 + 20 * number)
            mask = np.zeros(image.shape[:2], np.uint8)
            mask[4:-4, 4:-4] = 255
        rows, columns = np.nonzero(mask)
        box = [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]
        noise = np.random.default_rng(number).integers(-40, 40, image.shape)
        source = np.clip(image[:, ::-1].astype(np.int16) + noise, 0, 255).astype(np.uint8)
        elements = ["a square", "a circle", "a sign"]
        metadata: dict[str, Any] = {
            "text": " ".join(lines), "source_text": lines[0], "caption": f"a caption of {lines[0]}",
            "lines": [{"text": lines[0], "box": box}] if placed else [*lines[:-1], lines[-1] + "S" * (number == 2)],
            "tag": "counting", "include": [{"class": "dog", "count": 1 + number}, {"class": "cup", "count": 1}],
            "other_prompts": ["a red sign", "rain at night"], "edit_type": "replace", "finished": number != 2,
            "completion": f"<think>a thought</think>{'words of an answer ' * (number + 1)}",
            "knowledge_graph": {"elements": elements, "dependencies": ["Contains(a square, a circle)"]},
        }  # fmt: skip
        prompt = f"a sign that says '{lines[0]}'" + " at night" * number
        reference = np.ascontiguousarray(image[:, : 48 + 8 * number])
        found.append(RewardItem(number, prompt, image, mask, source, reference, int(number > 1), metadata))
    return found


# --- scorers, loaded ---


def says(name: str) -> Callable[[dict[str, Any]], str] | None:
    """The text of the answer of a judge that is asked for no schema: by its pictures and its question alone."""

    def drawn(asked: dict[str, Any], least: int, most: int, count: int) -> list[int]:
        seen = zlib.crc32(b"".join(picture.tobytes() for picture in pictures(asked)) + text_of(asked).encode())
        return [Random(seen + n).randint(least, most) for n in range(count)]

    def lines(asked: dict[str, Any]) -> str:
        kind = text_of(asked).split()[2].rstrip(".")
        parts = zip(("Kept", "& Clean", "Real"), drawn(asked, 1, 5, 3), strict=True)
        return "\n".join(f"{kind} {part}: {value}" for part, value in parts)

    words = ["HARBOUR", "MOKA", "BERU", "SALE", "CAFE"]
    return {
        "imgedit": lines,
        "viescore": lambda asked: json.dumps({"score": drawn(asked, 0, 10, 2)}),
        "longtext": lambda asked: " ".join(words[n] for n in drawn(asked, 0, 4, 3)),
        "textpecker": lambda asked: json.dumps({"recognized_text": words[drawn(asked, 0, 4, 1)[0]]}),
    }.get(name)


class Model(torch.nn.Module):
    """Stands for the models of imscore."""

    @classmethod
    def from_pretrained(cls, path: str, strict: bool = False) -> Model:
        return cls()

    def score(self, pixels: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return pixels.mean((1, 2, 3)) + torch.tensor([len(prompt) / 100 for prompt in prompts])


def saved(folder: Path, name: str, weights: Mapping[str, Any]) -> str:
    torch.save(weights, folder / name)
    return str(folder / name)


def files_of(name: str, given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options that name files, which are written to `folder`."""
    if name == "hpsv2":
        from transformers import AutoTokenizer

        weights = open_clip_weights(len(AutoTokenizer.from_pretrained(tiny_clip())))
        path = saved(folder, "HPS_v2.1_compressed.pt", {"state_dict": weights})
        return {"path": path, "processor": tiny_clip()}
    made: dict[str, Callable[[], dict[str, Any]]] = {
        **dict.fromkeys(("clip", "clip_r_precision", "mask_composite"), lambda: {"path": tiny_clip()}),
        "pickscore": lambda: {"path": tiny_clip(), "processor": ""},
        "aesthetic_v1": lambda: {
            "path": tiny_clip(), "head": saved(folder, "head.pth", torch.nn.Linear(16, 1).state_dict())
        },
        "image_similarity": lambda: {"path": tiny_vit()},
        "lpips": lambda: dict(zip(("backbone", "heads"), map(str, tiny_vgg(folder)), strict=True)),
        "vlm": lambda: {"path": tiny_vlm(), "dtype": "fp32", "min_mass": 0.0, "images_per_forward": 2},
        "hpsv3": lambda: {"path": str(tiny_hpsv3(folder)), "base": str(folder), "dtype": "fp32"},
        "editreward": lambda: {"path": str(tiny_editreward(folder)), "base": str(folder), "dtype": "fp32"},
        "geneval": lambda: {"detector": str(tiny_detector(folder)), "color_model": tiny_clip()},
        "imgedit": lambda: {"prompts": str(write_questions(folder / "questions.json"))},
        "mmmg": lambda: {"segmenter": tiny_sam(folder)},
        "taste": lambda: {"path": str(random_head(folder))},
    }  # fmt: skip
    return made[name]() if name in made else {}


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Networks that see few pixels, stand-ins for libraries that cannot be installed, and a key for judges."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge_client._BUCKETS.clear()
    monkeypatch.setattr(TextDetector, "get_preprocess", lambda own: DetPreProcess(160, "min", own.mean, own.std))
    monkeypatch.setattr(preference_head, "_PIXELS", 4 * 28 * 28)
    monkeypatch.setattr(preference_head, "rubric", lambda name: f"{name} {PROMPT}? <|Reward|>.")
    monkeypatch.setattr(regions, "region_boxes", partial(region_boxes, settings=Settings(side=2, least_stability=0.0)))
    for module, kind in KINDS.values():
        made = ModuleType(module)
        setattr(made, kind, Model)
        monkeypatch.setitem(sys.modules, module, made)
    yield


def loaded(name: str, given: Mapping[str, Any], files: Mapping[str, Any], server: OpenAIServer) -> Scorer:
    fields = REWARDS[name].model_fields
    pace = {"threads": 1} if "threads" in fields and "boxes" not in given else {}
    judge = {"model": "judge", "address": server.url} if "address" in fields else {}
    scorer = make_scorer(name, {**pace, **judge, **files, **given})
    scorer.load("cpu")
    return scorer


# --- the property ---


OF_ANOTHER = {
    *("cvtg-", "flow_grpo_ocr-", "longtext-", "ocr-False", "ocr_lines-False-kept"),  # read as `ocr` or `ocr_lines` do
    *("imgedit-", "textedit_judge-", "viescore-"),  # ask as `complex_edit` does
    *("pairwise-reference", "unified_reward-pair", "unified_reward-point", "geneval-soft"),
    *("glyph_structure-", "style-tiny"),  # find lines as `ocr` does; of places that are given, other cases
    *("lpips-kept", "vlm-yes", "clip-caption", "image_similarity-reference"),  # options
    *("recognizer-ink", "openai_judge-rubric"),
    *("textedit-", "mmmg-sam2"),  # finds lines as `ocr_lines` does; cuts regions as tests/rewards/test_regions.py does
}
"""Cases that do what another one does by the same code, or under another option: `make test-all` takes them."""


def test_every_scorer_has_a_case() -> None:
    assert {name for name, _ in CASES} == set(REWARDS)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        pytest.param(name, given, id=case, marks=[pytest.mark.full] if case in OF_ANOTHER else [])
        for name, given in CASES
        for case in [f"{name}-{'-'.join(map(str, given.values()))}"]
    ],
)
@pytest.mark.usefixtures("_tiny")
def test_the_score_of_an_item_depends_on_nothing_else(name: str, given: dict[str, Any], tmp_path: Path) -> None:
    with OpenAIServer(says=says(name)) as server:
        files = files_of(name, given, tmp_path)
        one, other = (CheckedScorer(loaded(name, given, files, server)) for _ in range(2))
        compares = getattr(one.scorer, "compares_group", False)
        units = [items()[:2], items()[2:]] if compares else [[item] for item in items()]

        def scored(scorer: CheckedScorer, order: Sequence[int], size: int = 1) -> list[Outcome]:
            """Outcomes in the order of the units, of which `size` are scored at a time in this order."""
            found: dict[int | str, Outcome] = {}
            for start in range(0, len(order), size):
                batch = list(chain.from_iterable(units[place] for place in order[start : start + size]))
                found |= zip([item.id for item in batch], scorer.score(batch), strict=True)
            return [found[item.id] for item in items()]

        places = list(range(len(units)))
        mixed = Random(1).sample(places, len(places))
        # each unit has another history: of the two scorers, the first and the last unit see one that is new
        first = scored(one, places)
        again = {
            "in the opposite order": scored(other, places[::-1]),
            "in one batch": scored(one, places, len(places)),
        }
        with ThreadPoolExecutor(2) as pool:
            together = [pool.submit(scored, one, *how) for how in ((mixed, 3), (mixed[::-1], 1))]
            again |= {
                f"in a thread beside another, {(3, 1)[i]} at a time": future.result()
                for i, future in enumerate(together)
            }
    values = [outcome.value for outcome in first if isinstance(outcome, Score)]
    assert len(values) >= 3, first
    assert len({round(value, 6) for value in values}) > 1 or name in ALIKE, "all values are equal: they prove nothing"
    for how, outcomes in again.items():
        for item, expected, found in zip(items(), first, outcomes, strict=True):
            assert alike(expected, found), f"item {item.id} {how}: {expected} became {found}"


ALIKE = {"think_format", "textedit", "clip_r_precision", "geneval", "mmmg"}
"""Scorers whose values may be equal for these items."""


def alike(a: Any, b: Any) -> bool:
    """Whether two outcomes, or parts of them, are equal up to rounding."""
    if isinstance(a, Score) and isinstance(b, Score):
        return alike(a.value, b.value) and alike(dict(a.detail), dict(b.detail))
    if isinstance(a, Failure) and isinstance(b, Failure):
        return a == b
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= WITHIN * max(1.0, abs(a))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def test_what_is_not_alike() -> None:
    assert not alike(Score(0.5), Score(0.6)) and not alike(Score(0.5, {"text": "a"}), Score(0.5, {"text": "b"}))
    assert not alike(Score(0.5), Failure("scorer_error", "no")) and alike(Score(0.5), Score(0.5 + WITHIN / 2))
