"""Model folders as the hub and its cache have them: every command reads them, and an incomplete one is one message.

`benchmarks/released_folders.py` writes them. The toy widths run here in three layouts; released widths in
`make test-all`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, UNet2DConditionModel
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, CLIPTextModel

from retouch.config import ConfigError
from retouch.doctor.model import find_model, model_lines
from retouch.doctor.networks import build_networks
from retouch.errors import InputError
from retouch.families import FAMILIES
from retouch.families.loading import ModelFilesError, is_there, load_component, load_model
from retouch.families.sd_inpaint.spec import SdInpaintModel
from retouch.families.tiny import autoencoder, tiny_pipeline
from retouch.files import hub
from tests.data.hub_stub import HubStub
from tests.families.facts import text_length
from tests.selection import cells, default

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import released_folders

LAYOUTS = {"flux_fill": False, "sd_inpaint": True, "qwen_image_edit": True}
"""Family -> whether its files lie in the hub's cache. Weights lie in several files each, T5's in fp32, Stable
Diffusion's in files of the variant fp16, and Qwen-Image-Edit has a processor beside its tokenizer."""


@pytest.mark.parametrize("family", default(LAYOUTS, "sd_inpaint".__eq__))
def test_every_command_reads_a_folder_of_the_hub(family: str, tmp_path: Path) -> None:
    path = str(released_folders.write_folder(tmp_path / "model", family, tiny=True))
    assert len(list((tmp_path / "model").glob("*net/*-of-*"))) + len(list((tmp_path / "model").glob("tr*/*-of-*"))) > 1
    with ExitStack() as stack:
        if LAYOUTS[family]:
            path = released_folders.into_cache(Path(path), tmp_path / "hub", FAMILIES[family].spec.hub_ids[0])
            stack.enter_context(released_folders.in_cache(tmp_path / "hub"))
        options: dict[str, Any] = {"weights_variant": "fp16", "dtype": "fp32"} if family == "sd_inpaint" else {}
        if length := text_length(family):
            options["max_sequence_length"] = length
        outcomes = released_folders.walk(family, tmp_path, path, **options)
    failed = {name: told[-2000:] for name, (code, told) in outcomes.items() if code}
    assert not failed and len(outcomes) >= 8


@pytest.mark.parametrize("family", ["qwen_image_edit", "qwen_image_21"])
def test_an_encoder_of_released_width_finds_images_by_the_tokens_of_its_folder(family: str) -> None:
    """Not by the released ids, which the tokenizer of bytes does not have."""
    toy, spec = tiny_pipeline(family).components, FAMILIES[family].spec
    marks = released_folders.marks_of(toy["text_encoder"])
    tokenizer = toy["processor"].tokenizer
    assert marks["image_token_id"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    with init_empty_weights():
        made = released_folders.make_network(spec, "text_encoder", spec.networks["text_encoder"], marks)
    assert made.config.image_token_id == marks["image_token_id"]


class Refusing(HubStub):
    """A hub that refuses every file of every repository with one error."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__("some/thing", {})
        self.refusal = status, code

    def answer(self, request: Any, *, body: bool) -> None:
        status, code = self.refusal
        self._reply(request, status, b"", {"X-Error-Code": code, "X-Error-Message": "no"}, body=body)


REFUSALS = {
    (
        403,
        "GatedRepo",
    ): "the hub gives some/thing only to accounts that accepted its terms; accept them on its page, and "
    "set HF_TOKEN to a token of that account",
    (
        404,
        "RevisionNotFound",
    ): "some/thing has no revision main on the hub; give another id, or a folder with its files",
    (
        401,
        "RepoNotFound",
    ): "the hub has no some/thing, or it is private; check the id, and set HF_TOKEN for a private one",
}


@pytest.mark.parametrize("refusal", list(REFUSALS))
def test_a_hub_that_refuses_is_one_message(
    refusal: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers, transformers and huggingface_hub report it in three ways, diffusers a gated id as one that is not
    valid."""
    parts = ((UNet2DConditionModel, "unet"), (CLIPTextModel, "text_encoder"), (AutoTokenizer, "tokenizer"))
    model = SdInpaintModel(path="some/thing")
    with Refusing(*refusal) as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", stub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        calls: list[Callable[[], object]] = [
            *(partial(load_component, kind, "some/thing", name, None) for kind, name in parts),
            lambda: is_there("some/thing", "text_encoder_3"),
            lambda: build_networks(model, find_model(model), download=True),
        ]
        for call in calls:
            with pytest.raises(InputError) as caught:
                call()
            assert str(caught.value).endswith(": " + REFUSALS[refusal])


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[Path]:
    """The snapshot of some/thing in a hub cache, with weights in several files; the hub cannot be reached."""
    made = released_folders.write_folder(tmp_path / "model", "sd_inpaint", tiny=True)
    released_folders.into_cache(made, tmp_path / "hub", "some/thing")
    with released_folders.in_cache(tmp_path / "hub"), mock.patch.object(hub, "_hub", hub._Hub()):
        yield tmp_path / "hub/models--some--thing/snapshots" / released_folders.COMMIT


CUTS: dict[str, Callable[[Path], object]] = {
    "half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "the start": lambda file: os.truncate(file, 5),
    "a link to nothing": lambda file: file.resolve().unlink(),
    "nothing": lambda file: file.unlink(),
}


@pytest.mark.parametrize(("part", "cut"), cells(product(["unet", "text_encoder"], CUTS), 1))
def test_a_download_that_was_cut_is_one_message(part: str, cut: str, cached: Path) -> None:
    model = SdInpaintModel(path="some/thing", weights_variant="fp16", dtype="fp32")
    file = sorted((cached / part).glob("*-of-*.safetensors"))[1]
    CUTS[cut](file)
    name = f"{part}/{file.name}"
    expected = (
        rf"(no {name}|{name} has \d+ bytes, \d+ are expected|{name} is no safetensors file, or only the start of one)"
    )
    with pytest.raises(ModelFilesError) as caught:
        load_model(model)
    start = f"model.path: cannot load {part}/ of some/thing as "
    assert re.fullmatch(re.escape(start) + rf"\w+: {expected}; copy or download it anew", str(caught.value))
    [line] = model_lines(model, find_model(model))
    assert line.status == "fix" and re.search(expected, line.says)


def test_a_commit_that_is_not_in_the_cache_any_more(cached: Path) -> None:
    shutil.rmtree(cached)
    with pytest.raises(ConfigError, match="given 'some/thing'; no such folder, and the hub cannot be reached"):
        load_model(SdInpaintModel(path="some/thing"))


INDICES: dict[str, tuple[str, dict[str, Any], str]] = {
    "another family on the same network": (
        "flux_kontext",
        {"_class_name": "FluxPipeline"},
        "is a FluxPipeline; model.family needs a FluxKontextPipeline",
    ),
    "another variant": ("flux2_klein", {"is_distilled": True}, "is a distilled model; set model.variant=distilled"),
    "times of its own": ("qwen_image_21", {"sample_sigmas": [1.0, 0.5]}, "sets the 2 sampling times sample_sigmas"),
    "another scheduler": (
        "z_image",
        {"scheduler": ["diffusers", "UniPCMultistepScheduler"]},
        "has a UniPCMultistepScheduler; z_image reads the noise levels of a FlowMatchEulerDiscreteScheduler",
    ),
    "an empty prompt that is encoded": (
        "sdxl_inpaint",
        {"force_zeros_for_empty_prompt": False},
        "has force_zeros_for_empty_prompt false",
    ),
}
"""Case -> family, what its model_index.json has, and why it is refused."""


@pytest.mark.parametrize("of_the_hub", [False, True])
@pytest.mark.parametrize("case", list(INDICES))
def test_a_pipeline_that_samples_otherwise_is_refused(case: str, of_the_hub: bool, tmp_path: Path) -> None:
    """Its networks would load: only model_index.json tells it from the family's."""
    family, index, message = INDICES[case]
    path = tmp_path / "model"
    path.mkdir()
    (path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    with ExitStack() as stack:
        if of_the_hub:
            path = Path(released_folders.into_cache(path, tmp_path / "hub", "some/thing"))
            stack.enter_context(released_folders.in_cache(tmp_path / "hub"))
            stack.enter_context(mock.patch.object(hub, "_hub", hub._Hub()))
        section = FAMILIES[family].model_validate({"path": str(path)})
        with pytest.raises(ModelFilesError, match=message):
            load_model(section)
        [problem] = find_model(section).problems
        assert re.search(message, problem)


def test_parts_that_were_downloaded_without_their_index(cached: Path) -> None:
    (cached / "model_index.json").unlink()
    load_model(SdInpaintModel(path="some/thing", weights_variant="fp16", dtype="fp32"))
    with pytest.raises(
        ModelFilesError, match=r"has no model_index.json on this machine, and the hub cannot be reached"
    ):
        is_there("some/thing", "text_encoder_3")


@pytest.mark.parametrize(("version", "is_told"), [("99.0.0.dev0", True), ("0.36.0.dev0", False)])
def test_settings_that_the_installed_diffusers_does_not_read(
    version: str, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen-Image-Edit-2511's `zero_cond_t` was; Z-Image's `nheads` never was one."""
    autoencoder().save_pretrained(tmp_path / "vae")
    file = tmp_path / "vae/config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    more = {"_diffusers_version": version, "zero_cond_t": True, "none_of_its": None, "off": False}
    file.write_text(json.dumps(config | more), encoding="utf-8")
    load_component(AutoencoderKL, str(tmp_path), "vae", None)
    told = (
        f"model.path: config.json of vae/ of {tmp_path} was written by diffusers {version} and sets zero_cond_t=True,"
    )
    assert [message.startswith(told) for message in caplog.messages] == [True] * is_told


def test_weights_that_the_network_of_a_config_has_no_place_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """diffusers' own warning is silenced, because missing weights are one error."""
    autoencoder().save_pretrained(tmp_path / "vae")
    [file] = (tmp_path / "vae").glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "quant_conv.weight": torch.ones(1), "quant_conv.bias": torch.ones(1)}, file, {"format": "pt"})
    load_component(AutoencoderKL, str(tmp_path), "vae", None)
    [told] = caplog.messages
    assert told.startswith(
        f"model.path: 2 weights of vae/ of {tmp_path} have no place in the network of its config.json"
    )


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "flux2_dev"])
def test_every_command_reads_released_widths(family: str, tmp_path: Path) -> None:
    """Without FLUX.2 [dev], whose vocabulary and width alone take 10 GB."""
    outcomes = released_folders.walk_released(family, tmp_path)
    assert not {name: told[-2000:] for name, (code, told) in outcomes.items() if code}
