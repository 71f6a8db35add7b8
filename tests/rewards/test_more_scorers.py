"""Scorers whose values can be worked out: seams and sizes by hand, CLIP against transformers' own call on a tiny
model of the same classes."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from retouch.config import ConfigError
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.seam import edge_bands, sobel
from retouch.types import Failure, Score
from tests import tiny_models
from tests.rewards.fakes import item, picture, score_checked, values


def box_mask(side: int = 32, low: int = 8, high: int = 24) -> np.ndarray[Any, Any]:
    mask = np.zeros((side, side), np.uint8)
    mask[low:high, low:high] = 255
    return mask


# --- seam ---


def test_the_bands_lie_on_both_sides_of_the_edge() -> None:
    mask = box_mask()
    inside, outside = edge_bands(mask, 3)
    assert inside.sum() == 16 * 16 - 10 * 10 and outside.sum() == 22 * 22 - 16 * 16
    assert (mask[inside] == 255).all() and (mask[outside] == 0).all()


def test_sobel_of_a_step_and_of_nothing() -> None:
    step = np.zeros((8, 8, 3), np.uint8)
    step[:, 4:] = 255
    found = sobel(step)
    assert found[4, 3] == found[4, 4] == pytest.approx(1 / np.sqrt(2)) and max(found[4, 0], found[4, 7]) < 1e-6
    assert sobel(np.full((8, 8, 3), 90, np.uint8)).max() < 1e-6


def test_a_repainted_part_as_busy_as_its_surroundings_has_no_seam() -> None:
    scorer, mask = make_scorer("seam"), box_mask(64, 16, 48)
    flat = np.full((64, 64, 3), 128, np.uint8)
    busy = np.where(mask[..., None] >= 128, picture(0, 64, 64), flat)
    batch = [item(i, image=image, mask=mask) for i, image in enumerate([flat, busy, picture(1, 64, 64)])]
    smooth, noisy, odd = score_checked(scorer, batch)
    assert isinstance(smooth, Score) and isinstance(noisy, Score) and isinstance(odd, Score)
    assert smooth.value == pytest.approx(0, abs=1e-6) and noisy.value < -0.1 < odd.value < 0
    assert noisy.value == pytest.approx(-(noisy.detail["inside"] - noisy.detail["outside"]))


def test_a_mask_without_an_edge_is_a_failure() -> None:
    full = item(0, image=picture(0, 32, 32), mask=np.full((32, 32), 255, np.uint8))
    small = item(1, image=picture(0, 32, 32), mask=box_mask(16, 4, 8))
    assert values(score_checked(make_scorer("seam"), [full, small, item(2)])) == ["bad_item"] * 3


# --- jpeg_size ---


def test_size_is_that_of_the_file() -> None:
    one = item(0, image=picture(0, 40, 30))
    buffer = io.BytesIO()
    Image.fromarray(one.image).save(buffer, "JPEG", quality=95)
    expected = 8 * len(buffer.getvalue()) / (24 * 40 * 30)
    flat = item(1, image=np.zeros((40, 30, 3), np.uint8))
    low, high = values(score_checked(make_scorer("jpeg_size"), [one, flat]))
    assert low == pytest.approx(-expected) and low < high  # type: ignore[operator]
    assert values(score_checked(make_scorer("jpeg_size", {"incompressible": True}), [one])) == [pytest.approx(expected)]


@pytest.mark.parametrize("incompressible", [False, True])
def test_no_picture_leaves_the_range_that_is_told(incompressible: bool) -> None:
    """The smaller, the more of the file is headers."""
    sizes = [(1, 1), (1, 2), (3, 1), (8, 8), (17, 17), (64, 64)]
    noise = [item(i, image=picture(i, *sizes[i % 6])) for i in range(60)]
    for quality in (1, 50, 95):
        scorer = make_scorer("jpeg_size", {"quality": quality, "incompressible": incompressible})
        low, high = scorer.spec.range
        found = [one for one in values(score_checked(scorer, noise)) if isinstance(one, float)]
        assert len(found) == 60 and low <= min(found) and max(found) <= high
        assert max(map(abs, found)) > 0.75 * max(-low, high)  # it says something


# --- clip ---


@pytest.fixture(scope="module")
def tiny_clip() -> Path:
    return Path(tiny_models.tiny_clip())


def loaded(name: str, folder: Path, **options: Any) -> Any:
    scorer = make_scorer(name, {"path": str(folder), **options})
    scorer.load("cpu")
    return scorer


def test_clip_and_pickscore_are_what_the_model_itself_says(tiny_clip: Path) -> None:
    """`logits_per_image` of transformers is the scaled cosine of every picture with every text."""
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    batch = [item(i, image=picture(i, 40, 56), prompt=f"a sign {i}") for i in range(3)]
    model: Any = CLIPModel.from_pretrained(tiny_clip).eval()
    tokens = AutoTokenizer.from_pretrained(tiny_clip)(
        [one.prompt for one in batch], padding="max_length", max_length=77, return_tensors="pt"
    )
    processor = AutoImageProcessor.from_pretrained(tiny_clip, backend="pil")
    pixels = processor(images=[one.image for one in batch], return_tensors="pt")
    with torch.inference_mode():
        logits = model(**tokens, **pixels).logits_per_image.diagonal()
    scale = float(model.logit_scale.exp())
    pick = score_checked(loaded("pickscore", tiny_clip, processor=""), batch)
    clip = score_checked(loaded("clip", tiny_clip), batch)
    assert values(pick) == pytest.approx(logits.tolist(), abs=1e-5)
    assert values(clip) == pytest.approx((logits / scale).tolist(), abs=1e-6)
    assert len(set(values(clip))) == 3


@pytest.mark.parametrize("name", ["clip", "pickscore"])
def test_a_score_does_not_depend_on_its_batch(name: str, tiny_clip: Path) -> None:
    batch = [item(i, image=picture(i, 40, 40), prompt="a" * i) for i in range(5)]
    whole = loaded(name, tiny_clip, processor="")
    small = loaded(name, tiny_clip, processor="", images_per_forward=2)
    alone = [values(score_checked(whole, [one]))[0] for one in batch]
    assert values(score_checked(whole, batch)) == pytest.approx(alone, abs=1e-5)
    assert values(score_checked(small, batch)) == pytest.approx(alone, abs=1e-5)


def test_the_revision_names_what_prepares_the_pictures(tiny_clip: Path) -> None:
    """Another processor gives another score, which a cache of scores must tell apart."""
    one, other = (loaded("clip", tiny_clip, processor=given) for given in ("", str(tiny_clip)))
    plain, changed = (scorer.spec.revision.rpartition(" options ") for scorer in (one, other))
    assert changed[0] == f"{plain[0]} as {tiny_clip} {plain[0].split()[-1]}" and changed[2] != plain[2]


def test_the_revision_names_the_model(tiny_clip: Path) -> None:
    assert str(tiny_clip) in loaded("clip", tiny_clip).spec.revision


def test_a_network_computes_in_fp32_whatever_its_file_has(tiny_clip: Path, tmp_path: Path) -> None:
    """transformers takes the precision of the file: cosines would have steps of .002. The revision names it."""
    from transformers import CLIPModel

    batch = [item(i, image=picture(i, 40, 40), prompt="a" * i) for i in range(4)]
    shutil.copytree(tiny_clip, tmp_path, dirs_exist_ok=True)
    model: Any = CLIPModel.from_pretrained(tiny_clip)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    small = loaded("clip", tmp_path)
    model.float().save_pretrained(tmp_path)  # the same weights, rounded, in fp32
    whole = loaded("clip", tmp_path)
    assert small._towers.model.dtype == torch.float32 and f"{tmp_path} fp32 " in small.spec.revision
    assert values(score_checked(small, batch)) == values(score_checked(whole, batch))


def test_images_are_prepared_by_pillow_whether_or_not_torchvision_is_installed(tiny_clip: Path) -> None:
    """torchvision resizes differently, and a server has it where the run does not."""
    from retouch.rewards.scorers import weights

    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.AutoImageProcessor.from_pretrained", lambda path, **how: asked.append(how))
        weights.image_processor(str(tiny_clip))
    assert asked == [{"backend": "pil"}]
    assert type(weights.image_processor(str(tiny_clip))).__name__ == "CLIPImageProcessorPil"
    sources = [file.read_text(encoding="utf-8") for file in Path(weights.__file__).parent.glob("*.py")]
    assert sum(source.count("AutoImageProcessor.from_pretrained") for source in sources) == 1


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"path: given .*nowhere"):
        loaded("clip", tmp_path / "nowhere")


def test_clip_compares_with_another_text_of_the_metadata() -> None:
    """`text_key` names it; an item without it fails alone, in `values` too."""
    image = picture(1, 40, 40)
    captioned = RewardItem(0, "an instruction", image, metadata={"caption": "a sign"})
    items = [captioned, RewardItem(1, "a sign", image), RewardItem(2, "a sign", image, metadata={"caption": 3})]
    by_prompt, by_caption = (
        make_scorer("clip", {"path": tiny_models.tiny_clip(), "text_key": key}) for key in ("", "caption")
    )
    for scorer in (by_prompt, by_caption):
        scorer.load("cpu")
    plain, named = by_prompt.score(items), by_caption.score(items)
    first, other, same = (one.value for one in (plain[0], plain[1], named[0]) if isinstance(one, Score))
    assert same == pytest.approx(other, abs=1e-6) and abs(first - other) > 1e-4
    assert all(isinstance(one, Failure) and "metadata.caption is" in one.message for one in named[1:])
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].expand(3, -1, -1, -1) / 255
    values = by_caption.values(pixels, items)  # type: ignore[attr-defined]
    assert [isinstance(value, Failure) for value in values] == [False, True, True]
    assert " with metadata.caption options " in by_caption.spec.revision
    assert "metadata" not in by_prompt.spec.revision


def test_clip_r_precision_ranks_the_prompt_among_others() -> None:
    """By the cosines of `clip`; the own prompt among the others does not count twice."""
    prompts, image = ["a red sign", "two cats", "rain at night", "x"], picture(1, 40, 40)
    clip, ranks = (make_scorer(name, {"path": tiny_models.tiny_clip()}) for name in ("clip", "clip_r_precision"))
    for scorer in (clip, ranks):
        scorer.load("cpu")
    cosines = [one.value for one in clip.score([RewardItem(0, prompt, image) for prompt in prompts]) if
               isinstance(one, Score)]  # fmt: skip
    for own, prompt in enumerate(prompts):
        [found] = ranks.score([RewardItem(0, prompt, image, metadata={"other_prompts": prompts})])
        rank = 1 + sum(other > cosines[own] for other in cosines)
        assert found == Score(float(rank == 1), {"rank": rank, "prompts": 4})
    for others in (None, [], ["a", 1], "a"):
        [failed] = ranks.score([RewardItem(0, "a", image, metadata={"other_prompts": others})])
        assert isinstance(failed, Failure) and "must be a list of 1 to 1000 texts" in failed.message


def test_embeddings_that_are_not_finite_are_failures() -> None:
    """NaN is above nothing, which would be the first rank, and max(0, NaN) is 0."""
    image = picture(1, 40, 40)
    for name, options in (
        ("clip_r_precision", {"path": tiny_models.tiny_clip()}),
        ("style", {"image_encoder": "tiny", "gate": 0.0}),
    ):
        scorer: Any = make_scorer(name, options)
        scorer.load("cpu")
        one = RewardItem(0, "a sign", image, reference=image, metadata={"other_prompts": ["two cats"]})
        assert isinstance(score_checked(scorer, [one])[0], Score)
        network = scorer._towers.model if name == "clip_r_precision" else scorer._encoder.model
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(torch.nan)
        other = RewardItem(1, "another sign", 255 - image, reference=image[::-1], metadata={"other_prompts": ["a cat"]})
        [outcome] = score_checked(scorer, [other])
        assert isinstance(outcome, Failure) and outcome.code == "scorer_error" and "contains NaN" in outcome.message
