"""Memory of the networks of rewards on the devices of the run, by the sizes of released models."""

from __future__ import annotations

from retouch.config.run import RunConfig
from retouch.doctor.line import BYTES
from retouch.doctor.networks import encoder_folder, meta_encoder
from retouch.errors import ConfigError
from retouch.rewards.base import RewardEntry

MILLIONS = {
    "clip-vit-base-patch32": 151, "clip-vit-large-patch14": 428, "PickScore_v1": 986, "HPSv2": 986, "HPSv3": 7746,
    "Qwen2.5-VL-7B-Instruct": 8292, "Qwen2.5-VL-3B-Instruct": 3755, "dino-vits16": 22, "dinov2-base": 87,
    "siglip-so400m-patch14-384": 428, "mask2former-swin-small-coco-instance": 69, "sam2.1-hiera-large": 224,
    "ImageReward": 478, "laion-aesthetic": 428,
}  # fmt: skip
"""Last part of a hub id, which a folder of the same name has too -> millions of weights that a scorer loads of it."""

_WITHOUT_WEIGHTS = {"processor", "base"}
"""Options that name a model of which only its tokenizer and its image processor are loaded."""


def scorers_beside(run: RunConfig, world_size: int = 1) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Reward -> number of weights and bytes of its networks, once, of those on a GPU that the run trains on; and the
    names of such rewards whose networks are not known."""
    known: dict[str, tuple[int, int]] = {}
    unknown: list[str] = []
    for name, entry in run.rewards.items():
        if not _is_beside(entry, world_size):
            continue
        counts = [_weights(o, model) for o, model in entry.models().items() if o not in _WITHOUT_WEIGHTS]
        if not counts or None in counts:
            unknown.append(name)
            continue
        weights = sum(count for count in counts if count is not None)
        known[name] = weights, weights * BYTES[getattr(entry, "dtype", "fp32")]
    return known, unknown


def _is_beside(entry: RewardEntry, world_size: int) -> bool:
    if not entry.is_made_here or entry.cpu_only is not None:
        return False
    devices = [entry.device] if isinstance(entry.device, str) else entry.device
    trained_on = {"cuda", "auto", *(f"cuda:{number}" for number in range(world_size))}
    return not trained_on.isdisjoint(devices)


def _weights(option: str, model: str) -> int | None:
    if option == "image_encoder" and (folder := encoder_folder(model)) is not None:
        try:
            return sum(weight.numel() for weight in meta_encoder(folder)[0].parameters())
        except ConfigError:  # the line of the reward reports it
            return None
    millions = MILLIONS.get(model.rstrip("/").rpartition("/")[2])
    return None if millions is None else millions * 10**6
