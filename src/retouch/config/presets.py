"""`rollout.preset`: keys that a run file leaves unsaid, filled in before it is validated.

    reference   what the method was published with: every denoising step but the last one is trained, under guidance,
                with a KL to the reference. Slow, and what a fast run is to be compared with.
    fast        a fraction of the forwards. Each lever is lossy; docs/speed.md says how.

What the run file says itself always wins, key by key. A filled-in run is an ordinary one: its keys are in the run
directory's config.yaml, and nothing but what shows them reads the preset again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import BaseModel

from retouch.families import DEFAULT_FAMILY, FAMILIES
from retouch.families.facts import ENDS_WITHOUT_NOISE, RULES_OF

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

Preset = Literal["reference", "fast"]

ALGORITHMS = ("grpo", "ppo", "nft")
"""Algorithms that have presets."""

FAST_WINDOW: dict[str, Any] = {"size": 2, "range": [0.0, 0.67]}
"""Two trained steps in the first two thirds: late, low-noise steps change little and are spiky."""

Section = dict[str, Any]


def fill_in(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run file with what its preset says of keys that are not written. Anything malformed is left to the schema."""
    rollout, algorithm = _section(run, "rollout"), _section(run, "algorithm")
    family = _section(run, "model").get("family", DEFAULT_FAMILY)
    preset, name = rollout.get("preset"), algorithm.get("name")
    if preset not in ("reference", "fast") or name not in ALGORITHMS or family not in FAMILIES:
        return dict(run)
    keys = preset_keys(preset, family, name, rollout, algorithm)
    return {
        **run,
        "rollout": _below(keys["rollout"], rollout),
        "algorithm": _below(keys["algorithm"], algorithm),
    }


def preset_keys(
    preset: Preset, family: str, algorithm: str, rollout: Mapping[str, Any], written: Mapping[str, Any]
) -> dict[str, Section]:
    """What a preset says -> keys of `rollout` and of `algorithm`.

    A key that would contradict a written one is left out: a written window leaves no timestep_fraction, and a written
    timestep_fraction below 1 no window.

    Args:
        rollout, written: these sections of the run file.
    """
    guided = FAMILIES[family].spec.doubles_for_guidance
    if algorithm == "nft":
        return _nft(preset, guided=guided)
    if preset == "fast":
        return _fast(rollout, written, guided=guided)
    rule = rollout.get("step_rule") or RULES_OF[FAMILIES[family].spec.prediction][0]
    return _reference(rule, rollout, written, guided=guided)


def preset_values(run: RunConfig) -> dict[str, tuple[object, object]]:
    """Dotted key -> (what the run has, what its preset says), of every key of its preset; nothing without one."""
    preset, name = run.rollout.preset, run.algorithm.name
    if preset is None or name not in ALGORITHMS:
        return {}
    rollout = {"step_rule": run.rollout.step_rule, "num_steps": run.rollout.num_steps}
    says = preset_keys(preset, run.model.family, name, rollout, {})
    has = run.model_dump(mode="json", include={"rollout", "algorithm"})
    found: dict[str, tuple[object, object]] = {}
    for section, keys in says.items():
        for key, value in keys.items():
            full: object = has[section][key]
            if isinstance(value, dict) and isinstance(full, dict):
                whole = cast("Section", full)
                full = {part: whole[part] for part in cast("Section", value)}  # the rest are defaults
            found[f"{section}.{key}"] = (full, value)
    return found


def preset_lines(run: RunConfig) -> list[str]:
    """What the preset came to, a key a line."""
    preset = run.rollout.preset
    return [
        f"{key:32} {has}  (preset {preset})" if has == says else f"{key:32} {has}  (run file; preset {preset}: {says})"
        for key, (has, says) in preset_values(run).items()
    ]


def _reference(
    rule: str, rollout: Mapping[str, Any], written: Mapping[str, Any], *, guided: bool
) -> dict[str, Section]:
    """Flow-GRPO (arXiv 2505.05470): its SD3 runs for families with classifier-free guidance, its FLUX runs for those
    that embed it. All steps but the last, low-noise one are trained, and groups without a signal as well."""
    steps = 10 if guided else 6
    sampled: Section = {"num_steps": steps, "window": None, "shared_noise": False}
    trained: Section = {"kl_weight": 0.04 if guided else 0.0}
    if not written.get("resample_rounds"):  # which replaces groups that are left out
        trained["skip_zero_std_groups"] = False
    if trained["kl_weight"] and rule == "flow_sde" and written.get("kl_weight", 1):
        trained["kl_mode"] = "published"  # the weight is for it
    steps = rollout.get("num_steps", steps)
    if rule not in ENDS_WITHOUT_NOISE and not rollout.get("window") and isinstance(steps, int) and steps > 1:
        trained["timestep_fraction"] = 1 - 1 / steps
    if guided:
        sampled["guidance_scale"] = None
    return {"rollout": sampled, "algorithm": trained}


def _fast(rollout: Mapping[str, Any], written: Mapping[str, Any], *, guided: bool) -> dict[str, Section]:
    """Flow-GRPO-Fast's window and MixGRPO's (arXiv 2507.21802), fewer solver steps, one prefix for a group, neither
    guidance nor KL."""
    sampled: Section = {"num_steps": 6}
    if guided:
        sampled["guidance_scale"] = 1.0
    fraction_is_written = "window" not in rollout and written.get("timestep_fraction", 1.0) != 1.0
    if rollout.get("window", FAST_WINDOW) is not None and not fraction_is_written:
        sampled |= {"window": dict(FAST_WINDOW), "shared_noise": True}
    return {"rollout": sampled, "algorithm": {"kl_weight": 0.0}}


def _nft(preset: Preset, *, guided: bool) -> dict[str, Section]:
    """DiffusionNFT (arXiv 2509.16117) samples without guidance in either case; the reference trains on 9 noised copies
    of an image, the fast preset on 2."""
    sampled: Section = {"num_steps": 10 if preset == "reference" else 6}
    if guided:
        sampled["guidance_scale"] = 1.0
    trained = {"timesteps_per_image": 9, "kl_weight": 1e-4}
    return {
        "rollout": sampled,
        "algorithm": trained if preset == "reference" else {"timesteps_per_image": 2, "kl_weight": 0.0},
    }


def _section(run: Mapping[str, Any], name: str) -> Section:
    """A section as it is written; empty where there is none, or something that is none."""
    found = run.get(name)
    if isinstance(found, BaseModel):
        return found.model_dump(exclude_unset=True)
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _below(keys: Section, written: Section) -> Section:
    """Written keys over those of the preset; a written window over the preset's, part by part."""
    merged = {**keys, **written}
    if isinstance(keys.get("window"), dict) and isinstance(written.get("window"), dict):
        merged["window"] = {**keys["window"], **written["window"]}
    return merged
