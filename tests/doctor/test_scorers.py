"""Networks of rewards on the GPUs of a run are part of its memory, or named as not counted."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors import safe_open
from transformers import CLIPConfig, CLIPModel, Qwen2VLConfig, Qwen2VLModel, SiglipVisionConfig, SiglipVisionModel

from retouch.config import RunConfig, parse_run
from retouch.doctor.capacity import memory_line
from retouch.doctor.line import GIB
from retouch.doctor.machine import Gpu, Gpus
from retouch.doctor.memory import memory_table, report_memory
from retouch.doctor.model import find_model
from retouch.doctor.networks import build_networks
from retouch.doctor.scorers import MILLIONS, scorers_beside
from retouch.families.image_encoder import TINY
from retouch.families.meta import on_meta


def run_of(**rewards: dict[str, Any]) -> RunConfig:
    return parse_run(
        {
            "name": "t",
            "model": {"family": "flux_fill", "path": "tiny", "dtype": "fp32", "train": {"kind": "lora"}},
            "data": {"format": "self_bench", "path": "x", "resolution": [32, 64]},
            "algorithm": {"name": "grpo"},
            "rewards": {"preservation": {}, **rewards},
        }
    )


def towers(text: int, vision: int, layers: tuple[int, int], heads: tuple[int, int], shared: int) -> CLIPConfig:
    sizes = [
        {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": n, "num_attention_heads": h}
        for width, n, h in zip((text, vision), layers, heads, strict=True)
    ]
    vision_config = {**sizes[1], "patch_size": 14, "image_size": 224}
    return CLIPConfig(text_config=sizes[0], vision_config=vision_config, projection_dim=shared)


def test_the_numbers_of_weights_are_those_of_the_networks() -> None:
    """Of those whose shapes are known here, without data."""
    text = {
        "vocab_size": 151658, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16}
    siglip = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    made = {
        "clip-vit-large-patch14": lambda: CLIPModel(towers(768, 1024, (12, 24), (12, 16), 768)),
        "PickScore_v1": lambda: CLIPModel(towers(1024, 1280, (24, 32), (16, 16), 1024)),
        "siglip-so400m-patch14-384": lambda: SiglipVisionModel(
            SiglipVisionConfig(**siglip, image_size=384, patch_size=14)
        ),
        "HPSv3": lambda: Qwen2VLModel(Qwen2VLConfig(text_config=text, vision_config=vision)),
    }
    for name, network in made.items():
        count = sum(weight.numel() for weight in on_meta(network).parameters())
        assert MILLIONS[name] == pytest.approx(count / 1e6, rel=0.02), name


def test_scorers_on_a_gpu_of_the_run_are_counted_and_others_are_not() -> None:
    run = run_of(
        clip={"device": "auto"},
        hpsv3={"device": "cuda:1", "url": "auto"},
        style={"image_encoder": "tiny", "device": "cuda"},
        pickscore={},
        openai_judge={"url": "http://127.0.0.1:1"},
        mine={"scorer": "clip", "path": "/some/fine-tuned", "device": "cuda"},
        own={"scorer": "fn", "fn": "a:b", "device": "cuda"},
    )
    with safe_open(TINY / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        tiny = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    known, unknown = scorers_beside(run)
    assert known == {"clip": (428_000_000, 1_712_000_000), "style": (tiny, 4 * tiny)} and unknown == ["mine", "own"]
    assert scorers_beside(run, 2)[0]["hpsv3"] == (7_746_000_000, 15_492_000_000)  # bf16, on the second GPU
    apart = run_of(clip={"device": "cuda:0"}, hpsv3={"device": "cuda:1", "url": "auto"}, pickscore={"device": "cuda"})
    assert list(scorers_beside(apart, 2)[0]) == ["hpsv3", "pickscore"]  # no GPU has all three
    assert list(scorers_beside(apart)[0]) == ["clip", "pickscore"]


def test_a_large_scorer_beside_the_network_does_not_fit_one_gpu() -> None:
    """What the network alone leaves free is not what it has."""
    gpus = Gpus([Gpu("one", 12 * GIB, 12 * GIB)], [], "2")
    lines = {}
    for name, device in (("beside", "cuda"), ("elsewhere", "cuda:1")):
        run = run_of(hpsv3={"device": device, "url": "auto"}, own={"scorer": "fn", "fn": "a:b", "device": device})
        networks = build_networks(run.model, find_model(run.model))
        lines[name], report = memory_line(run, networks, gpus, 1), report_memory(run)
        counted = [part for part in report["parts"] if part["what"].startswith("rewards.")]
        assert len(counted) == (name == "beside")
        assert any("not counted: rewards.own: its networks" in line for line in memory_table(report)) == len(counted)
    assert lines["beside"].status == "fix" and "14.4 GiB of networks of hpsv3" in lines["beside"].says
    assert "(without the networks of own, whose sizes are not known)" in lines["beside"].says
    assert lines["elsewhere"].status == "ok" and "hpsv3" not in lines["elsewhere"].says
