"""docs/scaling.md: every number of the page is the code's or a committed benchmark's."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from retouch.config import derive, load_run
from retouch.doctor.line import size
from retouch.doctor.memory import report_memory
from retouch.families.base import TrainIpAdapter

from .pages import REPOSITORY, retouch_arguments

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import gpu
import random_models

PAGE = (REPOSITORY / "docs/scaling.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\| [^|]+ \| `([^`]+)` \| (\d+) \| ([\d.]+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
LEVERS = re.findall(r"^\| [^|]+ \| (?:`([^`]+)`)? ?\| ([\d.]+) \|$", PAGE, re.MULTILINE)

FULL = "configs/flux_fill_grpo_full.yaml"


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PATH", "somewhere")
    monkeypatch.setenv("DATA_JSON_PATH", "somewhere")
    monkeypatch.setenv("CALLIGRAPHER_PATH", "somewhere")
    monkeypatch.delenv("SIGLIP_PATH", raising=False)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configs of the released models, by family, and of the encoder of references."""
    folder = tmp_path_factory.mktemp("released")
    for family in ("flux_fill", "sd_inpaint", "qwen_image"):
        random_models.write_model(folder / family, family, tiny=False)
    random_models.write_encoder(folder / "encoder", tiny=False)
    return folder


def words_of(command: str) -> tuple[str, list[str]]:
    """Run file and overrides of a command that trains."""
    arguments = retouch_arguments(shlex.split(command))
    assert arguments is not None and arguments[0] == "train"
    return str(REPOSITORY / arguments[1]), arguments[2:]


def test_the_tables_are_read_whole() -> None:
    assert (len(STEPS), len(LEVERS)) == (16, 5)


@pytest.mark.parametrize(("command", "processes", "gb", "forwards", "images"), STEPS, ids=[row[0] for row in STEPS])
def test_a_step_costs_what_the_page_says(
    command: str, processes: str, gb: str, forwards: str, images: str, released: Path
) -> None:
    file, overrides = words_of(command)
    run = load_run(file, overrides)
    overrides = [*overrides, f"model.path={released / run.model.family}"]
    if isinstance(run.model.train, TrainIpAdapter):
        assert run.model.spec.adapter and run.model.train.image_encoder == run.model.spec.adapter.image_encoder
        overrides.append(f"model.train.image_encoder={released / 'encoder'}")
    numbers = derive(run, int(processes))
    assert (f"{numbers.forwards_per_image:g}", str(numbers.images_per_epoch_per_device)) == (forwards, images)
    assert numbers.padded_images_per_epoch == 0
    assert f"{report_memory(load_run(file, overrides), int(processes))['device_bytes'] / 1e9:.1f}" == gb
    if "qwen" not in file:  # "two optimizer steps per epoch, with 64 images each"
        assert (numbers.global_rows_per_step, numbers.optimizer_steps_per_epoch) == (64, 2)


FULL_LAUNCHERS = [f"configs/flux_fill_{name}_full.yaml" for name in ("grpo", "dpo", "sft")]
ADAPTERS_OF = [f"configs/flux_fill_{kind}_{name}.yaml" for name in ("grpo", "nft") for kind in ("calligrapher", "ip")]


def counted(file: str, released: Path, processes: int, *overrides: str) -> str:
    """What `retouch check --memory` says a process holds on its device."""
    paths = [f"model.path={released / 'flux_fill'}"]
    if file in ADAPTERS_OF:
        paths.append(f"model.train.image_encoder={released / 'encoder'}")
    report = report_memory(load_run(str(REPOSITORY / file), [*paths, *overrides]), processes)
    return size(report["device_bytes"])


@pytest.mark.parametrize("file", FULL_LAUNCHERS)
def test_launchers_of_all_weights_name_what_four_gpus_hold(file: str, released: Path) -> None:
    script = REPOSITORY / f"scripts/finetune/finetune_{Path(file).stem.removesuffix('_full')}_4gpus.sh"
    header = script.read_text(encoding="utf-8")
    held = counted(file, released, 4)
    assert f"# {held} a GPU" in header and f"{file} --memory --world-size 4" in header
    whole = size(4 * 11_902_391_360)
    assert f"Host memory: {whole} for each process" in header
    assert f"ema=null evaluation.weights=raw takes {size(11_902_391_360)} less" in header  # a quarter of 4 bytes each
    left = f"{79.6 - float(held.split()[0]):.1f} GiB"
    assert held in PAGE and left in PAGE and left in header


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("nft", marks=pytest.mark.full)])
def test_launchers_and_files_of_style_adapters_name_what_they_hold(algorithm: str, released: Path) -> None:
    files = [file for file in ADAPTERS_OF if file.endswith(f"_{algorithm}.yaml")]
    one = [counted(file, released, 1) for file in files]
    four = [counted(file, released, 4, "training.sharding=zero2") for file in files]
    script = (REPOSITORY / f"scripts/train_ip_{algorithm}.sh").read_text(encoding="utf-8")
    told = " ".join(script.replace("\n#", "").split())
    assert f"{one[0]} from calligrapher.bin, {one[1]} for a new adapter" in told
    assert f"training.sharding=zero2, {four[0]} and {four[1]} each" in told
    for file, alone, shared in zip(files, one, four, strict=True):
        header = " ".join((REPOSITORY / file).read_text(encoding="utf-8").replace("\n#", "").split())
        assert f"{alone} on one GPU, {shared} on each of four with training.sharding=zero2" in header
        row = f"| `{Path(file).stem}` | {alone} | {shared} |"
        assert row in (REPOSITORY / "docs/style-adapter.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("command", "processes"), [row[:2] for row in STEPS], ids=[row[0] for row in STEPS])
def test_the_command_starts_so_many_processes(command: str, processes: str) -> None:
    words = shlex.split(command)
    if words[0] == "retouch":
        assert processes == "1"
        return
    engine = (REPOSITORY / words[words.index("--config_file") + 1]).read_text(encoding="utf-8")
    given = words[words.index("--num_processes") + 1] if "--num_processes" in words else None
    found = re.search(r"^num_processes: (\d+)$", engine, re.MULTILINE)
    assert found is not None and (given or found[1]) == processes


def test_forwards_of_the_levers_one_upon_the_other() -> None:
    overrides: list[str] = []
    for override, forwards in LEVERS:
        overrides += [override] if override else []
        run = load_run(str(REPOSITORY / "configs/sd_inpaint_grpo.yaml"), overrides)
        assert round(derive(run).forwards_per_image, 2) == float(forwards), override


def test_numbers_in_the_text(released: Path) -> None:
    whole = load_run(str(REPOSITORY / FULL), [f"model.path={released / 'flux_fill'}"])
    report = report_memory(whole)
    assert f"would be {report['device_bytes'] / 1e9:.1f} GB" in PAGE
    [network] = [part for part in report["parts"] if part["what"] == "network, trained"]
    read = f"Read as fp32 at once, FLUX.1-Fill takes {network['bytes'] / 1e9:.1f} GB of host memory on every process"
    assert read in " ".join(PAGE.split())
    large = derive(
        load_run(str(REPOSITORY / FULL), ["rollout.global_groups_per_batch=64", "optimizer.global_batch_size=512"]), 64
    )
    assert "512 images a batch, 16 an epoch for each of 64 processes, and steps of 512" in " ".join(PAGE.split())
    numbers = (large.global_images_per_rollout_batch, large.images_per_epoch_per_device, large.global_rows_per_step)
    assert numbers == (512, 16, 512)


def test_what_was_measured_is_what_the_files_say() -> None:
    def result(name: str) -> dict[str, object]:
        return json.loads((REPOSITORY / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))

    overlap = result("overlap")
    assert "8 groups per step" in PAGE and overlap["groups"] == 8
    assert "80 %" in PAGE and overlap["reward_share_of_rollout"] == 0.8
    most = overlap["overlapped_ratio_range"][1]  # type: ignore[index]
    assert f"takes {overlap['overlapped_ratio']:.2f} times as long" in PAGE
    assert f"(median; at most {most:.2f}), and {overlap['waiting_ratio']:.2f} times if" in " ".join(PAGE.split())
    rows: list[dict[str, float]] = result("memory")["rows"]  # type: ignore[assignment]
    assert "within 10 % of the memory before activations" in PAGE and all(abs(row["ratio"] - 1) <= 0.1 for row in rows)
    scaling: dict[str, dict[str, float]] = result("scaling")  # type: ignore[assignment]
    alone = scaling["one"]["wall_step_s"]
    strong, weak = (f"{100 * scaling[kind]['wall_step_s'] / alone:.0f} %" for kind in ("strong", "weak"))
    assert f"takes {strong} of the time (50 %" in " ".join(PAGE.split())
    assert f"one of 16 images, 8 for each, {weak} (" in " ".join(PAGE.split())


def test_what_compilation_costs_and_saves_on_a_gpu() -> None:
    measured = json.loads((REPOSITORY / "benchmarks/results/gpu_first_run.json").read_text(encoding="utf-8"))
    cells = {row["cell"]: row for row in measured["cells"]}
    toys = [row for name, row in cells.items() if name.startswith("tiny-")]
    assert measured["machine"]["gpu"] == "NVIDIA H200" and not any("failed" in row for row in toys)
    passed = int(cells["tests_cuda"]["summary"].strip("= ").split()[0])
    assert f"one H200 all {len(toys)} steps and all {passed} tests passed" in " ".join(PAGE.split())
    shares = [100 * cells[f"qwen_image-{name}"]["mfu"] for name in ("no_mask", "plain")]
    assert f"launched ({shares[0]:.0f} to {shares[1]:.0f} % of the peak)" in " ".join(PAGE.split())
    plain, compiled = cells["flux_fill-plain"], cells["flux_fill-compiled"]
    trained, rollout = (
        [sum(row["parts_s"][part] for part in parts) for row in (plain, compiled)]
        for parts in (("train_forward", "train_backward"), ("rollout",))
    )
    more = compiled["first_step_s"] - plain["first_step_s"]
    steps = more / (trained[0] + rollout[0] - trained[1] - rollout[1])
    text = [row["parts_s"]["text"] for row in (plain, compiled)]
    whole = [row["step_s"] for row in (plain, compiled)]
    speed = (REPOSITORY / "docs/speed.md").read_text(encoding="utf-8")
    for said in (
        f"samples in {rollout[1]:.2f} s instead of {rollout[0]:.2f} s",
        f"take {trained[1]:.2f} s instead of {trained[0]:.2f} s",
        f"{more:.0f} s more at the first step, which about {round(steps, -1):.0f} steps win back",
        f"whole step took {whole[1]:.2f} s instead of {whole[0]:.2f} s",
        f"`text` took {text[1]:.2f} s instead of {text[0]:.2f} s",
        f"if that stays, {round(more / (whole[0] - whole[1]), -2):,.0f} steps",
    ):
        assert said in speed, said


def test_the_table_of_a_gpu_is_that_of_the_file() -> None:
    measured = json.loads((REPOSITORY / "benchmarks/results/gpu.json").read_text(encoding="utf-8"))
    text = " ".join(PAGE.split())
    assert f"\n\n{gpu.table(measured['rows'])}\n\n" in PAGE
    assert measured["machine"]["gpu"] == "NVIDIA H200" and measured["side"] == 512
    rows = [row for row in measured["rows"] if "step_s" in row]
    assert all(row["settings"]["num_steps"] == 6 for row in rows if row["speed"] == "fast")
    assert f"within {100 * max(abs(row['held_gib'] / row['counted_gib'] - 1) for row in rows):.1f} %." in text
    assert "would take 178 GiB" in text
    assert "counted 178 GiB of 140" in {row.get("skipped") for row in measured["rows"]}
