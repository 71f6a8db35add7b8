"""HPSv3 and EditReward: a VLM with a small head that was trained on preferences, on transformers alone.

The question ends with a token `<|Reward|>`; the head maps the hidden state at that token to a mean and the logarithm of
a standard deviation, of which the mean is the score. One forward and no generation. As in the published code, images
are resized to 256 x 28 x 28 pixels, and tokens have plain positions 0, 1, 2, ... instead of Qwen's three-dimensional
ones: the networks were trained like that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from PIL import Image

from retouch.config.base import Count, Text
from retouch.errors import ConfigError, installed
from retouch.rewards.base import PackageScorer, RewardEntry, in_batches
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.rubrics import PROMPT, rubric
from retouch.rewards.scorers.weights import loading, read_weights, require_all, version_of, weights_file
from retouch.types import Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor

_PIXELS = 256 * 28 * 28
_IMAGE = "<|image_pad|>"
_REWARD = "<|Reward|>"
_MODELS = {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel"}
_LAYERS = ("0", "3", "5")
"""Linear layers of a head; activations and dropout lie between them."""


class HeadReward(RewardEntry):
    """Options that HPSv3 and EditReward share."""

    value_range = (-100.0, 100.0)  # unbounded; published scores are within 20 of 0
    licence = "MIT"
    files: ClassVar[tuple[str, ...]]
    """Names of the file of weights in a folder or on the hub."""
    rubrics: ClassVar[tuple[str, ...]]
    """Questions, one per head."""

    path: str
    """Hub id, folder or file of the weights."""
    revision: Text = "main"
    """Branch, tag or commit of a hub id; a commit pins the weights."""
    base: Text
    """Hub id or folder of the VLM that was fine-tuned: its config, tokenizer and image processor, not its weights."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type of the VLM's weights; the head is fp32."""
    images_per_forward: Count = 8
    """Images per forward; changes memory and speed, and the score by rounding."""

    def models(self) -> dict[str, str]:
        return {"path": self.path, "base": self.base}

    def make(self) -> HeadScorer:
        return HeadScorer(self)


class HpsV3Reward(HeadReward):
    """Human Preference Score v3 (arXiv 2508.03789): of an image and its prompt, about -5 to 15; a Qwen2-VL-7B."""

    files = ("HPSv3.safetensors",)
    rubrics = ("hpsv3",)

    scorer: Literal["hpsv3"] = "hpsv3"
    path: Text = "MizzenAI/HPSv3"
    """Hub id or folder with HPSv3.safetensors, or such a file."""
    base: Text = "Qwen/Qwen2-VL-7B-Instruct"
    """Hub id or folder of the VLM that was fine-tuned: its config, tokenizer and image processor, not its weights."""


class EditRewardReward(HeadReward):
    """EditReward (arXiv 2509.26346) of an edit: the mean of two scores, how the instruction is followed and the visual
    quality; about -5 to 5. Needs a source image."""

    files = ("model.safetensors", "model.pth")
    rubrics = ("editreward_following", "editreward_quality")
    images = frozenset({"source"})
    scores_edits = True

    scorer: Literal["editreward"] = "editreward"
    path: str
    """Hub id or folder with model.safetensors or model.pth, or such a file: a checkpoint of the hub's collection
    TIGER-Lab/editreward on MiMo-VL or Qwen2.5-VL. Those on Qwen3-VL are not supported."""
    base: Text = "XiaomiMiMo/MiMo-VL-7B-SFT-2508"
    """Hub id or folder of the VLM that was fine-tuned: its config, tokenizer and image processor, not its weights."""


class HeadScorer(PackageScorer[HeadReward]):
    """Mean of the heads' means."""

    def __init__(self, options: HeadReward) -> None:
        super().__init__(options)
        self._describe("not loaded")

    def load(self, device: str) -> None:
        """Load the VLM, its heads, its tokenizer and its image processor.

        Raises:
            ConfigError: transformers is missing, or there are no such weights or no such base.
        """
        with installed():
            import torch
            import transformers
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        o = self.options
        file, version = weights_file(o.path, o.files, o.revision)
        network, heads = split_weights(read_weights(file))
        with loading("base", o.base) as place:
            config: Any = transformers.AutoConfig.from_pretrained(place)
            self._tokens: Any = transformers.AutoTokenizer.from_pretrained(place)
            self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(place)
        self._tokens.add_tokens([_REWARD], special_tokens=True)
        self._reward_token: int = self._tokens.convert_tokens_to_ids(_REWARD)
        self._processor.size = {"shortest_edge": _PIXELS, "longest_edge": _PIXELS}
        rows = len(network.get("language_model.embed_tokens.weight", ()))
        if config.model_type not in _MODELS or rows != len(self._tokens) or len(heads) != len(o.rubrics):
            raise ConfigError(
                f"path: given {o.path!r} with base {o.base!r}, which do not belong together: {len(heads)} heads and "
                f"{rows} tokens, given {len(o.rubrics)} and {len(self._tokens)} of a {config.model_type}; set base to "
                "the model that was fine-tuned"
            )
        config.text_config.vocab_size = rows
        kind: Any = getattr(transformers, _MODELS[config.model_type])
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[o.dtype]
        model, found = kind.from_pretrained(
            None, config=config, state_dict=network, dtype=dtype, output_loading_info=True
        )
        require_all(file, list(found["missing_keys"]), list(found["unexpected_keys"]))
        self._model = model.eval().to(device)
        self._heads = [{name: t.float().to(device) for name, t in head.items()} for head in heads]
        self._torch, self._device = torch, device
        self._describe(version, version_of(o.base, config))

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [one for batch in in_batches(items, self.options.images_per_forward) for one in self._batch(batch)]

    def _batch(self, items: Sequence[RewardItem]) -> list[Outcome]:
        names = [name.rpartition("_")[2] for name in self.options.rubrics]
        columns = [self._head(head, items, name) for head, name in zip(self._heads, self.options.rubrics, strict=True)]
        outcomes: list[Outcome] = []
        for row in zip(*(column.tolist() for column in columns), strict=True):
            detail = {"log_sigma": sum(log_sigma for _, log_sigma in row) / len(row)}
            if len(row) > 1:
                detail |= {name: mean for name, (mean, _) in zip(names, row, strict=True)}
            outcomes.append(Score(sum(mean for mean, _ in row) / len(row), detail))
        return outcomes

    def _head(self, head: Mapping[str, Tensor], items: Sequence[RewardItem], question: str) -> Tensor:
        """[B, 2] mean and log sigma of one head for its question."""
        torch = self._torch
        images = [[Image.fromarray(pixels) for pixels in self._images(item)] for item in items]
        seen = self._processor(images=[image for row in images for image in row], return_tensors="pt")
        cells = iter((seen["image_grid_thw"].prod(1) // self._processor.merge_size**2).tolist())
        rows = [self._ids(question, item.prompt, [next(cells) for _ in row]) for item, row in zip(items, images)]
        model, device = self._model, self._device
        pixels = seen["pixel_values"].to(device, model.dtype)
        with torch.inference_mode():
            states = reward_states(model, rows, pixels, seen["image_grid_thw"].to(device), self._reward_token)
            return apply_head(head, states.float())

    def _images(self, item: RewardItem) -> list[Pixels]:
        sources = [item.source] if "source" in self.options.required_images() else []
        return [pixels for pixels in (*sources, item.image) if pixels is not None]

    def _ids(self, question: str, prompt: str, cells: Sequence[int]) -> list[int]:
        """Tokens of a question in the base's chat format; special tokens in a prompt become plain text.

        Args:
            cells: number of tokens of each image.
        """
        text = rubric(question).replace(PROMPT, prompt.replace("<|", "< |"))
        content = [*({"type": "image"} for _ in cells), {"type": "text", "text": text}]
        chat: str = self._tokens.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        before, *after = chat.split(_IMAGE)
        whole = before + "".join(_IMAGE * n + part for n, part in zip(cells, after, strict=True))
        return self._tokens(whole, add_special_tokens=False)["input_ids"]

    def _describe(self, version: str, of_base: str = "") -> None:
        o = self.options
        text = json.dumps([[rubric(name) for name in o.rubrics], o.dtype, o.images_per_forward])
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        self.set_revision(f"{o.scorer} {o.path} {version} base {o.base} {of_base} {digest}")


def reward_states(model: Any, rows: Sequence[Sequence[int]], pixels: Tensor, grids: Tensor, token: int) -> Tensor:
    """[B, D] hidden states at the reward token of every row.

    Args:
        rows: tokens of B questions of any length; each has the reward token once.
        pixels: [P, C] patches of all images, in order.
        grids: [images, 3] patches of each image in time, height and width.
        token: id of the reward token.
    """
    import torch

    length = max(map(len, rows))
    # padded on the right, behind what the reward token attends to
    padded = [([*row, *[0] * (length - len(row))], [1] * len(row) + [0] * (length - len(row))) for row in rows]
    ids, mask = torch.tensor(padded, dtype=torch.long, device=pixels.device).unbind(1)
    hidden = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=torch.arange(length, dtype=torch.long, device=ids.device).expand(3, len(rows), length),
        pixel_values=pixels,
        image_grid_thw=grids,
        use_cache=False,
    ).last_hidden_state
    return hidden[(ids == token) & mask.bool()]


def apply_head(head: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """[B, 2] of hidden states [B, D]: three linear layers with ReLU between them, in fp32."""
    from torch.nn.functional import linear, relu

    for layer in _LAYERS:
        states = linear(states, head[f"{layer}.weight"], head[f"{layer}.bias"])
        if layer != _LAYERS[-1]:
            states = relu(states)
    return states


def split_weights(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Weights of the VLM under the names of transformers 5's model without its language head, and of the score heads.

    Files of transformers 4 have the layers of the language model below `model`, later ones below
    `model.language_model`.
    """
    network: dict[str, Tensor] = {}
    heads: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        if head := re.fullmatch(r"rm_heads?\.(?:(head_\d+)\.)?(\d+\.(?:weight|bias))", name):
            heads.setdefault(head[1] or "", {})[head[2]] = tensor
        elif not name.startswith("lm_head."):
            short = re.sub(r"^model\.(?=visual\.|language_model\.)", "", name)
            network[re.sub(r"^model\.", "language_model.", short)] = tensor
    return network, [heads[name] for name in sorted(heads)]
