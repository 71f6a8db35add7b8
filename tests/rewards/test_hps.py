"""HPS v2.1: weights in open_clip's layout, by a forward of open_clip's network written out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from retouch.config import ConfigError
from retouch.rewards.pixels import unit_pixels
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.hps import cleaned, clip_weights, padded
from tests.rewards.fakes import item, picture, score_checked, values
from tests.tiny_models import tiny_clip

WIDTHS = {"visual.": 48, "": 32}
LAYERS, HEADS, PATCH, CELLS, LENGTH, SHARED = 2, 16, 8, 9, 77, 24


def open_clip_weights(vocabulary: int) -> dict[str, Tensor]:
    """A small network of the kind of ViT-H-14, random, under open_clip's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "visual.conv1.weight": (48, 3, PATCH, PATCH),
        "visual.class_embedding": (48,),
        "visual.positional_embedding": (CELLS + 1, 48),
        "visual.proj": (48, SHARED),
        "token_embedding.weight": (vocabulary, 32),
        "positional_embedding": (LENGTH, 32),
        "text_projection": (32, SHARED),
        "logit_scale": (),
    }
    norms = {"visual.ln_pre": 48, "visual.ln_post": 48, "ln_final": 32}
    for prefix, width in WIDTHS.items():
        for i in range(LAYERS):
            block = f"{prefix}transformer.resblocks.{i}"
            shapes |= {f"{block}.attn.in_proj_weight": (3 * width, width), f"{block}.attn.in_proj_bias": (3 * width,)}
            sizes = (("attn.out_proj", width, width), ("mlp.c_fc", 2 * width, width), ("mlp.c_proj", width, 2 * width))
            for name, out, into in sizes:
                shapes |= {f"{block}.{name}.weight": (out, into), f"{block}.{name}.bias": (out,)}
            norms |= {f"{block}.ln_1": width, f"{block}.ln_2": width}
    noise = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=noise) / 4 for name, shape in shapes.items()}
    for name, width in norms.items():
        found[f"{name}.weight"] = 1 + torch.randn(width, generator=noise) / 4
        found[f"{name}.bias"] = torch.randn(width, generator=noise) / 4
    return found


def tower(w: dict[str, Tensor], x: Tensor, prefix: str, causal: bool) -> Tensor:
    """The blocks of open_clip on [B, S, D], with torch's own attention of one fused matrix."""
    mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1) if causal else None
    for i in range(LAYERS):
        p = f"{prefix}transformer.resblocks.{i}."
        attention = torch.nn.MultiheadAttention(x.shape[-1], HEADS, batch_first=True)
        attention.load_state_dict({k.removeprefix(f"{p}attn."): t for k, t in w.items() if k.startswith(f"{p}attn.")})
        y = norm(w, x, f"{p}ln_1")
        x = x + attention(y, y, y, need_weights=False, attn_mask=mask)[0]
        hidden = F.gelu(F.linear(norm(w, x, f"{p}ln_2"), w[f"{p}mlp.c_fc.weight"], w[f"{p}mlp.c_fc.bias"]))
        x = x + F.linear(hidden, w[f"{p}mlp.c_proj.weight"], w[f"{p}mlp.c_proj.bias"])
    return x


def norm(w: dict[str, Tensor], x: Tensor, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


@torch.no_grad()
def open_clip_score(w: dict[str, Tensor], pixels: Tensor, ids: Tensor, end: int) -> float:
    """Of one image [1, 3, H, W] and one text [1, S]."""
    cells = F.conv2d(pixels, w["visual.conv1.weight"], stride=PATCH).flatten(2).transpose(1, 2)
    x = torch.cat([w["visual.class_embedding"].expand(1, 1, -1), cells], 1) + w["visual.positional_embedding"]
    x = tower(w, norm(w, x, "visual.ln_pre"), "visual.", causal=False)
    image = norm(w, x[:, 0], "visual.ln_post") @ w["visual.proj"]
    y = tower(w, w["token_embedding.weight"][ids] + w["positional_embedding"], "", causal=True)
    text = norm(w, y, "ln_final")[:, ids[0].tolist().index(end)] @ w["text_projection"]
    return float(F.normalize(image) @ F.normalize(text).T)


@pytest.fixture(scope="module")
def tokens() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_clip())


@pytest.fixture(scope="module")
def weights(tokens: Any) -> dict[str, Tensor]:
    return open_clip_weights(len(tokens))


def scorer_of(path: Path) -> Any:
    made = make_scorer("hpsv2", {"path": str(path), "processor": tiny_clip(), "images_per_forward": 2})
    made.load("cpu")
    return made


@pytest.mark.parametrize("layout", ["published", "imscore", "file"])
def test_the_weights_of_open_clip_score_as_its_network_does(
    layout: str, weights: dict[str, Tensor], tokens: Any, tmp_path: Path
) -> None:
    """Images of several shapes, scored in batches of two."""
    path = tmp_path
    if layout == "imscore":
        save_file({f"model.{name}": t.clone() for name, t in weights.items()}, tmp_path / "model.safetensors")
    else:
        torch.save({"state_dict": weights}, tmp_path / "HPS_v2.1_compressed.pt")
        path = tmp_path / "HPS_v2.1_compressed.pt" if layout == "file" else tmp_path
    batch = [item(i, image=picture(i, *size), prompt="a" * i) for i, size in enumerate([(24, 24), (40, 12), (9, 30)])]
    expected: list[float] = []
    for one in batch:
        ids = tokens([one.prompt], padding="max_length", max_length=LENGTH, return_tensors="pt")["input_ids"]
        pixels = padded(unit_pixels(one.image), 24)[None]
        expected.append(open_clip_score(weights, pixels, ids, tokens.eos_token_id))
    assert values(score_checked(scorer_of(path), batch)) == pytest.approx(expected, abs=1e-6)
    assert len({round(value, 3) for value in expected}) == 3


def test_prompts_are_cleaned_as_open_clip_cleans_them(weights: dict[str, Tensor], tmp_path: Path) -> None:
    """transformers' tokenizer has other tokens for “SALE” than for "SALE", and open_clip's has the same."""
    same = [
        'a sign "SALE" & it\'s open',
        "a sign “SALE” &amp; it’s open",
        "a sign &ldquo;SALE‟ &amp;amp; it‘s　ｏｐｅｎ",
    ]
    assert {cleaned(prompt) for prompt in same} == {same[0]} and cleaned("ﬁne ﬂower") == "fine flower"
    assert cleaned("Ĳs ǅep Ǉubǉana ŉ ǳ") == "IJs Džep LJubljana 'n dz"
    torch.save({"state_dict": weights}, tmp_path / "HPS_v2.1_compressed.pt")
    image = picture(0, 24, 24)
    straight, curly, wide = values(score_checked(scorer_of(tmp_path), [item(0, image=image, prompt=p) for p in same]))
    assert straight == pytest.approx(curly, abs=1e-6) == pytest.approx(wide, abs=1e-6)


def test_every_weight_has_one_name_and_none_is_lost(weights: dict[str, Tensor]) -> None:
    found = clip_weights(weights)
    assert sum(t.numel() for t in found.values()) == sum(t.numel() for t in weights.values())
    assert clip_weights(found).keys() == found.keys()  # transformers' own names stay


def test_a_file_that_lacks_weights_is_refused(weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({k: t for k, t in weights.items() if k != "visual.ln_post.bias"}, tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(ConfigError, match=r"lacks weights \(vision_model.post_layernorm.bias\)"):
        scorer_of(tmp_path)
    torch.save({**weights, "head.weight": torch.zeros(1)}, tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(ConfigError, match=r"has unknown weights \(head.weight\)"):
        scorer_of(tmp_path)
    (tmp_path / "HPS_v2.1_compressed.pt").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="is no file of weights"):
        scorer_of(tmp_path)


def test_a_wide_image_is_padded_with_black_before_it_is_normalised() -> None:
    """10 x 40 becomes 5 x 20, in rows 7 to 11."""
    found = padded(torch.ones(3, 10, 40), 20)
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    columns = found[:, :, 10].T.tolist()
    assert found.shape == (3, 20, 20)
    assert columns[:7] + columns[12:] == [pytest.approx(list(-mean / std), abs=1e-5)] * 15
    assert columns[7:12] == [pytest.approx(list((1 - mean) / std), abs=1e-5)] * 5
