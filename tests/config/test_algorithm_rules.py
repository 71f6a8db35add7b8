"""Combinations of algorithm, rollout and model that cannot work, each with its message and a neighbour that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from retouch.algorithms.grpo.config import GrpoConfig
from retouch.config import RunConfig
from retouch.config.check import warnings_of
from retouch.config.needs import needed_pictures
from retouch.core.rules import STEP_RULES

Problems = Callable[..., list[str]]
RunWith = Callable[..., RunConfig]

SD = "model={family: sd_inpaint, path: tiny}"
NFT, DPO, SFT = ("algorithm={name: nft}", "algorithm={name: dpo}", "algorithm={name: sft}")
PAIRS = "data={format: manifest, path: pairs.json, resolution: 64}"
OFFLINE = (PAIRS, "rewards={}")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        # what the network predicts
        (
            ("rollout.step_rule=ddim",),
            ("rollout.step_rule: given 'ddim', but flux_fill predicts a velocity; set one of flow_sde, dance_sde, cps"),
        ),
        *(
            (
                (SD, f"rollout.step_rule={rule}"),
                f"rollout.step_rule: given '{rule}', but sd_inpaint predicts the noise; set one of ddim",
            )
            for rule in ("flow_sde", "dance_sde", "cps")
        ),
        (
            (SD, "rollout.eta=1.5"),
            (
                "rollout.eta: given 1.5, but for step_rule ddim it is a share in (0, 1]; set 1, its default, or "
                "another step_rule"
            ),
        ),
        (
            (SD, "rollout.num_steps=1"),
            (
                "rollout.num_steps: given 1, but step_rule ddim adds no noise in the last step; set num_steps to 2 or "
                "more, or another step_rule"
            ),
        ),
        (
            (SD, "rollout.window={size: 2, range: [0.8, 1.0]}"),
            (
                "rollout.window.size: given 2, but window.range [0.8, 1.0] of num_steps 10 holds 1 stochastic steps of "
                "ddim; widen the range or lower the size"
            ),
        ),
        (
            (SD, "algorithm={name: grpo, kl_weight: 0.04, kl_mode: flow_grpo}"),
            (
                "algorithm.kl_mode: given 'flow_grpo', which is for the std of flow_sde, but "
                "rollout.step_rule is ddim; set kl_mode=exact"
            ),
        ),
        (
            (SD, "data.resolution=20"),
            "data.resolution: given 20; sd_inpaint needs multiples of 8; set 16",
        ),
        (
            ("model={family: sd_inpaint, path: someone/SD}", "data.resolution=[516, 768]"),
            "data.resolution: given (516, 768); sd_inpaint needs multiples of 8; set [512, 768]",
        ),
        # options of others
        (
            ("rollout.eta=0.5",),
            (
                "rollout.eta: given 0.5, which scales the noise of dance_sde and ddim, but "
                "rollout.step_rule is flow_sde; "
                "leave eta out"
            ),
        ),
        (
            (SD, "rollout.noise_level=0.5"),
            (
                "rollout.noise_level: given 0.5, which scales the noise of flow_sde and cps, but "
                "rollout.step_rule is ddim; "
                "leave noise_level out"
            ),
        ),
        (
            ("rollout.window={size: 2, stride: 2}",),
            (
                "rollout.window.stride: given 2, which a sliding window reads, but position is 'random'; set "
                "position=sliding, or leave stride out"
            ),
        ),
        (
            ("algorithm={name: grpo, kl_mode: flow_grpo}",),
            (
                "algorithm.kl_mode: given 'flow_grpo', but algorithm.kl_weight is 0: there is no KL; set kl_weight "
                "(Flow-GRPO: 0.04), or leave kl_mode out"
            ),
        ),
        (
            (SD, SFT, "algorithm.shifted_times=false"),
            "algorithm.shifted_times: given false, but sd_inpaint samples without a shift; leave shifted_times out",
        ),
        *(
            (
                (algorithm, f"{section}.{key}=2"),
                f"{section}.{key}: given {value}, but {name} {does}; leave {out} out",
            )
            for name, algorithm in (("nft", NFT), ("dpo", DPO))
            for section, key, value, does, out in (
                ("rollout", "eta", "2", "samples by the ODE", "eta"),
                ("rollout", "noise_level", "2", "samples by the ODE", "noise_level"),
            )
        ),
        *(
            (
                (f"algorithm={{name: {algorithm}, kl_weight: 0.04, kl_mode: flow_grpo}}", f"rollout.step_rule={rule}"),
                (
                    "algorithm.kl_mode: given 'flow_grpo', which is for the std of flow_sde, but "
                    f"rollout.step_rule is {rule}; set kl_mode=exact, or step_rule=flow_sde"
                ),
            )
            for algorithm, rule in (("grpo", "cps"), ("ppo", "dance_sde"))
        ),
        # groups without a signal
        *(
            (
                (f"algorithm={{name: {algorithm}, skip_zero_std_groups: true}}",),
                (
                    "algorithm.skip_zero_std_groups: given true, but algorithm.baseline=batch compares with the whole "
                    f"batch, where a group with zero reward variance counts as well{stays}; leave it out, or set "
                    "baseline=group"
                ),
            )
            for algorithm, stays in (
                ("ppo", ""),
                ("nft, baseline: batch, scale: none", ""),
                ("grpo, baseline: batch", " in the mean, though with algorithm.scale=group its advantages are 0"),
                ("nft, baseline: batch", " in the mean, though with algorithm.scale=group its advantages are 0"),
            )
        ),
        # log-probabilities
        (
            ("algorithm.log_prob_mode=cps",),
            (
                "algorithm.log_prob_mode: given 'cps', but rollout.step_rule is "
                "flow_sde; set log_prob_mode=exact, or step_rule=cps"
            ),
        ),
        (
            ("algorithm={name: ppo, log_prob_mode: cps}", "rollout.step_rule=dance_sde"),
            (
                "algorithm.log_prob_mode: given 'cps', but rollout.step_rule is "
                "dance_sde; set log_prob_mode=exact, or step_rule=cps"
            ),
        ),
        (
            ("algorithm={name: grpo, log_prob_mode: cps, guard: true}", "rollout.step_rule=cps"),
            (
                "algorithm.guard: given true beside log_prob_mode 'cps', which has no std to correct for; set "
                "log_prob_mode=exact"
            ),
        ),
        # the surrogate of a step
        (
            ("algorithm={name: grpo, kl_mask_threshold: 1e-5, clip_range: 1e-3}",),
            (
                "algorithm.clip_range: given 0.001, but algorithm.kl_mask_threshold replaces the clip; leave one of "
                "them out"
            ),
        ),
        (
            ("algorithm={name: ppo, kl_mask_threshold: 1e-5, guard: true}",),
            (
                "algorithm.guard: given true, but it centres ratios for the clip, which algorithm.kl_mask_threshold "
                "replaces; leave one of them out"
            ),
        ),
        (
            ("algorithm={name: grpo, step_weight: std, guard: true}",),
            (
                "algorithm.step_weight: given 'std', but algorithm.guard balances the steps itself; leave one of them "
                "out"
            ),
        ),
        # algorithms that sample by the ODE
        *(
            (
                (algorithm, "rollout.step_rule=flow_sde"),
                f"rollout.step_rule: given 'flow_sde', but {name} samples by the ODE; leave step_rule out",
            )
            for name, algorithm in (("nft", NFT), ("dpo", DPO))
        ),
        *(
            (
                (algorithm, "rollout.window={size: 2}"),
                f"rollout.window: given, but {name} samples by the ODE and trains no steps of it; leave it out",
            )
            for name, algorithm in (("nft", NFT), ("dpo", DPO))
        ),
        *(
            (
                (algorithm, "rollout.shared_noise=true"),
                (
                    f"rollout.shared_noise: given true, but {name} samples by the ODE, and all images of a group would "
                    "be the same; set shared_noise=false"
                ),
            )
            for name, algorithm in (("nft", NFT), ("dpo", DPO))
        ),
        # the solver of deterministic steps
        (
            ("model={family: sd_inpaint}", "rollout.solver=dpm2"),
            (
                "rollout.solver: given 'dpm2', which is of flow models, but sd_inpaint predicts the noise; leave "
                "solver out"
            ),
        ),
        *(
            (
                ("rollout.solver=dpm2", f"rollout.step_rule={rule}"),
                (
                    "rollout.solver: given 'dpm2', but without a window no two steps on the ODE follow each other; set "
                    "rollout.window, or leave solver out"
                ),
            )
            for rule in ("flow_sde", "cps")
        ),
        (
            ("algorithm={name: dpo, pairs: offline}", *OFFLINE, "rollout.solver=dpm2"),
            "rollout.solver: given 'dpm2', but algorithm.pairs=offline samples no images; leave it out",
        ),
        # rewards and groups
        *(
            (
                (f"algorithm={{name: {name}}}", "rewards={}"),
                (
                    f"rewards: none given, but algorithm.name is '{name}', which trains on rewards; set for example "
                    "rewards: {ocr: {weight: 1.0}}"
                ),
            )
            for name in ("nft", "dpo")
        ),
        (
            (DPO, "rollout.group_size=1"),
            (
                "rollout.group_size: given 1, but dpo pairs the best with the worst image of a group; set group_size "
                "to 2 or more (4-16 is usual)"
            ),
        ),
        (
            (NFT, "rollout.group_size=1"),
            (
                "rollout.group_size: given 1, but algorithm.baseline=group compares samples of one example with "
                "each other; set group_size to 2 or more (4-16 is usual), or algorithm.baseline=batch"
            ),
        ),
        *(
            (
                (algorithm,),
                (
                    "algorithm.resample_rounds: given 2, which replaces groups that are left out; set "
                    "algorithm.baseline=group and algorithm.skip_zero_std_groups=true, or resample_rounds=0"
                ),
            )
            for algorithm in (
                "algorithm={name: ppo, resample_rounds: 2}",
                "algorithm={name: grpo, resample_rounds: 2, skip_zero_std_groups: false}",
                "algorithm={name: nft, resample_rounds: 2, baseline: batch}",
            )
        ),
        *(
            (
                (f"algorithm={{name: {name}, sft_steps: 11}}", "training.max_steps=10"),
                (
                    "algorithm.sft_steps: given 11, more than training.max_steps 10, which counts them too; set "
                    "a larger training.max_steps"
                ),
            )
            for name in ("nft", "dpo")
        ),
        # the region
        *(
            (
                (f"algorithm={{name: {name}, region_dilation: 2}}",),
                (
                    "algorithm.region_dilation: given 2, but algorithm.region is 'all'; set region=mask, or "
                    "region_dilation=0"
                ),
            )
            for name in ("sft", "grpo", "ppo", "dpo", "nft")
        ),
        *(
            (
                (f"algorithm={{name: grpo, region: {region}, seam_weight: 0.5}}",),
                (
                    "algorithm.seam_weight: given 0.5, but it weighs the cells that region_dilation adds, and that is "
                    "0; set region_dilation, or seam_weight=1"
                ),
            )
            for region in ("all", "mask")
        ),
        # given pairs
        (
            ("algorithm={name: dpo, pairs: offline}",),
            (
                "data.format: given 'self_bench', but algorithm.pairs=offline takes win_path and lose_path of a "
                "manifest; set data.format=manifest, or algorithm.pairs=online"
            ),
        ),
        # labelled images
        (
            ("algorithm={name: kto}",),
            (
                "data.format: given 'self_bench', but kto trains on target_path and label of a manifest; set "
                "data.format=manifest"
            ),
        ),
        (
            ("algorithm={name: kto, sft_steps: 2}", *OFFLINE),
            (
                "algorithm.sft_steps: given 2, but without warmup_data the warm-up would train on images with label "
                "bad too; set warmup_data, or sft_steps=0"
            ),
        ),
        *(
            (
                (f"algorithm={{name: kto, {key}: {value}}}", *OFFLINE),
                f"algorithm.{key}: given {value}, but kto samples no images; leave {key} out",
            )
            for key, value in (("resample_rounds", 1), ("inner_epochs", 2))
        ),
        (
            ("algorithm={name: kto}", *OFFLINE, "rollout.window={size: 2}"),
            "rollout.window: given, but kto samples no images; leave it out",
        ),
        *(
            (
                (f"algorithm={{name: dpo, pairs: offline, {key}: {value}}}", *OFFLINE),
                f"algorithm.{key}: given {shown}, but algorithm.pairs=offline samples no images; leave {key} out",
            )
            for key, value, shown in (
                ("rollout_policy", "reference", "'reference'"),
                ("resample_rounds", "1", "1"),
                ("inner_epochs", "2", "2"),
            )
        ),
        *(
            (
                ("algorithm={name: dpo, pairs: offline}", *OFFLINE, f"rollout.{key}={value}"),
                f"rollout.{key}: given{shown}, but algorithm.pairs=offline samples no images; {remedy}",
            )
            for key, value, shown, remedy in (
                ("noise_level", "0.5", " 0.5", "leave noise_level out"),
                ("eta", "0.5", " 0.5", "leave eta out"),
                ("step_rule", "cps", " 'cps'", "leave step_rule out"),
                ("window", "{size: 2}", "", "leave it out"),
                ("shared_noise", "true", " true", "set shared_noise=false"),
            )
        ),
        (
            ("algorithm={name: dpo, pairs: offline, sft_steps: 11}", "training.max_steps=10", *OFFLINE),
            (
                "algorithm.sft_steps: given 11, more than training.max_steps 10, which counts them too; set a larger "
                "training.max_steps"
            ),
        ),
    ],
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else None,
)
def test_a_combination_that_cannot_work(overrides: tuple[str, ...], line: str, problems: Problems) -> None:
    assert problems(*overrides) == [f"small.yaml: {line}"]


@pytest.mark.parametrize(
    "overrides",
    [
        (SD,),
        (SD, "rollout={step_rule: ddim, eta: 1.0, num_steps: 2}"),
        (SD, "rollout.window={size: 1, range: [0.8, 1.0]}"),
        (SD, "algorithm={name: grpo, guard: true, kl_weight: 0.1}"),
        (SD, NFT),
        (SD, DPO),
        (SD, SFT, "rewards={}"),
        ("rollout={step_rule: dance_sde, eta: 1.5}",),  # a diffusion, no share
        ("algorithm={name: grpo, kl_weight: 0.04, kl_mode: flow_grpo}", "rollout.step_rule=flow_sde"),
        ("algorithm={name: ppo, kl_weight: 0.04, kl_mode: flow_grpo}",),
        ("algorithm={name: grpo, sft_steps: 1}", "optimizer.sft_lr=1e-5"),
        (SFT, "rewards={}", "optimizer.sft_lr=1e-5"),  # a run file with another algorithm in it
        ("algorithm.sft_steps=0", "optimizer.sft_lr=1e-5"),  # ... or with its warm-up left out
        ("algorithm={name: ppo, skip_zero_std_groups: false}",),
        ("algorithm={name: ppo, baseline: group, skip_zero_std_groups: true}",),
        ("algorithm.log_prob_mode=cps", "rollout.step_rule=cps"),
        ("algorithm={name: grpo, guard: true, clip_range: 2e-6}",),
        (NFT,),
        (NFT, "rollout.num_steps=1"),  # the ODE may end at once
        ("algorithm={name: nft, baseline: batch, scale: batch}", "rollout.group_size=1"),
        (DPO,),
        (DPO, "rollout.group_size=2"),
        ("algorithm={name: dpo, resample_rounds: 2}",),
        ("algorithm={name: grpo, resample_rounds: 2}",),
        ("algorithm={name: ppo, resample_rounds: 2, baseline: group}",),
        ("algorithm={name: sft, region: mask, region_dilation: 1}", "rewards={}"),
        ("algorithm={name: nft, region: mask, region_dilation: 2, seam_weight: 2}",),
        ("algorithm={name: dpo, pairs: offline}", *OFFLINE),
        ("algorithm={name: dpo, pairs: offline}", PAIRS),  # rewards may watch the evaluation
        ("algorithm={name: dpo, pairs: offline}", *OFFLINE, "rollout.group_size=1"),
    ],
    ids=" ".join,
)
def test_its_neighbour_that_works(overrides: tuple[str, ...], run_with: RunWith) -> None:
    assert run_with(*overrides).name == "small"


# --- what follows from the combination ---


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ((), "flow_sde"),
        (("algorithm={name: ppo}",), "flow_sde"),
        ((SD,), "ddim"),
        ((SD, "algorithm={name: ppo}"), "ddim"),
        (("rollout.step_rule=cps",), "cps"),
        ((NFT,), None),
        ((DPO,), None),
        ((SD, DPO), None),
        ((SFT, "rewards={}"), None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_the_step_rule_of_a_run(overrides: tuple[str, ...], rule: str | None, run_with: RunWith) -> None:
    run = run_with(*overrides)
    assert run.algorithm.step_rule(run) == (None if rule is None else STEP_RULES[rule])


@pytest.mark.parametrize(
    ("overrides", "rewarded", "in_training"),
    [
        ((), True, {"source", "mask"}),
        ((SD,), True, {"source", "mask"}),
        ((NFT,), True, {"source", "mask"}),
        ((DPO,), True, {"source", "mask"}),
        ((SFT, "rewards={}"), False, {"source", "mask"}),
        (("algorithm={name: dpo, pairs: offline}", *OFFLINE), False, {"source", "mask", "win", "lose"}),
        (("algorithm={name: kto}", *OFFLINE), False, {"source", "mask", "target"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_the_pictures_a_run_needs(
    overrides: tuple[str, ...], rewarded: bool, in_training: set[str], run_with: RunWith
) -> None:
    run = run_with(*overrides)
    assert run.algorithm.trains_on_rewards is rewarded
    assert needed_pictures(run, training=True) == in_training
    assert needed_pictures(run, training=False) == {"source", "mask"}  # of warm-up and evaluation


# --- the old policy of NFT ---


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("0", "frozen"),
        ("1", "ramp_half"),
        ("2", "ramp_full"),
        *((name, name) for name in ("copy", "frozen", "ramp_half", "ramp_full")),
    ],
)
def test_numbers_of_the_guide_stand_for_decays(written: str, kind: str, run_with: RunWith) -> None:
    algorithm: Any = run_with(f"algorithm={{name: nft, old_policy: {written}}}").algorithm
    assert algorithm.old_policy == kind


# --- style adapters ---


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.train={kind: ip_adapter, rank: 4}"], "model.train.rank: given 4, which weights=kv_lora reads"),
        (
            ["model.train={kind: ip_adapter, weights: kv, alpha: 4}"],
            "model.train.alpha: given 4, which weights=kv_lora reads, but weights is 'kv'",
        ),
        (
            ["model.train={kind: ip_adapter, reference_dropout: 0.1}"],
            "model.train.reference_dropout: given 0.1, but the run has no supervised steps",
        ),
        (
            ["model={family: sd_inpaint, train: {kind: ip_adapter, value_norm: true}}", "rollout.noise_level=null"],
            "model.train.value_norm: given true, but sd_inpaint uses the attention of diffusers",
        ),
    ],
)
def test_options_of_a_style_adapter_that_nothing_reads(
    overrides: list[str], message: str, problems: Callable[..., list[str]]
) -> None:
    [line] = problems(*overrides)
    assert message in line


def test_a_style_adapter_needs_references(run_with: Callable[..., RunConfig]) -> None:
    plain, styled = run_with(), run_with("model.train={kind: ip_adapter, weights: kv_lora, rank: 4}")
    for training in (True, False):
        assert needed_pictures(styled, training=training) == needed_pictures(plain, training=training) | {"reference"}


def test_a_style_reward_needs_references_where_it_scores(run_with: Callable[..., RunConfig]) -> None:
    run = run_with("rewards={ocr: {}, style: {}}")
    assert "reference" in needed_pictures(run, training=True) & needed_pictures(run, training=False)
    assert "reference" not in needed_pictures(run, training=False, scored=False)
    adapter = run_with("rewards={ocr: {}, style: {}}", "model.train={kind: ip_adapter}")
    assert "reference" in needed_pictures(adapter, training=False, scored=False)


@pytest.mark.parametrize("name", ["grpo", "ppo", "dpo", "kto", "nft", "reward_gradient"])
def test_captions_that_no_algorithm_drops_are_a_warning(name: str, run_with: RunWith) -> None:
    """Only supervised steps read caption_dropout; without them it was ignored."""
    data = PAIRS if name == "kto" else "rewards={seam: {}}"
    warm = ("warmup_data={format: self_bench, path: warm, resolution: 64}",) if name == "kto" else ()

    def warned(steps: int) -> list[str]:
        algorithm = f"algorithm={{name: {name}, caption_dropout: 0.1, sft_steps: {steps}}}"
        run = run_with(SD, data, "rollout.guidance_scale=1", algorithm, *(warm if steps else ()))
        return [line for line in warnings_of(run) if line.startswith("algorithm.caption_dropout: given 0.1")]

    assert len(warned(0)) == 1 and warned(5) == []


REGION = "algorithm.region=mask"
WARM = "warmup_data={format: self_bench, path: warm, resolution: 64}"


def test_a_warm_up_that_is_turned_off_is_no_warning(run_with: RunWith) -> None:
    """A run file without the key has forgotten it; one with 0 keeps its data for another time."""
    lines = warnings_of(run_with("algorithm={name: nft, sft_steps: 0}", WARM, "optimizer.sft_lr=1e-5"))
    assert not [line for line in lines if line.startswith(("warmup_data", "optimizer.sft_lr"))]


@pytest.mark.parametrize(
    ("overrides", "key", "read"),
    [
        ((SFT, "rewards={}", "optimizer.sft_lr=1e-5"), "optimizer.sft_lr", "algorithm={name: grpo, sft_steps: 5}"),
        ((SFT, "rewards={}", "rollout.window={size: 1}"), "rollout.window", "algorithm.name=grpo"),
        ((SFT, "rewards={}", "rollout.shared_noise=true"), "rollout.shared_noise", "algorithm.name=grpo"),
        ((SFT, "rewards={}", "rollout.solver=dpm2"), "rollout.solver", "algorithm.name=nft"),
        ((SFT, "rewards={}", "optimizer.steps_per_forward=1"), "optimizer.steps_per_forward", "algorithm.name=grpo"),
        ((SFT, "rewards={}", "logging.rollout_images_every=5"), "logging.rollout_images_every", "algorithm.name=nft"),
        ((NFT, "optimizer.sft_lr=1e-5"), "optimizer.sft_lr", "algorithm={name: nft, sft_steps: 5}"),
        (
            ("model={family: sd3, path: tiny}", NFT, "data={format: prompts, path: p.txt, resolution: 64}", REGION),
            "algorithm.region",
            "data={format: manifest, path: m.json, resolution: 64}",
        ),
        ((NFT, "reward_client.on_drift=stop"), "reward_client.on_drift", "reward_client.probe_every=2"),
        ((NFT, "reward_client.probe_tolerance=0.1"), "reward_client.probe_tolerance", "reward_client.probe_every=2"),
    ],
)
def test_an_option_that_nothing_reads_is_a_warning(
    overrides: tuple[str, ...], key: str, read: str, run_with: RunWith
) -> None:
    """They are accepted, as a run file with another algorithm in it has them; what they would do does not happen."""

    def warned(*more: str) -> list[str]:
        return [line for line in warnings_of(run_with(*overrides, *more)) if line.startswith(f"{key}: given")]

    [line] = warned()
    assert ", but " in line and ("leave it out" in line or "; set that" in line)
    rewards = "rewards={seam: {}}"
    window = ("rollout.window={size: 1, range: [0, 1]}",) if "shared_noise" in key or "solver" in key else ()
    assert warned(rewards, read, *(window if "grpo" in read else ())) == []


def test_labelled_images_that_are_compared_with_themselves_are_a_warning(run_with: RunWith) -> None:
    def warned(rows: int) -> list[str]:
        optimizer = f"optimizer={{batch_size_per_device: 1, gradient_accumulation: {rows}}}"
        run = run_with(SD, PAIRS, "algorithm={name: kto}", optimizer)
        return [line for line in warnings_of(run) if "on one process is its own" in line]

    assert len(warned(1)) == 1 and warned(2) == []


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_clip_range_that_never_clips_is_a_warning(name: str, run_with: RunWith) -> None:
    """The usual .2 is for sums over few actions."""

    def warned(clip_range: float, more: str = "", *overrides: str) -> list[str]:
        run = run_with(f"algorithm={{name: {name}, clip_range: {clip_range}{more}}}", *overrides)
        return [line for line in warnings_of(run) if line.startswith("algorithm.clip_range: ")]

    [line] = warned(0.2)
    assert line == (
        "algorithm.clip_range: given 0.2, which never clips: log-probabilities are means over latent dimensions, whose "
        "ratios stay close to 1; set algorithm.clip_range=1e-4, or 1e-5 with rollout.window"
    )
    assert len(warned(0.01)) == 1 and warned(0.009) == warned(1e-4) == []
    assert warned(0.2, ", log_prob_mode: cps", "rollout.step_rule=cps") == []  # its log-probabilities have no std


def test_a_section_alone_rejects_what_nothing_reads_beside_its_other_options() -> None:
    """Without a run, whose check finds it as well: as a program makes the section."""
    with pytest.raises(ValidationError, match=r"kl_mode: given 'flow_grpo', but algorithm\.kl_weight is 0"):
        GrpoConfig.model_validate({"name": "grpo", "kl_mode": "flow_grpo"})
