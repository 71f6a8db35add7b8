"""Which settings of two run files change the images or the scores of an evaluation: a difference would be theirs."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from retouch.algorithms.vlm_grpo.trl_options import DEFAULTS as TRL_DEFAULTS
from retouch.algorithms.vlm_grpo.trl_options import SAMPLING
from retouch.config import yaml12
from retouch.config.load import with_new_names
from retouch.config.parts import completed, model_of
from retouch.errors import ConfigError, log_once
from retouch.files.disk import is_own
from retouch.observe.run_dir import MOST_TEXT, read_config, rows_of
from retouch.rewards.base import UNSCORED
from retouch.rewards.judge import with_judge

logger = logging.getLogger(__name__)

Record = Mapping[str, Any]
Row = dict[str, Any]

_SAME_IMAGES = (
    "offload_text_encoders", "offload_vae", "free_text_encoders", "embeddings", "init", "initial_adapter",
    "reference_dropout",
)  # fmt: skip
"""Options of `model` that change no image of given weights; of `vae_batch`, which has its own rule, all but "tiles"."""

_COMPLETIONS = ("conditioning", "negative_encoder", "on_overflow")
"""Options of vlm_grpo that change the conditions of images."""

_CHOOSES_EXAMPLES = ("limit", "max_bad_items", "curriculum")
"""Options of data that change no example: evaluations are compared on those that both have."""


def sampling_differences(one: Record, other: Record) -> dict[str, tuple[Any, Any]]:
    """Settings that change the images of an evaluation whatever the weights are, with the values of two run files: a
    difference in quality would be theirs. Scales of guidance of two families are not compared."""
    flat, also = _sampling(one), _sampling(other)
    if one["model"]["family"] != other["model"]["family"]:
        del flat["rollout.guidance_scale"]
    return {key: (value, also[key]) for key, value in flat.items() if value != also[key]}


def _sampling(config: Record) -> dict[str, Any]:
    """Settings by key, as they apply: with the model's own scale of guidance where none is given."""
    evaluation, rollout = config["evaluation"], config["rollout"]
    data = evaluation.get("data") or config["data"]
    size, guidance = data.get("resolution"), rollout.get("guidance_scale")
    if guidance is None:
        with suppress(ConfigError):  # a family that is not known here
            guidance = model_of(config, "").guidance_scale
    return {
        "num_steps": evaluation.get("num_steps") or rollout.get("num_steps"),
        "rollout.guidance_scale": guidance,
        "resolution": [size, size] if isinstance(size, int) else size,
        "fit": data.get("fit"),
        "invert_mask": data.get("invert_mask"),
    }


def scoring_differences(one: Record, other: Record) -> list[str]:
    """Keys by which two rewards of one name score differently."""
    return [key for key in differing(one, other) if key.split(".")[0] not in UNSCORED]


def differing(one: Record, other: Record) -> list[str]:
    """Dotted keys whose values differ, or that are missing in one of the two."""
    flat, also = by_dotted_key(one), by_dotted_key(other)
    return [key for key in dict.fromkeys([*flat, *also]) if flat.get(key) != also.get(key)]


def by_dotted_key(node: Any, key: str = "") -> dict[str, Any]:
    """The values inside a section, each with its dotted key below `key`."""
    if not isinstance(node, dict):
        return {key: node}
    return {
        k: v
        for name, child in node.items()
        for k, v in by_dotted_key(child, f"{key}.{name}" if key else str(name)).items()
    }


def alike_after(run: Path) -> int:
    """The step after which all evaluations of a run were sampled and scored as they are today, by the run files of its
    legs; -1 where all were. A difference from one before would be that of the settings, and no change of the weights.
    """
    named = ((re.fullmatch(r"config-(\d{6,})", leg.stem), leg) for leg in run.glob("config-*.yaml"))
    for step, leg in sorted(((int(match[1]), leg) for match, leg in named if match), reverse=True):
        if not is_own(run, leg, MOST_TEXT):
            continue
        try:
            then, now = _settings(yaml12.parse(leg.read_text(encoding="utf-8"))), _settings(read_config(run))
            keys = _evaluated_otherwise(then, now)
        except (OSError, yaml.YAMLError, UnicodeDecodeError, ConfigError, KeyError, TypeError, AttributeError):
            continue  # damaged, of which a warning was given when it was kept
        if keys:
            log_once(  # every later evaluation looks at it again
                logger,
                "%s: evaluations up to step %d were sampled or scored with other settings (%s); later ones are not "
                "compared with them",
                run,
                step,
                ", ".join(keys),
            )
            return step
    return -1


def alike(run: Path, evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of evaluations after `alike_after` that have an example of the last one: those that can be compared
    with each other."""
    after = alike_after(run)
    records = [record for record in evaluations if record["step"] > after]
    kept = {record["step"]: rows for record in records if (rows := rows_of(run, record))}
    compared = of_same_examples(run, kept, kept.get(records[-1]["step"], ()) if records else ())
    return [record for record in records if record["step"] in compared or record["step"] not in kept]


def of_same_examples(run: Path, earlier: Mapping[int, list[Row]], rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Those of the earlier evaluations, rows by step, that have an example of `rows`; all if there are no `rows`.
    Examples of votes had other ids in earlier versions."""
    examples = {row.get("example") for row in rows}
    found = {at: kept for at, kept in earlier.items() if not examples.isdisjoint(row.get("example") for row in kept)}
    if not rows or not (others := earlier.keys() - found.keys()):
        return {**earlier}
    log_once(
        logger,
        "%s: evaluations up to step %d have no example in common with later ones (examples of votes had "
        "other ids in earlier versions); later ones are not compared with them",
        run,
        max(others),
    )
    return found


def _settings(run_file: Any) -> Record:
    """A run file under the names of today, with what its rewards have from the section `judge`, and with the defaults
    of keys that it does not have."""
    run = with_new_names(run_file)
    with suppress(ValueError):
        run = dict(with_judge(run))
    return completed(run)


def _evaluated_otherwise(then: Record, now: Record) -> list[str]:
    """Keys by which two run files sample or score evaluations differently."""
    data, weights = ([_of_evaluations(run)[part] for run in (then, now)] for part in ("data", "weights"))
    rewards = {name: (entry, now["rewards"][name]) for name, entry in then["rewards"].items() if name in now["rewards"]}
    keys = [*sampling_differences(then, now), *differing(_sampler(then), _sampler(now))]
    keys += [f"evaluation.data.{key}" for key in differing(*data) if key not in _CHOOSES_EXAMPLES]
    keys += ["evaluation.weights"] if weights[0] != weights[1] else []
    return keys + [f"rewards.{name}.{key}" for name, pair in rewards.items() for key in scoring_differences(*pair)]


def _sampler(run: Record) -> dict[str, Any]:
    """Settings by which weights become images of an evaluation, by dotted key: the model, its precision, and the
    completions of vlm_grpo. Paths without their folders, because models may be moved."""
    model = by_dotted_key({"model": run["model"]})
    algorithm = run["algorithm"]
    trl = {**TRL_DEFAULTS, **SAMPLING, **(algorithm.get("trl") or {})}
    return {
        **{
            key: _name_of(key, value)
            for key, value in model.items()
            if key.split(".")[-1] not in _SAME_IMAGES and (key != "model.vae_batch" or value == "tiles")
        },
        "training.mixed_precision": run["training"]["mixed_precision"],
        **{f"algorithm.{name}": algorithm.get(name) for name in _COMPLETIONS},
        **{
            f"algorithm.trl.{name}": trl.get(name) for name in (*SAMPLING, "max_completion_length", "generation_kwargs")
        },
    }


def _name_of(key: str, value: Any) -> Any:
    return Path(value).name if key.split(".")[-1] in ("path", "image_encoder") and isinstance(value, str) else value


def _of_evaluations(run: Record) -> Record:
    """The data and the weights that a run evaluates; the path without its folders, because data may be moved."""
    section = run["evaluation"]
    data = section.get("data") or run["data"]
    averaged = bool(run.get("ema")) and section.get("weights") != "raw"
    return {"data": {**data, "path": Path(data["path"]).name}, "weights": averaged}
