"""LPIPS and image similarity: against a second derivation in numpy, and on cases with known values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retouch.config import ConfigError
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.types import Failure, Score
from tests.tiny_models import tiny_clip

WIDTHS = {0: (3, 4), 2: (4, 4), 5: (4, 6), 7: (6, 6), 10: (6, 8), 12: (8, 8), 14: (8, 8), 17: (8, 10), 19: (10, 10),
          21: (10, 10), 24: (10, 10), 26: (10, 10), 28: (10, 10)}  # fmt: skip
"""A VGG16 with fewer channels."""

TAPS = (2, 7, 14, 21, 28)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_vgg(tmp_path_factory.mktemp("lpips"))


def tiny_vgg(folder: Path) -> tuple[Path, Path]:
    """Random weights of a backbone and of heads."""
    source = torch.Generator().manual_seed(0)
    backbone: dict[str, torch.Tensor] = {"classifier.0.weight": torch.zeros(1)}
    for number, (width, out) in WIDTHS.items():
        backbone[f"features.{number}.weight"] = torch.randn(out, width, 3, 3, generator=source) / (3 * width**0.5)
        backbone[f"features.{number}.bias"] = torch.randn(out, generator=source) / 10
    heads = {
        f"lin{i}.model.1.weight": torch.rand(1, WIDTHS[tap][1], 1, 1, generator=source) for i, tap in enumerate(TAPS)
    }
    torch.save(backbone, folder / "vgg16.pth")
    torch.save(heads, folder / "vgg.pth")
    return folder / "vgg16.pth", folder / "vgg.pth"


def images() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    source = np.random.default_rng(0)
    a, b = (source.integers(0, 256, (20, 18, 3)).astype(np.uint8) for _ in range(2))
    return a, b


def naive(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], files: tuple[Path, Path], kept: Any = 1.0) -> float:
    """LPIPS in numpy: convolutions as nine shifted products, pooling by reshaping."""
    backbone, heads = (torch.load(file) for file in files)
    maps = []
    for image in (a, b):
        x = ((image / 255 * kept * 2 - 1) - (-0.030, -0.088, -0.188)) / (0.458, 0.448, 0.450)
        found = []
        for number in WIDTHS:
            if number in (5, 10, 17, 24):
                h, w = x.shape[0] // 2, x.shape[1] // 2
                x = x[: 2 * h, : 2 * w].reshape(h, 2, w, 2, -1).max((1, 3))
            weight, bias = (backbone[f"features.{number}.{part}"].numpy() for part in ("weight", "bias"))
            padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
            shifted = [
                padded[i : i + x.shape[0], j : j + x.shape[1]] @ weight[:, :, i, j].T
                for i in range(3)
                for j in range(3)
            ]
            x = np.maximum(sum(shifted) + bias, 0)
            if number in TAPS:
                found.append(x / (np.linalg.norm(x, axis=-1, keepdims=True) + 1e-10))
        maps.append(found)
    return sum(
        float(((p - q) ** 2 @ heads[f"lin{i}.model.1.weight"].flatten().numpy()).mean())
        for i, (p, q) in enumerate(zip(*maps, strict=True))
    )


def lpips(files: tuple[Path, Path], **options: Any) -> Any:
    scorer = make_scorer("lpips", {"backbone": str(files[0]), "heads": str(files[1]), **options})
    scorer.load("cpu")
    return scorer


def test_lpips_agrees_with_a_second_derivation(files: tuple[Path, Path]) -> None:
    a, b = images()
    mask = np.zeros(a.shape[:2], np.uint8)
    mask[4:9, 3:11] = 255
    [whole, same] = lpips(files).score([RewardItem(0, "", a, source=b), RewardItem(1, "", a, source=a)])
    assert isinstance(whole, Score)
    assert whole.detail["lpips"] == -whole.value == pytest.approx(naive(a, b, files), rel=1e-5)
    assert same.value == 0
    scorer = lpips(files, region="kept")
    assert scorer.spec.needs == {"source", "mask"}
    [kept] = scorer.score([RewardItem(0, "", a, mask=mask, source=b)])
    assert kept.detail["lpips"] == pytest.approx(naive(a, b, files, (mask == 0)[..., None]), rel=1e-5)
    inside = np.where(mask[..., None] > 0, b, a)
    [changed] = scorer.score([RewardItem(0, "", inside, mask=mask, source=a)])
    assert changed.value == 0


def test_lpips_reports_what_it_cannot_measure(files: tuple[Path, Path], tmp_path: Path) -> None:
    a, _ = images()
    [small, other] = lpips(files).score(
        [RewardItem(0, "", a[:8], source=a[:8]), RewardItem(1, "", a, source=a[:, :-1])]
    )
    assert isinstance(small, Failure)
    assert isinstance(other, Failure)
    with pytest.raises(ConfigError, match="heads: given 'none'; no such file"):
        make_scorer("lpips", {"backbone": str(files[0]), "heads": "none"}).load("cpu")
    with pytest.raises(ConfigError, match=r"the file has no tensor lin0\.model\.1\.weight"):
        make_scorer("lpips", {"backbone": str(files[0]), "heads": str(files[0])}).load("cpu")


def tiny_vit() -> str:
    """A DINO of toy size with random weights, as facebook/dino-vits16 is released."""
    import json
    import tempfile

    from transformers import ViTConfig, ViTModel

    folder = Path(tempfile.mkdtemp(prefix="retouch-vit-"))
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(**shape, image_size=32, patch_size=8), add_pooling_layer=False).save_pretrained(folder)
    processor = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("encoder", [tiny_clip, tiny_vit])
@pytest.mark.parametrize("rows", [1, 3])
def test_an_image_of_as_few_rows_as_channels_is_embedded_as_what_it_is(encoder: Callable[[], str], rows: int) -> None:
    """It is one colour, which no resizing changes."""
    thin, square = (np.full((height, 40, 3), (200, 60, 10), np.uint8) for height in (rows, 40))
    scorer = make_scorer("image_similarity", {"path": encoder(), "against": "reference"})
    scorer.load("cpu")
    [outcome] = scorer.score([RewardItem(0, "", thin, reference=square)])
    assert isinstance(outcome, Score) and outcome.value == pytest.approx(1, abs=1e-5)
    if encoder is tiny_clip:
        clip = make_scorer("clip", {"path": encoder()})
        clip.load("cpu")
        one, other = (
            outcome.value for outcome in clip.score([RewardItem(0, "red", thin), RewardItem(1, "red", square)])
        )  # type: ignore[union-attr]
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("encoder", [tiny_clip, tiny_vit])
def test_similarity_is_the_cosine_of_two_embeddings(encoder: Callable[[], str]) -> None:
    a, b = images()
    path = encoder()
    scorer = make_scorer("image_similarity", {"path": path, "against": "reference", "images_per_forward": 2})
    scorer.load("cpu")
    assert scorer.spec.needs == {"reference"}
    items = [RewardItem(i, "", a, reference=other) for i, other in enumerate((a, b, b[:9]))]
    same, other, cut = (outcome.value for outcome in scorer.score(items))  # type: ignore[union-attr]
    assert same == pytest.approx(1, abs=1e-5)
    assert -1 <= other < 0.99999
    assert cut != other
    [alone] = scorer.score(items[1:2])
    assert isinstance(alone, Score)
    assert alone.value == pytest.approx(other, abs=1e-5)


def test_the_first_aesthetic_predictor_is_a_linear_layer_on_clip(tmp_path: Path) -> None:
    from retouch.rewards.scorers.clip import ClipTowers

    a, b = images()
    layer = torch.nn.Linear(16, 1)
    torch.save(layer.state_dict(), tmp_path / "head.pth")
    scorer = make_scorer("aesthetic_v1", {"head": str(tmp_path / "head.pth"), "path": tiny_clip()})
    scorer.load("cpu")
    found = [outcome.value for outcome in scorer.score([RewardItem(i, "", x) for i, x in enumerate((a, b))])]  # type: ignore[union-attr]
    with torch.no_grad():
        expected = layer(ClipTowers(tiny_clip(), "", "cpu").of_images([a, b])).flatten().tolist()
    assert found == pytest.approx(expected, abs=1e-6)
    torch.save(torch.nn.Linear(8, 1).state_dict(), tmp_path / "head.pth")
    with pytest.raises(ConfigError, match=r"has a weight \(1, 8\); expected \(1, 16\)"):
        make_scorer("aesthetic_v1", {"head": str(tmp_path / "head.pth"), "path": tiny_clip()}).load("cpu")
