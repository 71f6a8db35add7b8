"""HPS v2.1 (arXiv 2306.09341): a CLIP ViT-H-14 that was fine-tuned on human preferences, on transformers alone.

The published weights are those of open_clip's network; `clip_weights` gives them the names of transformers'
`CLIPModel`. The longest side of an image is resized to 224 pixels, and the rest is padded with black, as the published
code does. The value is the cosine in fp32; that code computes it in fp16, and resizes without antialiasing under old
torchvision.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from unicodedata import normalize

from retouch.config.base import Count, Text
from retouch.errors import ConfigError, installed
from retouch.rewards.base import PackageScorer, RewardEntry, in_batches
from retouch.rewards.pixels import unit_pixels
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.weights import loading, read_weights, require_all, version_of, weights_file
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor

_DIGRAPHS = 0x132, 0x133, *range(0x1C4, 0x1CD), *range(0x1F1, 0x1F4)
_PLAIN = str.maketrans(
    {
        chr(code): normalize("NFKC", chr(code))
        for code in (*_DIGRAPHS, 0x3000, *range(0xFB00, 0xFB07), *range(0xFF01, 0xFFF0))
    }
    | {"ŉ": "'n"}
    | dict.fromkeys("ʼ‘’‚‛", "'")
    | dict.fromkeys("“”„‟", '"')
)
"""Character -> what ftfy puts in its place."""

_HEADS = 16
"""Attention heads of both towers of ViT-H-14."""

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_FILES = ("HPS_v2.1_compressed.pt", "model.safetensors")

_LAYER = {
    "attn.out_proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
"""Module of a block of open_clip -> its name in transformers."""

_OUTSIDE = {
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # spelled like this in transformers
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "logit_scale": "logit_scale",
}
"""Weight of open_clip outside the blocks -> its name in transformers."""

_TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}


class HpsV2Reward(RewardEntry):
    """Human Preference Score v2.1 (arXiv 2306.09341), about .15 to .35."""

    value_range = (-1.0, 1.0)
    differentiable = True

    scorer: Literal["hpsv2"] = "hpsv2"
    path: Text = "xswu/HPSv2"
    """Hub id or folder with HPS_v2.1_compressed.pt or, in imscore's layout, model.safetensors; or such a file."""
    revision: Text = "main"
    """Branch, tag or commit of a hub id; a commit pins the weights."""
    processor: Text = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Hub id or folder of the tokenizer."""
    images_per_forward: Count = 16
    """Images per forward; changes memory and speed, not results."""

    def make(self) -> HpsV2Scorer:
        return HpsV2Scorer(self)


class HpsV2Scorer(PackageScorer[HpsV2Reward]):
    """Cosine between the embeddings of image and prompt."""

    def __init__(self, options: HpsV2Reward) -> None:
        super().__init__(options, f"hpsv2 {options.path}")
        self._model: Any = None

    def load(self, device: str) -> None:
        """Load the two towers and the tokenizer.

        Raises:
            ConfigError: transformers is missing, or there are no such weights.
        """
        with installed():
            import torch
            from transformers import AutoTokenizer, CLIPModel
        o = self.options
        file, version = weights_file(o.path, _FILES, o.revision)
        weights = clip_weights(read_weights(file))
        with loading("processor", o.processor) as place:
            self._tokens: Any = AutoTokenizer.from_pretrained(place)
        with torch.device("meta"):
            model: Any = CLIPModel(clip_config(weights, self._tokens.eos_token_id))
        found = model.load_state_dict(weights, strict=False, assign=True)
        require_all(file, found.missing_keys, found.unexpected_keys)
        for tower in (model.vision_model, model.text_model):  # buffers that are saved in no file
            length = tower.embeddings.position_ids.shape[-1]
            tower.embeddings.position_ids = torch.arange(length, dtype=torch.long)[None]
        self._model = model.float().eval().requires_grad_(False).to(device)
        self._torch, self._device = torch, device
        # 2: prompts are cleaned
        self.set_revision(f"hpsv2 2 {o.path} {version} as {o.processor} {version_of(o.processor)}")

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        batches = in_batches(items, self.options.images_per_forward)
        return [Score(value) for batch in batches for value in self._batch(batch)]

    def values(self, images: Tensor, items: Sequence[RewardItem]) -> list[Tensor | Failure]:
        """The scores of images [B, 3, H, W] in [0, 1], scalars with gradient; `item.image` is not read."""
        found: list[Tensor | Failure] = []
        size = self.options.images_per_forward
        for start in range(0, len(items), size):
            found += self._cosines(list(images[start : start + size]), items[start : start + size]).unbind()
        return found

    def _batch(self, items: Sequence[RewardItem]) -> list[float]:
        with self._torch.no_grad():
            return self._cosines([unit_pixels(item.image) for item in items], items).tolist()

    def _cosines(self, images: Sequence[Tensor], items: Sequence[RewardItem]) -> Tensor:
        """[B] cosines of images [3, H, W] in [0, 1] and the prompts of the items."""
        torch, model = self._torch, self._model
        side = model.config.vision_config.image_size
        pixels = torch.stack([padded(image, side) for image in images])
        length = model.config.text_config.max_position_embeddings
        texts = [cleaned(item.prompt) for item in items]
        tokens = self._tokens(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        with torch.no_grad():
            prompts = model.text_projection(model.text_model(**tokens.to(self._device)).pooler_output)
        seen = model.vision_model(pixel_values=pixels.to(self._device, model.dtype)).pooler_output
        return torch.nn.functional.cosine_similarity(model.visual_projection(seen), prompts)


def cleaned(prompt: str) -> str:
    """A prompt as open_clip's tokenizer cleans it before it is cut into tokens, which that of transformers does not:
    HTML's entities are characters, marks of quotation are straight, and letters have one width and no ligatures.
    Text in a wrong encoding, which ftfy repairs there, stays."""
    return html.unescape(html.unescape(prompt)).translate(_PLAIN)


def padded(image: Tensor, side: int) -> Tensor:
    """An image [3, H, W] in [0, 1] as [3, side, side], normalised: its longest side is `side`, the rest is black."""
    from torch.nn.functional import interpolate, pad

    height, width = (round(length * side / max(image.shape[1:])) for length in image.shape[1:])
    size = (max(1, height), max(1, width))
    pixels = interpolate(image[None], size, mode="bicubic", align_corners=False, antialias=True)[0]
    down, right = side - size[0], side - size[1]
    pixels = pad(pixels, (right // 2, right - right // 2, down // 2, down - down // 2))
    mean, std = (pixels.new_tensor(values)[:, None, None] for values in (_MEAN, _STD))
    return (pixels - mean) / std


def clip_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of open_clip's ViT-H-14 under the names of transformers' `CLIPModel`; unknown ones keep theirs.

    open_clip holds query, key and value in one matrix, and multiplies from the right by its projections, which are
    therefore transposed.
    """
    found: dict[str, Tensor] = {}
    for given, tensor in weights.items():
        name = given.removeprefix("model.")  # of imscore
        block = re.fullmatch(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)", name)
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = tensor
        elif name in _TRANSPOSED:
            found[_TRANSPOSED[name]] = tensor.T.contiguous()
        elif fused := re.fullmatch(r"(visual\.)?transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)", name):
            place = f"{_tower(fused[1])}.encoder.layers.{fused[2]}.self_attn"
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{place}.{part}_proj.{fused[3]}"] = rows.contiguous()
        elif block and block[3] in _LAYER:
            found[f"{_tower(block[1])}.encoder.layers.{block[2]}.{_LAYER[block[3]]}.{block[4]}"] = tensor
        elif name != "attn_mask":
            found[name] = tensor
    return found


def clip_config(weights: Mapping[str, Tensor], eos_token: int) -> Any:
    """`CLIPConfig` of a ViT-H-14, or of a smaller network of its kind, from the shapes of its weights.

    Raises:
        ConfigError: weights of something else.
    """
    from transformers import CLIPConfig

    def tower(name: str) -> dict[str, Any]:
        layers = {key.split(".")[3] for key in weights if key.startswith(f"{name}.encoder.layers.")}
        inner, hidden = weights[f"{name}.encoder.layers.0.mlp.fc1.weight"].shape
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": len(layers)}
        return {**sizes, "num_attention_heads": _HEADS, "hidden_act": "gelu"}

    try:
        vocabulary, _ = weights["text_model.embeddings.token_embedding.weight"].shape
        length, _ = weights["text_model.embeddings.position_embedding.weight"].shape
        patch = weights["vision_model.embeddings.patch_embedding.weight"].shape[-1]
        cells = len(weights["vision_model.embeddings.position_embedding.weight"]) - 1
        text = {**tower("text_model"), "vocab_size": vocabulary, "max_position_embeddings": length}
        vision = {**tower("vision_model"), "patch_size": patch, "image_size": patch * round(cells**0.5)}
        projection = len(weights["visual_projection.weight"])
    except KeyError as error:
        raise ConfigError(f"path: no weights of HPS v2.1: {error.args[0]} is missing") from None
    text |= {"eos_token_id": eos_token, "bos_token_id": 0, "pad_token_id": 0}
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=projection)


def _tower(prefix: str | None) -> str:
    return "vision_model" if prefix else "text_model"
