"""Few-step models: which samplers and objectives `retouch check` takes, and what it warns of."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

from retouch.config import RunConfig, load_run
from retouch.config.check import warnings_of
from retouch.config.derived import derive
from tests.config.conftest import REPOSITORY

Run = Callable[..., RunConfig]

TURBO = "model={family: z_image, variant: turbo, path: Tongyi-MAI/Z-Image-Turbo}"
KLEIN = "model={family: flux2_klein, variant: distilled, path: black-forest-labs/FLUX.2-klein-4B}"
LARGE_TURBO = "model={family: sd3, variant: large_turbo, path: stabilityai/stable-diffusion-3.5-large-turbo}"
LARGE = "model={family: sd3, variant: large, path: stabilityai/stable-diffusion-3.5-large}"
BASE = "model={family: flux2_klein}"
LIGHTNING = "model={family: qwen_image, distillation_lora: {path: lightx2v/Qwen-Image-Lightning}}"
MODELS = (TURBO, KLEIN, LARGE_TURBO, LARGE, BASE)
PUBLISHED = ("rollout.num_steps=4", "rollout.noise_level=0.5", "rollout.window={size: 1, range: [0.25, 0.75]}")


def test_which_models_are_distilled(run_with: Run) -> None:
    nft = "algorithm={name: nft}"
    found = {model: run_with(model, nft, "rollout.num_steps=4").model for model in MODELS}
    assert {m: (s.distilled_steps, s.guidance_scale) for m, s in found.items()} == {
        TURBO: (8, 1.0),
        KLEIN: (4, 1.0),
        LARGE_TURBO: (4, 1.0),
        LARGE: (None, 3.5),
        BASE: (None, 4.0),
    }
    assert run_with().model.distilled_steps is None


@pytest.mark.parametrize("model", [TURBO, KLEIN, LARGE_TURBO])
def test_guidance_is_refused_and_off_by_default(model: str, run_with: Run, problems: Callable[..., list[str]]) -> None:
    (line,) = problems(model, "algorithm={name: nft}", "rollout.guidance_scale=4")
    assert line.startswith("small.yaml: rollout.guidance_scale: given 4, but ")
    assert line.endswith("without guidance; set rollout.guidance_scale=1, or the base model")
    run = run_with(model, "algorithm={name: nft}", "rollout.num_steps=4")
    assert derive(run).forwards_per_image == 4 + 2 * (2 + 4)  # no forward is doubled


@pytest.mark.parametrize("name", ["grpo", "nft", "dpo"])
def test_guidance_over_a_few_step_lora_is_warned_of_in_every_algorithm(name: str, run_with: Run) -> None:
    """The default is that of the model below it."""
    told = "rollout.guidance_scale: given 4 with model.distillation_lora, which is distilled for sampling without"
    assert any(line.startswith(told) for line in warnings_of(run_with(LIGHTNING, f"algorithm={{name: {name}}}")))
    off = run_with(LIGHTNING, f"algorithm={{name: {name}}}", "rollout.guidance_scale=1")
    assert not any("guidance_scale" in line for line in warnings_of(off))


def test_the_path_and_the_variant_of_sd3_agree(problems: Callable[..., list[str]]) -> None:
    (line,) = problems("model={family: sd3, path: stabilityai/stable-diffusion-3.5-large-turbo}")
    assert line.endswith(
        "path: given 'stabilityai/stable-diffusion-3.5-large-turbo', but model.variant is 'medium'; set "
        "model.variant=large_turbo, or model.path=stabilityai/stable-diffusion-3.5-medium"
    )


@pytest.mark.parametrize(
    ("rollout", "found"),
    [
        (("rollout.num_steps=4",), "up to 4 of 4 steps are stochastic, the last of them step 4,"),
        (("rollout.num_steps=4", "rollout.window={size: 1, range: [0, 1]}"), "up to 1 of 4 .* of them step 4,"),
        (("rollout.num_steps=4", "rollout.window={size: 3, range: [0, 0.75]}"), "up to 3 of 4 .* of them step 3,"),
        (("rollout.num_steps=4", "rollout.step_rule=cps"), "up to 3 of 4 steps are stochastic, the last of them"),
    ],
)
def test_stochastic_steps_need_deterministic_ones(
    rollout: tuple[str, ...], found: str, run_with: Run, problems: Callable[..., list[str]]
) -> None:
    (line,) = problems(KLEIN, *rollout)
    assert re.search(rf"rollout.window: {found}", line)
    assert line.endswith(
        "set rollout.window={size: 1, range: [0.25, 0.75]} with rollout.num_steps=4 or more, or algorithm.name=nft"
    )
    run_with(BASE, *rollout)


def test_a_run_without_the_key_has_the_guidance_of_its_model(run_with: Run) -> None:
    """The records of a benchmark had that of the family, with which the images were not sampled."""
    nft = "algorithm={name: nft}"
    assert run_with(TURBO, nft).guidance_scale == run_with(KLEIN, nft).guidance_scale == 1.0
    assert run_with(BASE).guidance_scale == run_with(BASE).model.spec.guidance_scale > 1
    assert run_with(BASE, "rollout.guidance_scale=2.5").guidance_scale == 2.5


def test_the_published_windows_are_taken(run_with: Run) -> None:
    run_with(KLEIN, *PUBLISHED)
    run_with(TURBO, "rollout.num_steps=6", "rollout.window={size: 1, range: [0.17, 0.67]}")


def test_warnings_name_what_an_objective_does_to_the_model(run_with: Run) -> None:
    def keys(*overrides: str) -> list[str]:
        return [line.split(":")[0] for line in warnings_of(run_with(*overrides)) if "a distilled model" in line]

    assert keys(BASE, *PUBLISHED) == []
    assert keys(KLEIN, *PUBLISHED) == ["algorithm.name", "algorithm.kl_weight"]
    assert keys(LIGHTNING, *PUBLISHED) == ["algorithm.name", "algorithm.kl_weight"]
    assert keys(KLEIN, *PUBLISHED, "algorithm.kl_weight=0.01") == ["algorithm.name"]
    assert keys(KLEIN, "algorithm={name: nft}") == []
    assert keys(KLEIN, "algorithm={name: nft, kl_weight: 0}") == ["algorithm.kl_weight"]
    assert keys(KLEIN, "algorithm={name: nft, sft_steps: 5}") == ["algorithm.sft_steps"]
    assert keys(KLEIN, "algorithm={name: dpo}") == []
    assert keys(KLEIN, "algorithm={name: sft}", "rewards={}") == ["algorithm.name"]


@pytest.mark.parametrize(
    "name", ["z_image_grpo", "z_image_nft", "flux2_klein_grpo", "flux2_klein_nft", "sd3_grpo", "sd3_nft"]
)
def test_the_overrides_that_run_files_name_for_distilled_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = REPOSITORY / "configs" / f"{name}.yaml"
    monkeypatch.setenv("DATA_PATH", "prompts.txt")
    comments = " ".join(re.findall(r"^# *(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    [named] = re.findall(r'model\.variant=\w+(?: (?:"[^"]+"|[a-z_.]+=[\w./-]+))+', comments)
    run = load_run(path, shlex.split(named))
    assert run.model.distilled_steps is not None and run.rollout.num_steps < 8
