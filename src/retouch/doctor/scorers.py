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
    """Reward -> number of weights and bytes of its networks, once, of those on one GPU that the run trains on, the one
    with most bytes; and the names of rewards on any of these GPUs whose networks are not known."""
    made_here = {name: entry for name, entry in run.rewards.items() if entry.is_made_here and entry.cpu_only is None}
    on_each = [{name for name, entry in made_here.items() if _is_on(entry, gpu)} for gpu in range(world_size)]
    sizes = {
        name: _networks_size(entry) for name, entry in made_here.items() if any(name in names for names in on_each)
    }
    known = {name: size for name, size in sizes.items() if size is not None}
    fullest = max(on_each, key=lambda names: sum(known[name][1] for name in names & known.keys()))
    return {n: size for n, size in known.items() if n in fullest}, [n for n, size in sizes.items() if size is None]


def _is_on(entry: RewardEntry, number: int) -> bool:
    """Whether an entry has an instance on a GPU that the run trains on."""
    devices = [entry.device] if isinstance(entry.device, str) else entry.device
    return not {"cuda", "auto", f"cuda:{number}"}.isdisjoint(devices)


def _networks_size(entry: RewardEntry) -> tuple[int, int] | None:
    """Weights and bytes of the networks of a reward; None if they are not known."""
    counts = [_weights(o, model) for o, model in entry.models().items() if o not in _WITHOUT_WEIGHTS]
    if not counts or None in counts:
        return None
    weights = sum(count for count in counts if count is not None)
    return weights, weights * BYTES[getattr(entry, "dtype", "fp32")]


def _weights(option: str, model: str) -> int | None:
    if option == "image_encoder" and (folder := encoder_folder(model)) is not None:
        try:
            return sum(weight.numel() for weight in meta_encoder(folder)[0].parameters())
        except ConfigError:  # the line of the reward reports it
            return None
    millions = MILLIONS.get(model.rstrip("/").rpartition("/")[2])
    return None if millions is None else millions * 10**6
