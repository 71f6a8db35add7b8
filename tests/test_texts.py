"""Rewards that read a text are refused where no example has one: by check, doctor and training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retouch.config import ConfigError, load_run
from retouch.data import texts
from retouch.doctor.data import data_lines
from retouch.families import prompts
from retouch.files.model_files import ModelFilesError
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)
from tests.command_line import Outcome, retouch

CONFIGS = Path(__file__).parents[1] / "configs"
RUN = CONFIGS / "sd_inpaint_grpo.yaml"

DESCRIBED = {"image": "test0_source.png", "mask": "test0_mask.png", "prompt": "a sign on the dog's wall"}

PROBLEM = (
    "rewards.ocr: given, but none of the {count} examples of {section} ({path}) has a text to read: no `text`, and "
    "nothing in quotes in the prompt; set rewards that judge a description, like "
    '"rewards={{clip: {{url: auto, crop: mask_box}}, seam: {{weight: 0.3}}}}" (mask_composite, hpsv2 and vlm fit, '
    'too), "rewards={{preservation: {{}}}}", which needs no weights, or give the examples a text'
)


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signs")
    write_signs(folder, draw_words(1, "train", 1), (32, 64), 1)
    for kind in ("source", "mask"):
        (folder / f"test0_{kind}.png").write_bytes(next(folder.glob(f"test*_{kind}.png")).read_bytes())
    return folder


def listed(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "list.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def section(path: Path) -> str:
    return f"{{format: manifest, path: {path}, resolution: [32, 64]}}"


def checked(path: Path, *overrides: str) -> Outcome:
    return retouch("check", RUN, f"data={section(path)}", *overrides)


def test_check_refuses_ocr_on_descriptions(tmp_path: Path) -> None:
    path = listed(tmp_path, DESCRIBED, DESCRIBED)
    message = PROBLEM.format(count=2, section="data", path=path)
    assert checked(path) == Outcome(2, "", f"error: {message}\n")
    for fitting in message.split('"')[1::2]:
        assert checked(path, fitting).code == 0, fitting  # what it says can be copied


@pytest.mark.parametrize("own", [{"text": "HI"}, {"prompt": "it says 'HI'"}, {"prompt": 'it says "HI"'}], ids=str)
def test_one_text_is_enough_for_check(own: dict[str, str], tmp_path: Path) -> None:
    assert checked(listed(tmp_path, DESCRIBED, {**DESCRIBED, **own})).code == 0


def test_evaluation_data_is_looked_at_as_well(tmp_path: Path) -> None:
    path = listed(tmp_path, DESCRIBED)
    overrides = ["data={format: self_bench, path: somewhere}", f"evaluation.data={section(path)}"]
    outcome = retouch("check", RUN, *overrides)
    assert outcome.err == f"error: {PROBLEM.format(count=1, section='evaluation.data', path=path)}\n"
    # SFT scores what it evaluates on, and nothing else
    overrides = [f"data={section(path)}", "evaluation.data={format: self_bench, path: somewhere}"]
    assert retouch("check", CONFIGS / "sd_inpaint_sft.yaml", *overrides).code == 0
    assert retouch("check", CONFIGS / "sd_inpaint_sft.yaml", overrides[0], "evaluation.data=null").code == 2


@pytest.mark.parametrize("content", [None, "", "[{]", "[]", '[{"image": 3}]'])
def test_check_leaves_what_it_cannot_list_to_others(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert checked(path).code == 0
    assert checked(tmp_path).code == 0  # a folder without metadata


def test_check_reads_no_long_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = listed(tmp_path, DESCRIBED)
    monkeypatch.setattr(texts, "LISTED_BYTES", path.stat().st_size)
    assert checked(path).code == 2
    monkeypatch.setattr(texts, "LISTED_BYTES", path.stat().st_size - 1)
    assert checked(path).code == 0


def test_prompts_without_a_mask_get_rewards_that_need_none(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a dog\na cat\n", encoding="utf-8")
    outcome = retouch(
        "check",
        CONFIGS / "qwen_image_grpo.yaml",
        f"data={{format: prompts, path: {tmp_path}/prompts.txt}}",
        "rewards={ocr: {}}",
    )
    assert '"rewards={clip: {url: auto}}" (pickscore, hpsv2 and vlm fit, too)' in outcome.err


@pytest.mark.parametrize(
    ("style", "refused"),
    [("{}", True), ("{gate: 0}", False), ("{url: 'http://127.0.0.1:8000'}", False)],  # a server has its own gate
)
def test_a_style_reward_reads_where_it_has_a_gate(style: str, refused: bool, tmp_path: Path) -> None:
    path = listed(tmp_path, {**DESCRIBED, "reference_path": "r.png"})
    outcome = checked(path, f"rewards={{style: {style}}}")
    assert (outcome.code == 2) == refused
    if refused:
        assert outcome.err.startswith("error: rewards.style: given, but none of the 1 examples")
        assert "set rewards.style.gate=0, or rewards that judge a description" in outcome.err


def test_check_stays_without_torch(tmp_path: Path) -> None:
    run = f"['check', '{RUN}', 'data={section(listed(tmp_path, DESCRIBED))}']"
    program = (
        "import sys, retouch.cli as cli\n"
        f"sys.argv[1:] = {run}\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert end.code == 2\n"
        "assert not {'torch', 'transformers', 'fastapi'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "has a text to read" in done.stderr, done.stderr


@pytest.mark.parametrize("config", ["sd_inpaint_grpo", "sd_inpaint_sft", "tiny/qwen_image_edit_vlm_grpo"])
def test_training_refuses_before_a_model_loads(
    config: str, signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is not on this machine, as its tokenizers are not: the hub is not asked for them here."""
    path = listed(signs, DESCRIBED)

    def away(*_: Any) -> None:
        raise ModelFilesError("not on this machine")

    monkeypatch.setattr(prompts, "_readers_of", away)
    outcome = retouch(
        *(
            "train",
            CONFIGS / f"{config}.yaml",
            "model.path=somebody/model",
            f"data={section(path)}",
            "rewards={ocr: {}}",
        ),
        *("evaluation.data=null", "data.resolution=64", "data.fit=stretch", f"logging.dir={tmp_path}"),
        *([] if "vlm" in config else ["training.mixed_precision=no"]),
        *(["rollout.global_groups_per_batch=1", "rollout.batches_per_epoch=1"] if config == "sd_inpaint_grpo" else []),
    )
    assert outcome.code == 2
    assert outcome.err.endswith(f"error: {PROBLEM.format(count=1, section='data', path=path)}\n"), outcome.err


def test_doctor_reports_none_and_some(signs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL_PATH", raising=False)

    def lines(*entries: dict[str, Any]) -> list[tuple[str, str]]:
        run = load_run(RUN, [f"data={section(listed(signs, *entries))}"])
        found = [line for line in data_lines(run, 1) if line.what == "data"]
        return [(line.status, line.says) for line in found[1:]]

    path = signs / "list.json"
    assert lines(DESCRIBED) == [("fix", PROBLEM.format(count=1, section="data", path=path))]
    some = (
        "1 of 2 examples have no text to read (`text`, or quotes in the prompt): rewards.ocr fails on their samples; "
        "give them one, or leave them out"
    )
    assert lines(DESCRIBED, {**DESCRIBED, "text": "HI"}) == [("warning", some)]
    assert lines({**DESCRIBED, "text": "HI"}) == []


def test_doctor_names_characters_that_the_reader_does_not_know(signs: Path) -> None:
    run = load_run(RUN, [f"data={section(listed(signs, {**DESCRIBED, 'text': 'Кафе'}, {**DESCRIBED, 'text': 'HI'}))}"])
    found = [line for line in data_lines(run, 1) if line.what == "data"]
    assert [(line.status, line.says) for line in found[1:]] == [
        (
            "warning",
            (
                "the reader of rewards.ocr has no К а ф е in its dictionary, for the texts of 1 of 2 examples: set "
                "rewards.ocr.language=cyrillic"
            ),
        )
    ]


def validated(*given: object) -> list[str]:
    outcome = retouch("data", "validate", *given)
    assert outcome.code == 0, outcome
    return outcome.out.splitlines()


def test_validate_prints_texts_and_what_looks_like_one(signs: Path) -> None:
    prompts = ["it says “OPEN”", 'it says “OPEN" there', 'a 24" and a 10" sign', "'IN' and 'OUT'", "'A' or \"B\""]
    path = listed(signs, *({**DESCRIBED, "prompt": prompt} for prompt in prompts), {**DESCRIBED, "text": "Кафе"})
    lines = validated(path, "--resolution", "32x64")
    assert [line.rpartition("; ")[2] for line in lines[:5]] == [
        "text 'OPEN'",
        "mask in luminance",
        "mask in luminance",
        "texts 'IN', 'OUT', of which ocr reads the first",
        "text 'B'",
    ]
    warned = [line.split(maxsplit=3)[2:] for line in lines if "warning: " in line]
    assert warned == [
        ["1", 'warning: “OPEN" there looks like a text, but is not read'],
        ["4", "warning: 'A' looks like a text, but is not read"],
    ]
    assert lines[-1] == "6 items can be used"


def test_validate_names_what_the_rewards_of_a_run_cannot_read(signs: Path, tmp_path: Path) -> None:
    path = listed(signs, DESCRIBED, {**DESCRIBED, "text": "Кафе"}, {**DESCRIBED, "text": "HI"})
    run = tmp_path / "run.yaml"
    run.write_text(f"extends: {RUN}\ndata: {section(path)}\n", encoding="utf-8")
    warned = [line for line in validated(run) if line.startswith("data ") and "warning: " in line]
    assert [line.partition("warning: ")[2] for line in warned] == [
        "prompts are not counted: stable-diffusion-v1-5/stable-diffusion-inpainting is not on this machine",
        "no text to read (`text`, or quotes in the prompt): rewards.ocr fails",
        "the reader of rewards.ocr has no К а ф е in its dictionary: set rewards.ocr.language=cyrillic",
    ]
    run.write_text(f"extends: {RUN}\ndata: {section(path)}\nrewards: {{ocr: null, seam: {{}}}}\n", encoding="utf-8")
    warned = [line for line in validated(run) if "warning: " in line or "text '" in line]
    assert all("warning: prompts are not counted" in line for line in warned)


def test_items_that_cannot_be_listed_are_no_reason() -> None:
    run = load_run(RUN, ["data.path=a"])
    texts.require_texts(run, "data", "a", [])
    with pytest.raises(ConfigError, match="none of the 1 examples"):
        texts.require_texts(run, "data", "a", [texts.ItemFiles(0, "a dog")])
