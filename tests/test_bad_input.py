"""What people get wrong, through the command line: exit code 2 and one line that says what was given, what is allowed
and what to set. Never a traceback."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import FluxTransformer2DModel
from PIL import Image
from safetensors.torch import load_file, save_file

from retouch.errors import ConfigError, ImageProblem, ModelFilesError
from retouch.files.model_files import tiny_path
from retouch.imaging.reading import open_image
from retouch.observe.log import LogFile
from retouch.observe.run_lock import RunLock
from retouch.process.signals import ENDING
from retouch.rewards.client.endpoints import resolve_urls
from retouch.tiny import image_encoder
from retouch.tiny.edits import write_edits
from retouch.tiny.training import empty_folder
from tests.command_line import Outcome, retouch
from tests.selection import cells

Finished = Callable[[str], Path]


def refused(outcome: Outcome) -> str:
    """The message of a refusal."""
    assert outcome.code == 2, outcome.err
    lines = outcome.err.splitlines()
    (line,) = lines[1:] if LOADING in lines[0] else lines  # the import of torch has begun
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


LOADING = " loading torch"


@pytest.fixture
def run_yaml(run_file: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Path]:
    """Writes the smallest run with overrides -> its path."""

    def write(**overrides: Any) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(run_file(**overrides)), encoding="utf-8")
        return path

    return write


# --- keys and values ---


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.group_sise=4", "rollout.group_sise: unknown key; did you mean 'group_size'?"),
        ("algorithm.warmup=4", "algorithm.warmup: unknown key; did you mean 'sft_steps'?"),
        ("rollout.group_size=1", "rollout.group_size: given 1, but algorithm.baseline=group compares samples of"),
        ("rollout.group_size=many", "rollout.group_size: given 'many'; input should be a valid integer"),
        ("model.family=flux_fil", "model.family: given 'flux_fil'; "),
        ("algorithm.name=grop", "algorithm.name: given 'grop'; did you mean 'grpo'?"),
        ("rewards={ocrr: {}}", "rewards.ocrr.scorer: given 'ocrr'; did you mean 'ocr'?"),
        ("rewards={ocr: {wieght: 1}}", "rewards.ocr.wieght: unknown key; did you mean 'weight'?"),
        ("rewards={}", "rewards: none given, but algorithm.name is 'grpo', which trains on rewards; set for example"),
        ("data.resolution=[30,64]", "data.resolution: given (30, 64); flux_fill needs multiples of 8; set [32, 64]"),
    ],
)
def test_wrong_keys_and_values(run_yaml: Callable[..., Path], override: str, message: str) -> None:
    path = run_yaml()
    for command in ("check", "train"):
        assert refused(retouch(command, path, override)).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.group_size", "override 'rollout.group_size': write it as key=value with a dotted key, like"),
        ("=4", "override '=4': write it as key=value"),
        ("rollout..size=4", "override 'rollout..size=4': write it as key=value"),
        ("name.first=x", "override 'name.first=x': 'name' holds 't', which has no keys"),
        ("rewards={ocr", "override 'rewards={ocr': the value is not valid YAML"),
        (".".join("x" * 5000) + "=1", f"override '{'x.' * 40}' ...: nested deeper than 50 levels"),
    ],
)
def test_overrides_that_are_none(run_yaml: Callable[..., Path], override: str, message: str) -> None:
    assert refused(retouch("train", run_yaml(), override)).startswith(message)


def test_run_files_that_are_none(tmp_path: Path) -> None:
    assert (
        refused(retouch("train", "nowhere.yaml"))
        == "nowhere.yaml: no such run file; `retouch init --example list` lists the published ones"
    )
    path = tmp_path / "run.yaml"
    path.write_text("a: [1")
    assert refused(retouch("train", path)).startswith(f"{path}: not valid YAML")
    path.write_text("- a")
    assert refused(retouch("train", path)) == f"{path}: expected a mapping of keys to values; the file holds a list"
    path.write_text("")
    assert refused(retouch("check", path)) == f"{path}: expected a mapping of keys to values; the file holds nothing"
    assert refused(retouch("check", tmp_path)).startswith(f"{tmp_path}: is a folder; give a run file (.yaml)")


def test_data_that_are_named_by_a_folder(tmp_path: Path, run_yaml: Callable[..., Path]) -> None:
    """A folder with one manifest is that manifest; messages name nothing that the command cannot take."""
    write_edits(tmp_path / "edits", 3, "train", 1)
    validated = retouch("data", "validate", tmp_path / "edits")
    assert validated.code == 0 and "3 items" in validated.out + validated.err
    shutil.copy(tmp_path / "edits/manifest.json", tmp_path / "edits/other.json")
    several = f"{tmp_path / 'edits'}: several manifests (manifest.json, other.json); give the path of one of them"
    assert refused(retouch("data", "validate", tmp_path / "edits")) == several
    (tmp_path / "none").mkdir()
    assert refused(retouch("data", "validate", tmp_path / "none")).endswith(", or a run file")
    sample = ("sample", "--config", run_yaml(), "--out", tmp_path / "out")
    message = refused(retouch(*sample, "--data", tmp_path / "none"))
    assert "(metadata.jsonl or metadata.csv)" in message and "run file" not in message


def test_a_path_is_told_by_the_option_or_the_key_that_set_it(tmp_path: Path, run_yaml: Callable[..., Path]) -> None:
    away = tmp_path / "away"
    geneval = retouch("eval", "--benchmark", "geneval", "--path", away, "--images", tmp_path, "--out", tmp_path / "out")
    assert refused(geneval).startswith(f"--path: {away}: no such file")
    data = {"format": "manifest", "path": str(away), "resolution": [32, 64]}
    assert refused(retouch("train", run_yaml(evaluation={"data": data}))).startswith(
        f"evaluation.data.path: {away}: no"
    )


def test_components_that_init_and_benchmarks_do_not_take(tmp_path: Path, items: Path) -> None:
    init = ("init", items, "--out", tmp_path / "run.yaml")
    message = refused(retouch(*init, "--algorithm", "vlm_grpo"))
    assert message.startswith("--algorithm: given 'vlm_grpo', for which init writes no run file; it writes ")
    assert "did you mean 'grpo'" in refused(retouch(*init, "--algorithm", "grpoo"))
    file = tmp_path / "geneval.yaml"
    file.write_text("name: geneval\npath: x\nrewards: {geneval: {scorer: nope}}\n")
    message = refused(retouch("eval", "--benchmark", file, "--images", tmp_path))
    assert message.endswith("add the module that registers it to plugins (without a run file: to RETOUCH_PLUGINS), or "
                            "install its package")  # fmt: skip


def test_folders_that_cannot_be_made(run_yaml: Callable[..., Path], items: Path) -> None:
    if Path("/proc/self").exists():
        message = refused(retouch("sample", "--config", run_yaml(), "--data", items, "--out", "/proc/nothing/here"))
        assert message == "--out: given /proc/nothing/here, which cannot be made; give another folder"


def test_a_variable_that_is_not_set(run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA_PATH", raising=False)
    path = run_yaml(data__path="${DATA_PATH}/prompts")
    assert refused(retouch("train", path)) == (
        "data.path: ${DATA_PATH} is not set in the environment; export DATA_PATH=... or pass data.path=..."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "Missing argument 'RUN.yaml'; see --help"),
        (["train", "x.yaml", "--fast"], "No such option: --fast; see --help"),
        (["trian", "x.yaml"], "No such command 'trian'"),
        (
            ["tiny", "build", "nope", "--out", "x"],
            (
                "FAMILY: given 'nope'; known: flux2_klein, flux_fill, glyph_structure, glyph_structure_robust, "
                "image_encoder, qwen_image_edit, sd3, sd_inpaint, text_recognizer"
            ),
        ),
        (["sample", "--count", "0", "--out", "x"], "Invalid value for '--count': "),
        (["data", "synth", "--out", "x", "--length", "1000000"], "Invalid value for '--length': "),
    ],
)
def test_commands_and_options_that_do_not_exist(arguments: list[str], message: str) -> None:
    assert refused(retouch(*arguments)).startswith(message)


def test_ctrl_c_is_a_stop_not_a_failure(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(run: Path, single_file: bool) -> Path:
        raise KeyboardInterrupt

    run = finished("full")  # which leaves a report, too
    monkeypatch.setattr("retouch.observe.report.write_report", interrupted)
    outcome = retouch("report", run)
    assert (outcome.code, outcome.err) == (3, "stopped: interrupted\n")  # nothing to resume
    monkeypatch.setattr("retouch.cli.flags.answer", interrupted)  # while arguments are read
    outcome = retouch("check", "run.yaml")
    assert (outcome.code, outcome.err) == (3, "stopped: interrupted\n")


# --- data ---


@pytest.fixture
def items(signs: Path, tmp_path: Path) -> Path:
    """A copy of eight prompts, to break."""
    return shutil.copytree(signs / "prompts", tmp_path / "items")


def small_mask(folder: Path) -> None:
    mask = Image.new("L", (20, 10))
    mask.paste(255, (5, 2, 15, 8))
    mask.save(folder / "test103_mask.png")


def empty_text(folder: Path) -> None:
    listing = folder / "self_bench.txt"
    lines = listing.read_text().splitlines()
    listing.write_text("\n".join("103-" if line.startswith("103-") else line for line in lines))


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing file": (
        lambda folder: (folder / "test103_source.png").unlink(),
        "item 103: {}/test103_source.png: no such file",
    ),
    "a mask of another size": (
        small_mask,
        "item 103: {}/test103_mask.png: the mask is 20 x 10, its source 64 x 32; both must have one size",
    ),
    "an empty text": (
        empty_text,
        "self_bench.txt line 4: the text of item 103 is empty; write the target text of the mask",
    ),
    "a file that is no image": (
        lambda folder: (folder / "test103_source.png").write_text("<html>"),
        "item 103: {}/test103_source.png: not an image that Pillow can read; convert it to PNG or JPEG",
    ),
    "an empty mask": (
        lambda folder: Image.new("L", (64, 32)).save(folder / "test103_mask.png"),
        (
            "item 103: {}/test103_mask.png: the mask (luminance channel, values 0 to 0, threshold 128) is empty: "
            "nothing to repaint; paint the area to repaint white, the rest black (data.invert_mask=false)"
        ),
    ),
}


@pytest.mark.parametrize("what", BREAKAGES)
def test_a_broken_item_over_the_limit_is_an_error(run_yaml: Callable[..., Path], items: Path, what: str) -> None:
    damage, problem = BREAKAGES[what]
    damage(items)
    assert refused(retouch("train", run_yaml(data__path=str(items), data__max_bad_items=0))) == (
        f"data: 1 of 8 items are broken, more than max_bad_items 0; the first: {problem.format(items)}. "
        "`retouch data validate` lists them all"
    )


@pytest.mark.parametrize("what", BREAKAGES)
def test_the_table_names_a_broken_item(items: Path, what: str) -> None:
    damage, problem = BREAKAGES[what]
    damage(items)
    outcome = retouch("data", "validate", items, "--resolution", "32x64")
    assert (outcome.code, outcome.err) == (2, "")
    line, count = outcome.out.splitlines()
    where, _, why = problem.format(items).partition(": ")
    assert line == f"{'data':16} {where:24} {why}"
    assert count == "7 items can be used; 1 problem"


def test_broken_items_under_the_limit_are_skipped_and_counted(run_yaml: Callable[..., Path], items: Path) -> None:
    small_mask(items)
    (items / "test105_mask.png").unlink()
    outcome = retouch("train", run_yaml(data__path=str(items), data__max_bad_items=2, training__max_steps=1))
    assert outcome.code == 0
    log = " ".join(outcome.err.split())
    assert "data: skipped 2 of 8 items (max_bad_items 2)" in log
    assert log.count("data: skipped item ") == 2


def test_paths_that_hold_no_data(run_yaml: Callable[..., Path], signs: Path, tmp_path: Path) -> None:
    assert refused(retouch("train", run_yaml(data__path="nowhere"))) == "data.path: nowhere: no such folder"
    demo = "runs/demo-data/prompts"  # of the tiny run files, where DATA_PATH is not set
    assert refused(retouch("train", run_yaml(data__path=f"{tmp_path}/{demo}"))) == (
        f"data.path: {tmp_path}/{demo}: no such folder; the demo makes it (`make demo`, or `retouch init --example "
        "demo; python demo.py`); or set DATA_PATH"
    )
    assert refused(retouch("train", run_yaml(data__path=str(tmp_path)))).startswith(
        f"data.path: {tmp_path} has no self_bench.txt"
    )
    assert refused(retouch("train", run_yaml(rollout__global_groups_per_batch=9))) == (
        "rollout: an epoch takes 9 different examples (global_groups_per_batch x batches_per_epoch), but data has 8; "
        "set rollout.global_groups_per_batch=8 rollout.batches_per_epoch=1, or add data"
    )
    broken = shutil.copytree(signs / "prompts", tmp_path / "broken")
    next(broken.glob("*_source.png")).write_bytes(b"")
    outcome = retouch("train", run_yaml(data__path=str(broken), rollout__global_groups_per_batch=8))
    assert outcome.code == 2 and (
        "but data has 7 (1 of 8 was skipped: see above); set rollout.global_groups_per_batch=7 " in outcome.err
    )


# --- models ---


def test_models_that_are_not_there(run_yaml: Callable[..., Path], tmp_path: Path) -> None:
    hint = "no such folder; give a folder in the diffusers layout or a hub id"
    assert refused(retouch("train", run_yaml(model__path="/nowhere/model"))) == f"model.path: /nowhere/model: {hint}"
    assert refused(retouch("train", run_yaml(model__path=str(tmp_path)))) == (
        f"model.path: {tmp_path} has no model_index.json; give the top folder of a diffusers model"
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny base, to break."""
    return shutil.copytree(tiny_path("flux_fill"), tmp_path / "model")


def test_a_model_of_another_family(run_yaml: Callable[..., Path], model: Path) -> None:
    (model / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionInpaintPipeline"}))
    assert refused(retouch("train", run_yaml(model__path=str(model)))) == (
        f"model.path: {model} is a StableDiffusionInpaintPipeline; model.family needs a FluxFillPipeline; set another "
        "path, or the family of it"
    )


def test_a_transformer_that_cannot_inpaint(run_yaml: Callable[..., Path], model: Path) -> None:
    network: Any = FluxTransformer2DModel.from_pretrained(model / "transformer")
    text_to_image: Any = FluxTransformer2DModel(**{**network.config, "in_channels": 32})
    text_to_image.save_pretrained(model / "transformer")
    assert refused(retouch("train", run_yaml(model__path=str(model)))).startswith(
        "model.path: the network takes 32 channels, but flux_fill with this autoencoder needs 128; a text-to-image "
        "model cannot inpaint"
    )


def test_models_with_missing_weights(run_yaml: Callable[..., Path], model: Path) -> None:
    """diffusers and transformers would draw them at random and go on."""
    path = run_yaml(model__path=str(model))
    file = "diffusion_pytorch_model.safetensors"
    for part, kind, weights, name in (  # what is loaded last comes first
        ("vae", "AutoencoderKL", file, "decoder.conv_in.bias"),
        ("text_encoder_2", "T5EncoderModel", "model.safetensors", "encoder.final_layer_norm.weight"),
        ("transformer", "FluxTransformer2DModel", file, "proj_out.bias"),
    ):
        tensors = load_file(model / part / weights)
        del tensors[name]
        save_file(tensors, model / part / weights, metadata={"format": "pt"})
        assert refused(retouch("train", path)) == (
            f"model.path: cannot load {part}/ of {model} as {kind}: 1 weights are missing, {name} among them; copy it "
            "anew"
        )
    (model / "transformer" / file).write_bytes(b"cut off")
    assert refused(retouch("train", path)).startswith(f"model.path: cannot load transformer/ of {model} as Flux")
    shutil.rmtree(model / "transformer")
    assert refused(retouch("train", path)).startswith(f"model.path: cannot load transformer/ of {model} as Flux")


def test_lora_targets_that_match_nothing(run_yaml: Callable[..., Path]) -> None:
    assert refused(retouch("train", run_yaml(), "model.train={kind: lora, targets: [to_qkv]}")) == (
        "model.train.targets: given to_qkv; no module of FluxTransformer2DModel ends like that; leave targets out to "
        "take those of the family"
    )


# --- run directories and checkpoints ---


def test_a_run_directory_that_exists(finished: Finished) -> None:
    run = finished("full")
    before = (run / "metrics.jsonl").read_bytes()
    assert refused(retouch("train", run.parent / "run.yaml")) == (
        f"{run} already holds a run; continue it with resume=auto, set another name=..., or delete it"
    )
    assert (run / "metrics.jsonl").read_bytes() == before


def test_resume_auto_starts_where_nothing_is(run_yaml: Callable[..., Path], tmp_path: Path) -> None:
    outcome = retouch("train", run_yaml(training__max_steps=1), "resume=auto")
    assert (outcome.code, outcome.out) == (0, f"done: {tmp_path}/runs/t\n")
    assert "new run" in outcome.err


def test_a_checkpoint_that_is_not_there(run_yaml: Callable[..., Path], tmp_path: Path) -> None:
    assert refused(retouch("train", run_yaml(), "resume=nowhere/step-000004")) == (
        "resume: given 'nowhere/step-000004': no such checkpoint; give a checkpoints/step-... folder, or auto"
    )
    assert not (tmp_path / "runs").exists()


def test_a_run_is_no_checkpoint(finished: Finished) -> None:
    """It was called damaged, and to be deleted."""
    run = finished("full")
    for given in (run, run / "checkpoints"):
        assert refused(retouch("train", run.parent / "run.yaml", f"resume={given}")) == (
            f"resume: given '{given}': no checkpoint (it has no complete.json); give {run}/checkpoints/step-000004, or "
            "auto"
        )
    assert refused(retouch("train", run.parent / "run.yaml", f"resume={run.parent}")).endswith(
        "no checkpoint (it has no complete.json); give a checkpoints/step-... folder, or auto"
    )


WEIGHTS = "weights/diffusion_pytorch_model.safetensors"


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    file.unlink()
    if how != "gone":
        file.write_bytes(content[: -len(content) // 3] if how == "cut" else b"")


@pytest.mark.parametrize(
    ("name", "how"),
    cells(
        product(
            [WEIGHTS, "ema/diffusion_pytorch_model.safetensors", "optimizer.pt", "rng.pt", "state.json"],
            ["cut", "empty", "gone"],
        ),
        strength=1,
    ),
)
def test_a_damaged_checkpoint_is_named_and_costs_nothing(
    finished: Finished, tmp_path: Path, name: str, how: str
) -> None:
    """No metrics are cut off; and without it the run goes on from the checkpoint before."""
    run = shutil.copytree(finished("full"), tmp_path / "full")
    newest = run / "checkpoints" / "step-000004"
    damage(newest / name, how)
    before = (run / "metrics.jsonl").read_bytes()
    arguments = (finished("full").parent / "run.yaml", f"logging.dir={tmp_path}", "resume=auto")
    outcome = retouch("train", *arguments)
    assert outcome.code == 2
    last = outcome.err.splitlines()[-1]  # after warnings of what changed in the run file
    assert last.startswith(f"error: {newest}: ")
    assert "damaged" in last or "no diffusion_pytorch_model*.safetensors in it" in last
    assert (run / "metrics.jsonl").read_bytes() == before
    if (name, how) == (WEIGHTS, "cut"):
        shutil.rmtree(newest)  # as the message says
        assert retouch("train", *arguments).code == 0


def test_a_checkpoint_of_other_weights(finished: Finished, run_yaml: Callable[..., Path]) -> None:
    folder = finished("lora") / "checkpoints" / "step-000004"
    for command in (("sample", "--data", "{held_out}", "--out", "x"), ("eval",)):
        data = str(yaml.safe_load(run_yaml().read_text())["evaluation"]["data"]["path"])
        given = [data if argument == "{held_out}" else argument for argument in command]
        assert refused(retouch(*given, "--config", run_yaml(), "--weights", folder)).endswith(
            "/ema: no diffusion_pytorch_model*.safetensors in it, which model.train.kind=full needs"
        )
    lora = run_yaml(model__train={"kind": "lora", "rank": 4, "alpha": 16})
    assert refused(retouch("eval", "--config", lora, "--weights", folder)).endswith(
        "/ema: rank 4 and alpha 8 were trained, but model.train has 4 and 16; "
        "set model.train.rank=4 model.train.alpha=8"
    )


@pytest.mark.parametrize("to", ["diffusers", "safetensors"])
def test_damaged_weights_are_not_exported(finished: Finished, tmp_path: Path, to: str) -> None:
    folder = shutil.copytree(finished("full") / "checkpoints" / "step-000004", tmp_path / "step-000004")
    damage(folder / WEIGHTS, "cut")
    message = refused(retouch("export", folder, "--raw", "--to", to, "--out", tmp_path / "out"))
    assert message.startswith(f"{folder}: damaged ({WEIGHTS}: its size differs from complete.json)")
    damage(folder / "state.json", "gone")
    assert refused(retouch("export", folder, "--to", to, "--out", tmp_path / "out")).startswith(f"{folder}: damaged (")


@pytest.mark.parametrize("number", [*ENDING, signal.SIGINT])
def test_a_signal_ends_every_command_as_a_stop(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Also one of which a library makes another error."""

    def interrupted(run: Path, single_file: bool) -> Path:
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            raise ModelFilesError("x.safetensors cannot be read") from None
        raise AssertionError

    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, *ENDING)}
    run = finished("full")
    monkeypatch.setattr("retouch.observe.report.write_report", interrupted)
    try:
        for one in handlers:
            signal.signal(one, signal.SIG_DFL)
        assert retouch("report", run).code == 3
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)


def test_names_in_data_do_not_change_the_terminal(tmp_path: Path) -> None:
    """A list may come from anybody; its paths are shown in messages and tables."""
    name = "\x1b]0;owned\x07\x1b[2J\x9b31m\r"
    (tmp_path / "list.json").write_text(json.dumps([{"image_path": f"{name}.png", "prompt": "a"}]))
    for command in (("data", "validate"), ("data", "split")):
        outcome = retouch(*command, tmp_path / "list.json")
        shown = outcome.out + outcome.err
        assert outcome.code == 2
        assert r"\x1b]0;owned\x07\x1b[2J\x9b31m\x0d.png: no such file" in shown
        assert not set(shown) & {"\x1b", "\x07", "\x9b", "\r"}
    log = LogFile(tmp_path / "log.txt")
    try:
        logging.getLogger("retouch").warning("%s\n\t%s", name, "second line")
    finally:
        log.close()
    logged = (tmp_path / "log.txt").read_bytes().decode()
    assert logged.endswith("\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\x0d\n\tsecond line\n")


# --- limits of the machine ---


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("can't start new thread"), "no more threads are allowed"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (RuntimeError("could not create a primitive"), "out of memory"),
        (OSError(24, "Too many open files"), "too many open files"),
        (OSError(12, "Cannot allocate memory", "x.safetensors"), "out of memory"),
        (ImportError("libx.so: failed to map segment from shared object"), "a library could not be loaded into memory"),
    ],
)
def test_a_limit_of_the_machine_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, limit: str
) -> None:
    def exhausted(run: Path, single_file: bool) -> Path:
        raise error

    monkeypatch.setattr("retouch.observe.report.write_report", exhausted)
    outcome = retouch("report", tmp_path)
    line = f"error: {limit}; see `ulimit -a`, or use a machine with more\n"
    assert (outcome.code, outcome.err) == (1, line)


def test_a_device_that_is_full_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever its memory ends."""

    def full(run: Path, single_file: bool) -> Path:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    monkeypatch.setattr("retouch.observe.report.write_report", full)
    outcome = retouch("report", tmp_path)
    told = "out of memory on the device (CUDA out of memory. Tried to allocate 2.00 GiB)"
    assert outcome.code == 1
    assert outcome.err == f"error: {told}; `retouch check --memory RUN.yaml` counts the need\n"


# --- an installation without extras ---


@pytest.mark.parametrize(
    ("module", "command", "extra"),
    [
        ("torch", ["train", "{run}"], "train"),
        pytest.param(
            "diffusers",
            ["sample", "--config", "{run}", "--out", "x", "--data", "{data}"],
            "train",
            marks=pytest.mark.full,
        ),
        ("fastapi", ["reward", "serve", "preservation", "--port", "0"], "serve"),
        pytest.param("uvicorn", ["reward", "serve", "preservation", "--port", "0"], "serve", marks=pytest.mark.full),
        ("rapidocr", ["reward", "score", "--reward", "ocr", "--image", "{image}", "--prompt", "'A'"], "ocr"),
    ],
)
def test_a_missing_extra_is_named_with_its_command(
    run_yaml: Callable[..., Path], signs: Path, tmp_path: Path, module: str, command: list[str], extra: str
) -> None:
    """In a process of its own, where the module cannot be imported."""
    values = {
        "{run}": str(run_yaml()),
        "{data}": str(signs / "held_out"),
        "{image}": str(signs / "held_out" / "test200_source.png"),
    }
    script = f"import sys; sys.modules[{module!r}] = None; from retouch.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, *(values.get(word, word) for word in command)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    *begun, line = done.stderr.splitlines()
    assert [LOADING in one for one in begun] == [True] * (command[0] in ("train", "sample"))
    assert line.startswith("error: ") and line.endswith(f'pip install "retouch[{extra}]"')
    assert module in line


# --- names, pipes and signals ---


@pytest.mark.parametrize("arguments", [("check",), ("data", "validate"), ("report",), ("export", "--to", "diffusers")])
def test_names_that_no_file_can_have(arguments: tuple[str, ...]) -> None:
    outcome = retouch(*arguments, "x" * 300)
    assert outcome.code == 2
    name = "x" * 80
    says = f"{name}: file name too long; give another path"
    if arguments == ("data", "validate"):  # where a path may also name data at a commit
        says = f"{name!r} ...: this path is too long; names have at most 255 bytes"
    assert outcome.err == f"error: {says}\n"


def test_links_that_lead_to_themselves(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert refused(retouch("check", tmp_path / "a")).endswith("; give another path")


def test_a_pipe_is_not_waited_for(tmp_path: Path, run_yaml: Callable[..., Path]) -> None:
    pipe, run = tmp_path / "pipe.png", tmp_path / "runs" / "run"
    os.mkfifo(pipe)
    with pytest.raises(ImageProblem, match="not a file"):
        open_image(pipe)
    run.mkdir(parents=True)
    os.mkfifo(run / ".lock")
    with pytest.raises(ConfigError, match="not a file; delete it"):
        RunLock(run).require_free()
    with pytest.raises(ConfigError, match="not a file; delete it"):
        RunLock(run).take()


def test_a_device_is_no_endpoints_file() -> None:
    with pytest.raises(ConfigError, match="/dev/zero"):
        resolve_urls("/dev/zero", "ocr")


def misread(config: object, number: int) -> None:
    """As a library that takes an interrupted read for a damaged file."""
    try:
        os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        raise ModelFilesError("model.path: cannot load transformer/") from None


@pytest.mark.parametrize("library", [lambda config, number: os.kill(os.getpid(), number), misread])
@pytest.mark.parametrize("number", ENDING)
def test_a_signal_while_the_model_loads_is_a_stop(
    run_yaml: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    library: Callable[[object, int], None],
) -> None:
    before = {n: signal.getsignal(n) for n in ENDING}
    signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    monkeypatch.setattr("retouch.algorithms.train.train", lambda config: library(config, number))
    try:
        outcome = retouch("train", run_yaml())
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert (outcome.code, outcome.err) == (3, "stopped: interrupted; continue with resume=auto\n")
    after = retouch("check", "missing.yaml")
    assert after.code == 2 and "interrupted" not in after.err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--text", os.fsdecode(b"\xff"), "--text: given '\\udcff', which is not UTF-8; write it in UTF-8"),
        ("--prompt", os.fsdecode(b"a\xff"), "--prompt: given 'a\\udcff', which is not UTF-8; write it in UTF-8"),
        ("--feather", "inf", "--feather: given inf; expected 0 to 1000 pixels"),
        ("--feather", "1e308", "--feather: given 1e+308; expected 0 to 1000 pixels"),
        ("--count", "1000001", "Invalid value for '--count': Input should be less than or equal to 1000"),
        ("--resolution", "9" * 5000, f"--resolution: given '{'9' * 80}'; write a side like 512, or HEIGHTxWIDTH like"),
        ("--resolution", "65536", "--resolution: given '65536'; write a side like 512, or HEIGHTxWIDTH like 32x64, of"),
    ],
)
def test_options_of_samples_out_of_range(
    run_yaml: Callable[..., Path], signs: Path, tmp_path: Path, option: str, value: str, message: str
) -> None:
    files = [signs / "held_out" / f"test200_{name}.png" for name in ("source", "mask")]
    given = ["--image", files[0], "--mask", files[1], option, value]
    given += [] if option in ("--text", "--prompt") else ["--text", "HI"]
    outcome = retouch("sample", "--config", run_yaml(), "--out", tmp_path / "out", "--steps", 1, *given)
    assert refused(outcome).startswith(message)
    assert not (tmp_path / "out").exists()


def test_an_image_that_is_a_program_is_not_run(tmp_path: Path) -> None:
    """Pillow passes PostScript to Ghostscript, whatever the suffix; here another program has its name."""
    ran = tmp_path / "ran"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    image = tmp_path / "a.png"
    image.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n")
    opens = (
        "from pathlib import Path\nfrom retouch.errors import ImageProblem\n"
        "from retouch.imaging.reading import open_image\n"
        f"try: open_image(Path({str(image)!r}))\nexcept ImageProblem as problem: print(problem)"
    )
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", opens], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert not ran.exists()
    assert done.stdout == f"{image}: EPS, a program for a printer; convert it to PNG or JPEG\n"


def test_one_process_builds_a_tiny_base_into_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before anything is trained, for every family."""
    out, refusals = tmp_path / "out", list[str]()

    def build(out: Path, seed: int) -> dict[str, Any]:
        refusals.append(refused(retouch("tiny", "build", "flux_fill", "--out", out)))
        (out / "model.safetensors").write_text("mine")
        return {"seed": seed}

    monkeypatch.setattr(image_encoder, "build_encoder", build)
    assert retouch("tiny", "build", "image_encoder", "--out", out).code == 0
    for other in (out, tmp_path / "loop", tmp_path / "nothing", tmp_path / "file"):
        if other.name == "file":
            other.write_text("kept")
        elif other != out:
            other.symlink_to(tmp_path / ("loop" if other.name == "loop" else "gone"))
        outcome = retouch("tiny", "build", "image_encoder", "--out", other)
        assert outcome.code in (1, 2)
        refusals.append(outcome.err.strip())
    assert refused(retouch("tiny", "build", "image_encoder", "--seed", 10**30, "--out", tmp_path / "b"))
    assert [line.split(": ", 2)[-1] for line in refusals] == [
        f"{out}: another process is writing there; wait for it, or choose another --out".split(": ", 2)[-1],
        f"{out} is not empty; choose another folder",
        *["a file exists where a folder is expected; set --out to a folder"] * 2,
        f"{tmp_path / 'file'} is a file; choose another folder",
    ]
    assert (out / "model.safetensors").read_text() == "mine"


def test_a_build_that_fails_leaves_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, stays in (("new", False), ("empty", True), ("written", True)):
        with pytest.raises(ValueError, match="no fonts"), empty_folder(tmp_path / name):
            if name == "written":
                (tmp_path / name / "half").write_text("x")
            raise ValueError("no fonts")
        assert (tmp_path / name).exists() is stays
