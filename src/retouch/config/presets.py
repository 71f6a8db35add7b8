"""`rollout.preset`: keys that a run file leaves out, filled in before it is validated.

    reference   the published settings: every denoising step except the last one is trained, under guidance, with a KL
                to the reference. Slow; the baseline of a fast run.
    fast        a fraction of the forwards. Each setting is lossy; docs/speed.md describes them.

Keys that the run file sets always win. A filled-in run is an ordinary one: its keys are in the run directory's
config.yaml, and the preset is read again only to print them. The keys are those of the algorithm (`preset_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from pydantic import BaseModel

from retouch.algorithms import ALGORITHMS
from retouch.families import DEFAULT_FAMILY, FAMILIES

if TYPE_CHECKING:
    from retouch.algorithms.base import AlgorithmSection
    from retouch.config.run import RunConfig

Preset = Literal["reference", "fast"]

Section = dict[str, Any]

PresetKeys = dict[str, Section]
"""Section (`rollout`, `algorithm`) -> its keys and values. A key that would contradict a written one is left out."""


def fill_in(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run file with the keys that its preset and its algorithm add. The schema reports anything malformed."""
    name = section_of(run, "algorithm").get("name")
    if not isinstance(name, str) or name not in ALGORITHMS:
        return dict(run)
    kind = cast("type[AlgorithmSection]", ALGORITHMS[name])
    completed = kind.completed(run)
    rollout, algorithm = section_of(completed, "rollout"), kind.renamed(section_of(completed, "algorithm"))
    family = section_of(completed, "model").get("family", DEFAULT_FAMILY)
    preset: Any = rollout.get("preset")
    if preset not in get_args(Preset) or "presets" not in kind.READS or family not in FAMILIES:
        return completed
    keys = kind.preset_keys(preset, family, rollout, algorithm)
    return {
        **completed,
        "rollout": _below(keys["rollout"], rollout),
        "algorithm": _below(keys["algorithm"], algorithm),
    }


def preset_values(run: RunConfig) -> dict[str, tuple[object, object]]:
    """Dotted key -> (value of the run, value of its preset), of every key of its preset; empty without one."""
    preset, algorithm = run.rollout.preset, run.algorithm
    if preset is None or not algorithm.reads(run, "presets"):
        return {}
    rollout = {"step_rule": run.rollout.step_rule, "num_steps": run.rollout.num_steps}
    keys = algorithm.preset_keys(preset, run.model.family, rollout, {})
    has = run.model_dump(mode="json", include={"rollout", "algorithm"})
    found: dict[str, tuple[object, object]] = {}
    for section, filled in keys.items():
        for key, value in filled.items():
            full: object = has[section][key]
            if isinstance(value, dict) and isinstance(full, dict):
                whole = cast("Section", full)
                full = {part: whole[part] for part in cast("Section", value)}  # the rest are defaults
            found[f"{section}.{key}"] = (full, value)
    return found


def preset_lines(run: RunConfig) -> list[str]:
    """One line for each key of the preset, with the value of the run."""
    preset = run.rollout.preset
    return [
        f"{key:32} {has}  (preset {preset})" if has == says else f"{key:32} {has}  (run file; preset {preset}: {says})"
        for key, (has, says) in preset_values(run).items()
    ]


def section_of(run: Mapping[str, Any], name: str) -> Section:
    """A section as it is written, of an object with the key that names its class; empty where there is none, or
    something else."""
    found = run.get(name)
    if isinstance(found, BaseModel):
        named = {key: getattr(found, key) for key in ("family", "name") if key in type(found).model_fields}
        return {**named, **found.model_dump(exclude_unset=True)}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _below(keys: Section, written: Section) -> Section:
    """Merge written keys over those of the preset, and the keys of a written window over the preset's window."""
    merged = {**keys, **written}
    if isinstance(keys.get("window"), dict) and isinstance(written.get("window"), dict):
        merged["window"] = {**keys["window"], **written["window"]}
    return merged
