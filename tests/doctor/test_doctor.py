"""`retouch doctor`: a set-up that works, and set-ups with one fault each, which it names and nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from retouch.adapters.lora import FILE, add_lora
from retouch.adapters.trainee import LoraWeights, make_trainable
from retouch.config import load_run, parse_run
from retouch.doctor.adapter import distillation_lines
from retouch.doctor.capacity import memory_line
from retouch.doctor.launch import launch_extras
from retouch.doctor.line import Line
from retouch.doctor.machine import Gpu, Gpus, extra_lines, find_gpus, gpu_lines
from retouch.doctor.memory import count_weights
from retouch.doctor.model import find_model
from retouch.doctor.networks import build_networks
from retouch.doctor.rewards import _problem, _remedy, needed_extras
from retouch.families.base import DistillationLora
from retouch.families.flux_fill.spec import FluxFillModel
from retouch.families.image_encoder import TINY
from retouch.families.loading import load_model
from retouch.families.qwen_image.spec import QwenImageModel
from retouch.files.model_files import tiny_path
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.golden import golden_items
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.knowledge_graph import read_graph
from retouch.rewards.scorers.pairwise import PairwiseReward
from retouch.rewards.scorers.seam import SeamReward
from retouch.tiny.edits import write_edits
from retouch.types import Failure, Outcome, Score
from tests.command_line import retouch
from tests.rewards.fakes import Brightness, closed_port, score_checked, serving
from tests.rewards.openai_server import KEY, OpenAIServer
from tests.tiny_models import tiny_calligrapher

CHECKED = [
    "retouch",
    "base packages",
    "extra train",
    "extra serve",
    "extra ocr",
    "extra readers",
    "extra vlm",
    "extra deepspeed",
    "extra quantize",
    "extra wandb",
    "extra trackio",
    "extra ui",
    "GPUs",
    "model",
    "memory",
    "disk",
    "data",
    "warmup_data",
    "evaluation.data",
    "run directory",
    "reward preservation",
]
"""What the lines of the small run are about, in order, on a machine without a GPU."""


@pytest.fixture
def run_yaml(run_file: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Path]:
    def write(**overrides: Any) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(run_file(**overrides)), encoding="utf-8")
        return path

    return write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny FLUX to break."""
    return Path(shutil.copytree(tiny_path("flux_fill"), tmp_path / "model"))


def lines(*arguments: object) -> list[dict[str, str]]:
    """What it says; its exit code must follow from that."""
    outcome = retouch("doctor", *arguments, "--json")
    assert outcome.err == ""
    found = json.loads(outcome.out)
    assert outcome.code == (1 if any(line["status"] == "fix" for line in found) else 0)
    return found


def only(status: str, *arguments: object) -> tuple[str, str]:
    """(what, says) of the one line that is not ok; it has the status given."""
    [line] = [line for line in lines(*arguments) if line["status"] != "ok"]
    assert line["status"] == status
    return line["what"], line["says"]


def test_a_set_up_that_works(run_yaml: Callable[..., Path]) -> None:
    found = lines(run_yaml())
    assert [line["what"] for line in found if not line["what"].startswith("GPU")] == [
        what for what in CHECKED if what != "GPUs"
    ]
    assert {line["status"] for line in found} == {"ok"}
    outcome = retouch("doctor", run_yaml())
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "nothing to fix")
    assert outcome.out.count("\n") == len(found) + 1


@pytest.mark.parametrize(
    ("gate", "url", "reads"), [(0.5, "auto", True), (0.0, "auto", False), (0.5, "http://a", False)]
)
def test_a_style_reward_that_reads_here_needs_the_recogniser(
    gate: float, url: str, reads: bool, run_yaml: Callable[..., Path]
) -> None:
    run = load_run(run_yaml(rewards={"style": {"gate": gate, "url": url}}))
    assert ("ocr" in needed_extras(run)) is reads


@pytest.mark.parametrize(("engine", "reads"), [("rapidocr", True), ("paddleocr", False)])
def test_a_recogniser_installed_by_hand_needs_no_extra(engine: str, reads: bool, run_yaml: Callable[..., Path]) -> None:
    run = load_run(run_yaml(rewards={"ocr": {"engine": engine}}))
    assert ("ocr" in needed_extras(run)) is reads


@pytest.mark.parametrize("missing", [True, False])
def test_a_reader_nobody_trained_on_needs_its_extra(
    missing: bool, run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requirement is that of pyproject.toml; the installed metadata may be of an earlier version."""
    version = importlib.metadata.version

    def installed(name: str) -> str:
        if name == "tesserocr" and missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.13.0" if name == "tesserocr" else version(name)

    gold = {"scorer": "ocr", "engine": "tesseract", "detect": False, "role": "gold"}
    run = load_run(run_yaml(rewards={"preservation": {}, "tesseract": gold}))
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["tesserocr>=2.8; extra == 'readers'"])
    monkeypatch.setattr(importlib.metadata, "version", installed)
    [line] = [line for line in extra_lines(needed_extras(run), {}) if line.what == "extra readers"]
    remedy = 'tesserocr is not installed: pip install -U "retouch[readers]"'
    assert (line.status, line.says) == (("fix", remedy) if missing else ("ok", "tesserocr 2.13.0"))


def test_zero_needs_deepspeed(run_yaml: Callable[..., Path]) -> None:
    for sharding, needed in (("zero2", True), ("zero3", True), ("fsdp2", False)):
        run = load_run(run_yaml(training__sharding=sharding))
        assert ("deepspeed" in needed_extras(run)) is needed


def test_an_8gpu_file_is_launched_with_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration of accelerate says so, which the run file does not name: a warning."""
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    found = {}
    for name in ("qwen_image_edit_vlm_grpo", "flux_fill_grpo"):
        run = load_run(Path(__file__).parents[2] / f"configs/tiny/{name}.yaml")
        [found[name]] = [line for line in extra_lines({"train"}, launch_extras(run)) if line.what == "extra deepspeed"]
    vlm, grpo = found.values()
    assert (vlm.status, grpo.status) == ("warning", "ok")
    assert "configs/accelerate/zero2.yaml" in vlm.says and 'pip install -U "retouch[deepspeed]"' in vlm.says


def test_sinks_need_their_extras(run_yaml: Callable[..., Path]) -> None:
    run = load_run(run_yaml(logging__sinks=["tensorboard", "trackio"]))
    assert needed_extras(run) & {"wandb", "trackio"} == {"trackio"}


def test_wandb_without_a_key(run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    wandb.teardown()  # which remembers the environment
    says = "logging.sinks: wandb has no API key; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
    assert only("fix", run_yaml(logging__sinks=["wandb"])) == ("wandb", says)
    wandb.teardown()


def test_without_a_run_file_it_looks_at_the_machine() -> None:
    assert {"retouch", "base packages", "extra train", "extra serve", "extra ocr", "disk"} <= {
        line["what"] for line in lines()
    }


# --- the machine ---


def test_a_package_that_is_missing_or_old(run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.metadata.requires("retouch") or []
    more = ["notthere>=1; extra == 'train'", "fastapi>=99.1; extra == 'serve'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [*there, *more])
    assert only("fix", run_yaml()) == (
        "extra train",
        'notthere is not installed: pip install -U "retouch[train]"',
    )  # this run needs no server
    found = {line["what"]: line for line in lines()}
    assert found["extra train"]["status"] == found["extra serve"]["status"] == "warning"  # perhaps nobody wants them
    assert "fastapi is " in found["extra serve"]["says"]
    assert "at least 99.1 is needed" in found["extra serve"]["says"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=99"])
    assert ("fix", "base packages") in {(line["status"], line["what"]) for line in lines()}


def test_a_driver_whose_gpus_torch_cannot_use(
    run_yaml: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("it can")
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin/nvidia-smi"
    fake.write_text("#!/bin/sh\necho Imaginary 9000\n", encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    what, says = only("fix", run_yaml())
    assert what == "GPUs"
    assert says.startswith(f"nvidia-smi lists Imaginary 9000, but torch {torch.__version__} can use none; install")


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, *rest: Any, **more: Any) -> Any:
        if name == "torch":
            raise OSError("libcudart.so.99: cannot open shared object file")
        return original(name, *rest, **more)

    import builtins

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", broken)
    found = find_gpus()
    monkeypatch.undo()
    assert found.problem == (
        "torch is installed but cannot be imported: libcudart.so.99: cannot open shared object file"
    )


def test_a_gpu_that_fails_is_a_line_and_the_others_are_listed(
    run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that another process fills or has for itself alone; the doctor is asked because of it."""

    def free(device: int) -> tuple[int, int]:
        if device == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 MiB")
        return 2**40, 2**40

    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "mem_get_info": free,
        "get_device_name": lambda device: "H100",
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert [gpu.name for gpu in find_gpus().usable] == ["H100"]
    assert only("fix", run_yaml()) == (
        "GPU 0",
        "torch cannot use it: CUDA out of memory; end what holds it (nvidia-smi), or hide it (CUDA_VISIBLE_DEVICES)",
    )


TOO_SMALL = (
    "set model.train.kind=lora, model.dtype=bf16, training.sharding=fsdp2 on several devices, or take a larger one"
)


@pytest.mark.parametrize(
    ("memory", "free", "said"),
    [
        (2**24, 2**24, TOO_SMALL),
        (2**30, 2**24, "only 16 MiB is free: end what holds the rest (nvidia-smi)"),
    ],
)
def test_a_gpu_that_is_too_small_or_taken(
    memory: int, free: int, said: str, run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retouch.doctor.diagnosis.find_gpus", lambda: Gpus([Gpu("small", memory, free)], [], "2"))
    what, says = only("fix", run_yaml())
    assert what == "memory"
    assert says.endswith(said)


def test_only_what_the_run_may_have_and_takes_less_memory_is_a_remedy() -> None:
    """Options that the run has, and sharding of quantized layers, which `check` rejects, were among them."""
    data = {"format": "self_bench", "path": "x", "resolution": [32, 64]}
    model = {"family": "flux_fill", "path": "tiny", "quantize": "nf4", "train": {"kind": "lora"}}
    run = parse_run({"name": "t", "model": model, "data": data, "algorithm": {"name": "sft"}, "rewards": {}})
    networks = build_networks(run.model, find_model(run.model))
    small = Gpus([Gpu("small", 2**20, 2**20)], [], "2")
    assert memory_line(run, networks, small, 1).says.endswith("; set model.train.rank=4, or take a larger one")
    whole = run.model_copy(update={"model": run.model.model_copy(update={"quantize": None})})
    assert memory_line(whole, networks, small, 1).says.endswith(
        "; set model.quantize=nf4, model.train.rank=4, or instead training.sharding=fsdp2 on several devices, or take "
        "a larger one"
    )


def test_a_container_has_less_than_its_machine(run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU; the kernel ends what takes more."""
    monkeypatch.setattr("retouch.doctor.diagnosis.find_gpus", lambda: Gpus([], [], "2"))
    monkeypatch.setattr("retouch.doctor.capacity.container_limit", lambda: 2**24)
    what, says = only("fix", run_yaml())
    assert what == "memory" and "16 MiB in this container or job" in says
    monkeypatch.setattr("retouch.doctor.capacity.container_limit", lambda: 2**70)
    found = {line["what"]: line for line in lines(run_yaml())}
    assert found["memory"]["says"].endswith("in this machine; activations come on top")


def test_a_gpu_that_just_holds_it_is_warned_of(run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "retouch.doctor.diagnosis.find_gpus", lambda: Gpus([Gpu("just", 39 * 2**20, 39 * 2**20)], [], "2")
    )
    what, says = only("warning", run_yaml())
    assert what == "memory"
    assert "training.gradient_checkpointing=true" in says


def test_more_processes_than_gpus(run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retouch.doctor.diagnosis.find_gpus", lambda: Gpus([Gpu("one", 2**40, 2**40)], [], "2"))
    assert only("fix", run_yaml(), "--world-size", 2) == (
        "GPUs",
        "1 for 2 processes; lower --num_processes (here --world-size), or check CUDA_VISIBLE_DEVICES",
    )


def test_a_run_on_several_machines_and_a_gpu_that_others_use() -> None:
    """Neither is wrong: the processes of this machine take its first GPUs."""
    eight = Gpus([*[Gpu("one", 2**40, 2**40)] * 7, Gpu("taken", 2**40, 0)], [], "2")
    assert [line.status for line in gpu_lines(eight, 12) if line.what == "GPUs"] == ["fix"]
    [line] = [line for line in gpu_lines(eight, 16) if line.what == "GPUs"]
    assert (line.status, line.says[:58]) == ("warning", "8 for 16 processes, which takes 2 machines like this one; ")
    data = {"format": "self_bench", "path": "x", "resolution": [32, 64]}
    model = {"family": "flux_fill", "path": "tiny", "train": {"kind": "lora"}}
    run = parse_run({"name": "t", "model": model, "data": data, "algorithm": {"name": "sft"}, "rewards": {}})
    networks = build_networks(run.model, find_model(run.model))
    assert memory_line(run, networks, eight, 7).status == "ok"
    assert "only 0 MiB is free" in memory_line(run, networks, eight, 8).says


def test_a_run_directory_that_cannot_be_made_and_a_disk_that_is_full(
    run_yaml: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    what, says = only("fix", run_yaml(logging__dir=str(tmp_path / "file/runs")))
    assert (what, says.endswith("is no folder that can be written to; set logging.dir")) == ("disk", True)
    usage: Any = lambda path: shutil._ntuple_diskusage(100, 0, 2**24)  # type: ignore[attr-defined]  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    what, says = only("fix", run_yaml())
    assert (what, "two must fit at a time; free some, or set logging.dir" in says) == ("disk", True)
    usage = lambda path: shutil._ntuple_diskusage(100, 0, 2**26)  # type: ignore[attr-defined]  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    what, says = only("warning", run_yaml(training__checkpoint_every=1))
    assert (what, says.endswith("6 are kept; set training.keep_checkpoints, or logging.dir")) == ("disk", True)


# --- the model ---


def test_a_model_that_is_not_there_or_another_one(run_yaml: Callable[..., Path], tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    found = {line["what"]: line for line in lines(run_yaml(model__path=path))}
    assert found["model"]["status"] == "fix"
    assert found["model"]["says"].startswith(f"model.path: {path}: no such folder")
    found = {line["what"]: line for line in lines(run_yaml(model__path=str(tiny_path("sd_inpaint"))))}
    assert found["model"]["status"] == "fix"
    assert "is a StableDiffusionInpaintPipeline; model.family needs a FluxFillPipeline" in found["model"]["says"]


def test_a_hub_id_that_was_not_downloaded_is_no_fault(run_yaml: Callable[..., Path]) -> None:
    found = {line["what"]: line for line in lines(run_yaml(model__path="nobody/nothing", data__resolution=[32, 64]))}
    assert found["model"]["status"] == "warning"
    assert "nobody/nothing is not on this machine; the run downloads it" in found["model"]["says"]
    assert "11,902,391,360 trained" in found["memory"]["says"]  # of the released size: 11.9 B
    assert (
        "(not known: whether nobody/nothing has the sizes of black-forest-labs/FLUX.1-Fill-dev"
        in (found["memory"]["says"])
    )


def test_weights_cut_off_by_a_full_disk(run_yaml: Callable[..., Path], model: Path) -> None:
    file = model / "vae/diffusion_pytorch_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert only("fix", run_yaml(model__path=str(model))) == (
        "model",
        f"{model}: vae/{file.name} has {len(whole) - 1} bytes, {len(whole)} are expected; copy the model anew",
    )
    file.write_bytes(whole[:100])
    what, says = only("fix", run_yaml(model__path=str(model)))
    assert (what, "is no safetensors file, or only the start of one" in says) == ("model", True)


def test_a_network_of_another_class(run_yaml: Callable[..., Path], model: Path) -> None:
    config = json.loads((model / "text_encoder_2/config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["CLIPTextModel"]
    (model / "text_encoder_2/config.json").write_text(json.dumps(config), encoding="utf-8")
    assert only("fix", run_yaml(model__path=str(model))) == (
        "model",
        f"{model}: text_encoder_2/ is a CLIPTextModel, T5EncoderModel is needed; copy the model anew",
    )


# --- the style adapter ---

ADAPTER: dict[str, Any] = {"kind": "ip_adapter", "image_encoder": "tiny", "tokens": 4}


def adapter_run(run_yaml: Callable[..., Path], signs: Path, **train: Any) -> Path:
    data = {"format": "self_bench", "path": str(signs / "targets"), "resolution": [32, 64]}
    return run_yaml(model__train={**ADAPTER, **train}, data=data)


def saved_adapter(folder: Path, family: str = "flux_fill", path: str = "tiny", **train: Any) -> Path:
    section = {"family": family, "path": path, "dtype": "fp32", "train": {**ADAPTER, **train}}
    run = parse_run(
        {
            "name": "t",
            "model": section,
            "data": {"format": "self_bench", "path": "x", "resolution": [32, 64]},
            "algorithm": {"name": "sft"},
        }
    )
    model = load_model(run.model)
    trainee = make_trainable(model.network, run.model.train, model.spec)
    trainee.save({n: p for n, p in model.network.named_parameters() if p.requires_grad}, folder)
    return folder / "ip-adapter.safetensors"


def test_an_adapter_that_can_be_trained(run_yaml: Callable[..., Path], signs: Path, tmp_path: Path) -> None:
    path = saved_adapter(tmp_path / "adapter")
    found = {line["what"]: line for line in lines(adapter_run(run_yaml, signs, initial_adapter=str(path)))}
    assert {line["status"] for line in found.values()} == {"ok"}
    assert found["initial adapter"]["says"] == f"{path}: whole, {SIZES}"
    assert found["image encoder"]["says"].endswith("a SiglipVisionModel, its files complete, vectors of width 64")
    assert " frozen weights of the network, " in found["memory"]["says"]  # everything was counted


def test_tensors_of_an_initial_adapter_that_are_not_used(
    run_yaml: Callable[..., Path], signs: Path, tmp_path: Path
) -> None:
    released = tiny_calligrapher(tmp_path / "calligrapher.bin")
    run = adapter_run(run_yaml, signs, initial_adapter=str(released), tokens=128, query_former=True)
    what, says = only("warning", run)
    assert what == "initial adapter"
    assert says.startswith(f"{released}: whole, 128 tokens by mlp+query_former from")
    assert "no parameter for (2), which are not used: " in says and "attn_adapter.0.norm_added_k.weight" in says


SIZES = "4 tokens by mlp from vectors of width 64 for 6 blocks"


def test_an_initial_adapter_that_does_not_fit(run_yaml: Callable[..., Path], signs: Path, tmp_path: Path) -> None:
    path = saved_adapter(tmp_path / "adapter")
    sd = saved_adapter(tmp_path / "sd", "sd_inpaint")
    bin_of_sd = tmp_path / "sd/ip-adapter.bin"  # which does not say whose it is
    former = saved_adapter(tmp_path / "former", query_former=True)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-8])
    less = tmp_path / "less.bin"
    nested = torch.load(path.with_suffix(".bin"), weights_only=True)
    del nested["ip_adapter"]["5.to_k_ip.weight"], nested["ip_adapter"]["5.to_v_ip.weight"]
    torch.save(nested, less)
    start = "model.train.initial_adapter: "
    for train, message in (
        ({"initial_adapter": str(tmp_path / "nowhere.bin")}, f"{start}{tmp_path}/nowhere.bin: no such adapter file"),
        ({"initial_adapter": str(cut)}, f"{start}{cut}: damaged"),
        ({"initial_adapter": str(sd)}, f"{start}{sd} is of sd_inpaint, but model.family is flux_fill"),
        ({"initial_adapter": str(bin_of_sd)}, f"{start}{bin_of_sd} has 4 tokens by linear from"),
        ({"initial_adapter": str(former)}, f"{start}{former} has {SIZES.replace('mlp', 'mlp+query_former')}; set"),
        ({"initial_adapter": str(path), "tokens": 8}, f"{start}{path} has {SIZES}; set model.train.tokens=4"),
        ({"initial_adapter": str(less)}, f"{start}{less} has 4 tokens by mlp from vectors of width 64 for 5 blocks of"),
    ):
        what, says = only("fix", adapter_run(run_yaml, signs, **train))
        assert (what, says[: len(message)]) == ("initial adapter", message)


def test_an_initial_lora(run_yaml: Callable[..., Path], tmp_path: Path) -> None:
    network = FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer")
    add_lora(network, 4, 8.0, FluxFillModel.spec.lora_targets)
    state = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    LoraWeights(4, 8.0, "transformer").save(state, tmp_path / "lora")
    given = {"kind": "lora", "rank": 4, "alpha": 8, "initial_adapter": str(tmp_path / "lora")}
    found = {line["what"]: line for line in lines(run_yaml(model__train=given))}
    assert found["initial adapter"]["says"] == f"{tmp_path}/lora/{FILE}: a LoRA"
    for train, message in (
        ({**given, "initial_adapter": str(tmp_path / "nowhere")}, "model.train.initial_adapter: given"),
        ({**given, "rank": 2}, "model.train: given rank 2 and alpha 8, but"),
    ):
        what, says = only("fix", run_yaml(model__train=train))
        assert (what, says[: len(message)]) == ("initial adapter", message)


def test_the_file_of_a_distillation_lora(tmp_path: Path) -> None:
    (tmp_path / "few.safetensors").touch()

    def line(path: str, **options: str) -> Line:
        [found] = distillation_lines(QwenImageModel(distillation_lora=DistillationLora(path=path, **options)))
        return found

    assert not list(distillation_lines(QwenImageModel()))
    for here in (line(f"{tmp_path}/few.safetensors"), line(str(tmp_path), weight_name="few.safetensors")):
        assert (here.status, here.says) == ("ok", f"{tmp_path}/few.safetensors")
    for away in (line(f"{tmp_path}/other.safetensors"), line(str(tmp_path), weight_name="other.safetensors")):
        assert away.status == "fix" and f"{tmp_path}/other.safetensors: no such file" in away.says
    assert line("owner/loras", weight_name="a.safetensors").says == (
        "owner/loras is a hub id; the run downloads a.safetensors"
    )


def test_an_image_encoder_that_cannot_be_used(run_yaml: Callable[..., Path], signs: Path, tmp_path: Path) -> None:
    start = "model.train.image_encoder: "

    def fault(folder: Path) -> str:
        found = {line["what"]: line for line in lines(adapter_run(run_yaml, signs, image_encoder=str(folder)))}
        assert {what for what, line in found.items() if line["status"] == "fix"} == {"image encoder"}
        return found["image encoder"]["says"]

    assert fault(tmp_path / "nowhere/at/all") == (
        f"{start}{tmp_path}/nowhere/at/all: no such folder; give a folder or a hub id"
    )
    assert fault(tiny_path("flux_fill") / "text_encoder_2") == (
        f"{start}{tiny_path('flux_fill')}/text_encoder_2 is a t5 model; give a SigLIP or a CLIP; copy it anew, or set "
        "another"
    )
    folder = Path(shutil.copytree(TINY, tmp_path / "encoder"))
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    name = sorted(tensors)[0]
    save_file({k: t for k, t in tensors.items() if k != name}, weights)
    assert "among its weights; copy it anew" in fault(folder)
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "bytes, " in fault(folder) and "are expected; copy it anew" in fault(folder)
    weights.unlink()
    assert fault(folder) == f"{start}encoder/ has no model.safetensors; copy it anew, or set another"
    found = {line["what"]: line for line in lines(adapter_run(run_yaml, signs, image_encoder="some/encoder"))}
    assert found["image encoder"]["status"] == "warning"
    assert found["memory"]["says"] == "not counted: the config of the image encoder some/encoder is not known"


# --- data ---


def test_data_that_is_not_there_or_broken(run_yaml: Callable[..., Path], signs: Path, tmp_path: Path) -> None:
    what, says = only("fix", run_yaml(warmup_data__path="nowhere"))
    assert (what, "nowhere" in says) == ("warmup_data", True)
    broken = Path(shutil.copytree(signs / "prompts", tmp_path / "broken"))
    next(broken.glob("*_mask.png")).write_bytes(b"not a picture")
    what, says = only("warning", run_yaml(data__path=str(broken)))
    assert (what, says) == (
        "data",
        f"{broken}: 7 items, 1 more are broken and left out; `retouch data validate` lists them",
    )
    what, says = only("fix", run_yaml(data__path=str(broken), data__max_bad_items=0))
    assert (what, says.startswith("data: 1 of 8 items are broken, more than max_bad_items 0")) == ("data", True)


def test_too_few_examples_or_none_with_a_target(run_yaml: Callable[..., Path], signs: Path) -> None:
    what, says = only("fix", run_yaml(rollout__global_groups_per_batch=9))
    assert (what, "an epoch takes 9 different examples" in says) == ("examples", True)
    section = {"format": "self_bench", "path": str(signs / "prompts"), "resolution": [32, 64], "target": "none"}
    what, says = only("fix", run_yaml(warmup_data=section, algorithm__sft_steps=1))
    assert (what, "no target image, which supervised steps need" in says) == ("examples", True)


def test_no_held_out_examples_is_a_warning(run_yaml: Callable[..., Path]) -> None:
    what, says = only("warning", run_yaml(evaluation__data=None))
    assert (what, says) == (
        "evaluation.data",
        "none: the run evaluates on training examples; set evaluation.data",
    )


def test_a_directory_that_holds_a_run(run_yaml: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "runs/t").mkdir(parents=True)
    (tmp_path / "runs/t/metrics.jsonl").write_text("{}\n", encoding="utf-8")
    what, says = only("fix", run_yaml())
    assert (what, "already holds a run; continue it with resume=auto" in says) == ("run directory", True)
    assert only("fix", run_yaml(), "resume=nowhere")[0] == "run directory"

    def auto() -> str:
        [line] = [line for line in lines(run_yaml(), "resume=auto") if line["what"] == "run directory"]
        return f"{line['status']}: {line['says'].partition(': ')[2]}"

    assert auto() == "ok: holds no checkpoint; the run starts from step 0"
    (tmp_path / "runs/t/checkpoints/step-000001").mkdir(parents=True)
    (tmp_path / "runs/t/checkpoints/step-000001/complete.json").write_text("{}", encoding="utf-8")
    assert auto() == "ok: resumes (resume=auto)"


# --- rewards ---


class Failing(Brightness):
    def one(self, item: RewardItem) -> Outcome:
        return Failure("bad_item", "no")


def test_a_judge_may_take_the_time_of_its_first_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which was longer than doctor waited; a server reports at once."""
    waited: list[float] = []

    class Table:
        def __init__(self, *_: Any) -> None: ...

        def start(self) -> None: ...

        def close(self) -> None: ...

        def wait_ready(self, timeout_s: float) -> list[str]:
            waited.append(timeout_s)
            return ["still loading"]

    monkeypatch.setattr("retouch.doctor.rewards.RewardTable", Table)
    for entry in (PairwiseReward(model="m", timeout_s=1800.0), SeamReward(), SeamReward(url="http://127.0.0.1:1")):
        assert "still loading" in str(_problem("r", entry, RewardClientConfig(), []))
    assert waited[0] > 1800 and waited[1:] == [120.0, 5.0]


def test_reward_servers(run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that scores, one that is down, one with other rewards, and one that is ready and cannot score."""
    monkeypatch.setattr("retouch.doctor.rewards._SERVER_S", 2.0)
    with serving({"preservation": Brightness()}) as url:
        assert {line["status"] for line in lines(run_yaml(rewards={"preservation": {"url": url}}))} == {"ok"}
    url = f"http://127.0.0.1:{closed_port()}"
    what, says = only("fix", run_yaml(rewards={"preservation": {"url": url}}))
    assert what == "reward preservation"
    assert says.startswith(f"{url}: ConnectError")
    assert says.endswith("start the server with `retouch reward serve preservation`, or set rewards.preservation.url")
    table = {"preservation": {}, "ocr": {"url": url, "weight": 0}}
    assert only("warning", run_yaml(rewards=table))[0] == "reward ocr"  # it is only logged
    table = {"preservation": {}, "seam": {"weight": 0, "gradient_weight": 1}}
    nft = {"algorithm": {"name": "nft"}, "rollout__window": None, "rollout__noise_level": None}
    with monkeypatch.context() as patch:
        patch.setattr("retouch.doctor.rewards._problem", lambda name, *_: "broken" if name == "seam" else None)
        assert only("fix", run_yaml(rewards=table, **nft)) == ("reward seam", "broken")
    with serving({"other": Brightness()}) as url:
        what, says = only("fix", run_yaml(rewards={"preservation": {"url": url}}))
        assert (what, "has no reward preservation; it has: other" in says) == ("reward preservation", True)
    with serving({"preservation": Failing()}) as url:
        what, says = only("fix", run_yaml(rewards={"preservation": {"url": url}}))
        assert (what, says == "ready, but it did not score an image: bad_item: no") == ("reward preservation", True)


def test_a_reward_that_compares_a_group_scores_two_images(
    run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with OpenAIServer() as server:
        entry = {"model": "judge", "address": server.url, "task": "fill"}
        file = run_yaml(rewards={"pairwise": entry, "seam": {}})
        outcome = retouch("doctor", file, "--json")
        told = {line["what"]: (line["status"], line["says"]) for line in json.loads(outcome.out)}
    assert told["reward pairwise"] == ("ok", "in this process: ready, and scored two images of a group")
    assert "reward serve" not in _remedy("pairwise", PairwiseReward.model_validate(entry))  # which refuses it
    assert told["reward seam"] == ("ok", "in this process: ready, and scored an image")


def test_a_reward_function_reads_the_metadata_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And tasks of both halves share images, but no image with its instruction."""
    for half, count, seed in (("train", 256, 1), ("held_out", 96, 2)):
        write_edits(tmp_path / half, count, half, seed)
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    file = Path(__file__).parents[2] / "configs/tiny/qwen_image_edit_vlm_grpo.yaml"
    found = [line for line in lines(file, f"logging.dir={tmp_path}") if line["status"] == "fix"]
    assert found == []


def test_a_decode_with_gradient_is_counted_as_often_as_asked(run_yaml: Callable[..., Path]) -> None:
    """For the memory, then for the disk: counting leaves the networks as they are."""
    options = {"rollout__window": None, "rollout__noise_level": None}
    run = load_run(run_yaml(algorithm={"name": "reward_gradient"}, rewards={"seam": {}}, **options))
    networks = build_networks(run.model, find_model(run.model))
    first, second = (count_weights(run, networks) for _ in range(2))
    assert first is not None and first == second and first.decoder > 0


@pytest.mark.full
def test_the_reward_that_a_run_starts_by_itself(run_yaml: Callable[..., Path]) -> None:
    [line] = [
        line for line in lines(run_yaml(rewards={"preservation": {"url": "auto"}})) if line["what"].startswith("reward")
    ]
    assert (line["status"], line["says"]) == ("ok", "auto: ready, and scored an image")


def test_rewards_of_what_was_said_score_the_doctors_picture() -> None:
    """They ask for metadata that only runs of vlm_grpo have; a graph for MMMG is there, too."""
    for name in ("think_format", "completion_quality"):
        scorer = make_scorer(name)
        assert all(isinstance(outcome, Score) for outcome in score_checked(scorer, golden_items()))
    assert read_graph(golden_items()[0].metadata["knowledge_graph"]).skipped == ()


def test_a_scorer_that_cannot_be_loaded(run_yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    what, says = only("fix", run_yaml(rewards={"ocr": {}}))
    assert what == "reward ocr"
    assert "rapidocr" in says


# --- usage ---


@pytest.mark.parametrize(
    "arguments",
    [["nowhere.yaml"], ["RUN", "--world-size", "0"], ["RUN", "rollout.group_sise=4"], ["--no-such-option"]],
    ids=str,
)
def test_wrong_usage(arguments: list[str], run_yaml: Callable[..., Path]) -> None:
    outcome = retouch("doctor", *[run_yaml() if word == "RUN" else word for word in arguments])
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")


def test_without_torch_it_says_so_and_goes_on(run_yaml: Callable[..., Path]) -> None:
    """Where only the base is installed."""
    script = f"""
import importlib.metadata, sys
for name in ("torch", "diffusers", "transformers", "accelerate", "peft"):
    sys.modules[name] = None
version = importlib.metadata.version
def gone(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = gone
import importlib.util
importlib.util.find_spec = lambda name: None
from retouch.cli import main
sys.argv = ["retouch", "doctor", {str(run_yaml())!r}, "--json"]
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    found = {line["what"]: line for line in json.loads(done.stdout)}
    assert [what for what, line in found.items() if line["status"] == "fix"] == ["extra train"]
    assert found["extra train"]["says"] == 'torch is not installed: pip install -U "retouch[train]"'
    assert found["model"]["says"] == "not looked at: that needs the train extra"
    assert found["reward preservation"]["status"] == "ok"
