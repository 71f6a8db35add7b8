"""docs/coming-from.md, troubleshooting.md, remote.md: every flag is there, and every key that is named exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from retouch.adapters.formats import NAME
from retouch.algorithms.nft.config import NftConfig
from retouch.cli.flags import answer
from retouch.config import RunConfig, derive, load_run
from tests.config.leaves import leaves
from tests.configs.test_guide import GUIDE, OF

from .pages import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGE = (DOCS / "coming-from.md").read_text(encoding="utf-8")

FLAGS = [
    "use_rl",
    "rl_method",
    "rl_warmup_steps",
    "rl_num_images_per_prompt",
    "rl_num_batches_per_epoch",
    "rl_num_inference_steps",
    "rl_guidance_scale",
    "rl_timestep_fraction",
    "rl_num_inner_epochs",
    "rl_adv_clip_max",
    "rl_per_prompt_stat_tracking",
    "rl_grpo_clip_range",
    "rl_kl_beta",
    "nft_beta",
    "nft_adv_mode",
    "nft_decay_type",
    "use_ema",
    "ema_decay",
    "ema_update_interval",
    "learning_rate",
    "gradient_accumulation_steps",
    "max_train_steps",
    "checkpointing_steps",
    "resolution",
    "ocr_weight",
    "vlm_weight",
    "model_type",
    "pretrained_model_name_or_path",
    "siglip_path",
    "train_data_json",
    "output_dir",
    "initial_ip_adapter_path",
    "offload_text_encoder_two",
    "gradient_checkpointing",
    "report_to",
]
VARIABLES = ["MODEL_PATH", "DATA_PATH", "DATA_JSON_PATH", "OPENAI_API_KEY", "SIGLIP_PATH", "CALLIGRAPHER_PATH"]

CELLS = re.findall(r"^\| `(--\w+|[A-Z0-9_]+)` \| `([^`]+)` \| (.*?) \| (.*?) \|.*\|$", PAGE, re.MULTILINE)
ROWS = [(flag, key) for flag, key, *_ in CELLS]

SECTIONS = set(RunConfig.model_fields)


def keys() -> set[str]:
    """Every dotted key, the sections above it included; of a table of rewards, those of its scorers."""
    found: set[str] = set()
    for leaf in leaves(RunConfig):
        names = (leaf.section.model_fields["scorer"].default,) if leaf.key.startswith("rewards.*") else ("",)
        for name in names:
            parts = leaf.key.replace("*", name).split(".")
            found |= {".".join(parts[: i + 1]) for i in range(len(parts))}
    return found


KEYS = keys()


def test_every_flag_has_its_row() -> None:
    assert {flag for flag, *_ in ROWS} >= {*(f"--{flag}" for flag in FLAGS), *VARIABLES}
    assert len(ROWS) == len({flag for flag, *_ in ROWS})


def test_its_key_exists() -> None:
    assert [(flag, key) for flag, key in ROWS if key not in KEYS] == []


def test_every_scorer_is_known_by_its_name() -> None:
    assert {"rewards.openai_judge.weight", "rewards.style.gate"} <= KEYS
    assert "rewards.ocr.gate" not in KEYS


def test_every_row_of_the_table_is_read() -> None:
    """No flag is without a key."""
    table = PAGE.partition("|---|---|---|---|---|\n")[2].partition("\n\n")[0]
    assert len(ROWS) == len(table.splitlines())


def test_the_default_there_is_the_guides() -> None:
    guide = {key: values[0] for section in (GUIDE, OF["nft"], OF["grpo"]) for key, values in section.items()}
    guide["algorithm.old_policy"] = 0
    guide["algorithm.baseline"] = False  # off, as the note says, is `batch`
    there = {key: yaml.safe_load(cell) for _, key, cell, _ in CELLS if cell and key not in ("algorithm.name", "ema")}
    assert {
        key: float(value) if isinstance(value, str) and value[0].isdigit() else value for key, value in there.items()
    } == {
        **guide,
        "ema.update_interval": 1,
    }


def test_what_stands_here_is_in_the_published_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PATH", "somewhere")
    grpo, nft = (load_run(REPOSITORY / f"configs/flux_fill_{name}.yaml").model_dump() for name in ("grpo", "nft"))
    shown = [(flag, key, cell) for flag, key, _, cell in CELLS if cell]
    assert len(shown) > 25
    for flag, key, cell in shown:
        value: Any = nft if flag.startswith("--nft") else grpo
        for part in key.split("."):
            value = value[part]
        value = value is not None if key == "ema" else value
        assert value == (float(cell) if isinstance(value, float) else yaml.safe_load(cell)), flag


def test_a_difference_has_a_reason() -> None:
    bare = [line for line in PAGE.splitlines() if line.startswith("| `--") and line.endswith("|  |")]
    for line in bare:
        there, here = (cell.strip() for cell in line.split("|")[3:5])
        assert there == here, line


def test_the_files_of_the_page_are_those_of_a_run_directory() -> None:
    """Their names are constants of the code; tests/algorithms/test_ip_adapter.py holds what is in a checkpoint."""
    source = (REPOSITORY / "src/retouch/observe/run_dir.py").read_text(encoding="utf-8")
    assert "log.txt" in PAGE
    assert '"log.txt"' in source
    assert f"weights/{NAME}.bin" in PAGE


def named_keys(path: Path) -> list[str]:
    """What stands in backticks and begins like a key: `algorithm.mix`, and of `algorithm.name=ppo` what is before =."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    words = [word.partition("=")[0] for word in re.findall(r"`([^`\n]+)`", text) if not word.endswith(".log")]
    return [word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word) and word.split(".")[0] in SECTIONS]


@pytest.mark.parametrize("page", ["coming-from", "troubleshooting"])
def test_every_key_that_is_named_exists(page: str) -> None:
    named = named_keys(DOCS / f"{page}.md")
    assert len(named) > 20
    assert [key for key in named if key not in KEYS] == []


def test_a_key_that_does_not_exist_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("Set `algorithm.clip_rage=1` and `rollout.group_size`.", encoding="utf-8")
    assert [key for key in named_keys(tmp_path / "page.md") if key not in KEYS] == ["algorithm.clip_rage"]


def test_decay_types_are_those_of_the_page() -> None:
    named = [NftConfig.model_validate({"old_policy": number}).old_policy for number in (0, 1, 2)]
    assert f"0, 1 and 2 are accepted; they are `{named[0]}`, `{named[1]}` and `{named[2]}`" in PAGE


def test_the_published_files_read_the_variables_as_said() -> None:
    for path in (REPOSITORY / "configs").glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        if "extends:" in text or "_vlm_grpo" in path.stem:  # these have a page and tests of their own
            continue
        assert re.search(r'path: "\$\{MODEL_PATH:-', text)
        sft = path.stem.endswith("_sft")
        assert re.search(rf'^data: .*path: "\$\{{{"DATA_JSON_PATH" if sft else "DATA_PATH"}\}}"', text, re.MULTILINE)
        assert ("DATA_PATH}" in text.partition("evaluation:")[2]) == sft


def test_the_scripts_of_the_page_are_those_there() -> None:
    named = set(re.findall(r"`(?:finetune/)?(\w+\.sh)`", PAGE))
    assert named == {path.name for path in (REPOSITORY / "scripts").rglob("*.sh")} - {"launch.sh"}


def test_the_versions_of_the_page_are_those_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11" and "| Python 3.11 or newer, whose" in PAGE
    assert "torch>=2.7" in project["optional-dependencies"]["train"] and "| torch 2.7 or newer." in PAGE
    pinned = re.search(r"^torch==(\S+)$", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned and f"`constraints.txt` has torch {pinned[1]}," in PAGE
    wanted = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in wanted if not line.startswith("#")] == ["-c constraints.txt", "-e .[train,serve,ocr]"]


def test_the_answer_to_a_flag_is_the_one_of_the_page() -> None:
    [(typed, told)] = re.findall(r"^\$ retouch train (--.*)\n(error: (?:.*\n)+?)```", PAGE, re.MULTILINE)
    assert f"error: {answer('train', shlex.split(typed))}\n" == told


def test_commands_of_scripts_exist() -> None:
    for name in ("coming-from", "troubleshooting", "remote"):
        for script in re.findall(r"scripts/[\w/]+\.sh", (DOCS / f"{name}.md").read_text(encoding="utf-8")):
            assert (REPOSITORY / script).is_file()


def test_variables_of_the_monitor_are_on_the_page() -> None:
    script = (REPOSITORY / "scripts/monitor_and_run.sh").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"\$\{([A-Z_]+):-(\d+)\}", script))
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (\w+) \|", (DOCS / "remote.md").read_text(encoding="utf-8"), re.M))
    assert {**defaults, "CUDA_VISIBLE_DEVICES": "all"} == rows


def test_metrics_and_messages_of_troubleshooting_are_logged() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    source = "".join(p.read_text(encoding="utf-8") for p in (REPOSITORY / "src/retouch").rglob("*.py"))
    for kind, metric in re.findall(r"`(train|rollout)/(\w+)`", text):
        assert f'"{metric}"' in source, f"{kind}/{metric}"
    messages = ("off policy before the first update",) * 2, ("reward-server.log", "reward-server{gpus}{apart}.log")
    for told, written in messages:
        assert told in text
        assert written in source


def test_guidance_1_halves_the_forwards_of_sd15(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page says of the file that it checks."""
    monkeypatch.setenv("DATA_PATH", "somewhere")
    path = REPOSITORY / "configs/sd_inpaint_grpo.yaml"
    guided, free = (derive(load_run(path, more)) for more in ([], ["rollout.guidance_scale=1"]))
    assert guided.forwards_per_image == 2 * free.forwards_per_image
