"""What a run costs: forms by hand, measured rates, judges, and what is not known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tools import cost_table

from retouch.config import ConfigError, RunConfig, derive
from retouch.config.cost import MEASURED, Cost, Forwards, cost, cost_lines, details_of, evaluations, known_peak
from retouch.doctor.memory import count_released
from retouch.families import FAMILIES
from retouch.families.flux2_klein.spec import RELEASED as KLEIN
from retouch.observe import log
from retouch.rewards.base import Question, tiled_tokens
from retouch.rewards.scorers.reading import SECONDS_A_PAGE
from tests.command_line import retouch
from tests.selection import default

from .conftest import REPOSITORY, TINY

Run = Callable[..., RunConfig]

OPENAI = "rewards.complex_edit.address=https://api.openai.com/v1"
GPT_4O = ["rewards.complex_edit.model=gpt-4o-2024-11-20", "rewards.complex_edit.price_in=2.5", OPENAI]
JUDGE = [*GPT_4O, "rewards.complex_edit.price_out=10", "rewards.complex_edit.samples=3"]
EVALUATED = ["evaluation.num_examples=64", "evaluation.images_per_example=1"]
TWO_STEPS = "optimizer.gradient_accumulation=32"


def of_file(name: str, *overrides: str) -> Cost:
    """A published file on eight GPUs, with these values in place of its own."""
    run = cost_table.read(REPOSITORY / f"configs/{name}.yaml", [*EVALUATED, *overrides])
    return cost(run, world_size=8)


D = 3072
"""Width of FLUX.1 and Qwen-Image."""


def test_the_edit_model_by_hand() -> None:
    """GRPO of Qwen-Image-Edit-2511 at 512 x 512: 1,024 tokens each of image and source, 14 x 14 of the source in the
    text encoder, and a prompt of 64."""
    known = of_file(
        "qwen_image_edit_2511_grpo", *JUDGE, TWO_STEPS, "training.max_steps=10000", "training.eval_every=100"
    )
    assert (known.images_per_epoch, known.images) == (512, 2_560_000)
    # 12 steps and 3 old log-probabilities, each guided; 3 trained steps forward, backward through a frozen network
    # and again
    assert known.forwards == Forwards(2 * 12, 2 * 3, 2 * 3 * 3)
    tokens = 2 * 1024 + 14 * 14 + 64
    blocks = 60 * (24 * D * D * tokens + 4 * D * tokens**2 + 24 * D * D)
    ends = 2 * D * (64 * 2048 + 3584 * 260 + 64 * 2048) + 4 * D * D + 2 * 256 * D + 2 * D * D
    assert known.tflop_per_forward == pytest.approx((blocks + ends) / 1e12)
    assert known.tflop_per_forward == pytest.approx(35.31, abs=0.01)
    evaluated = 101 * 64  # at 0, 100, ... 10,000
    assert known.evaluation_images == evaluated
    forwards = 2_560_000 * 48 + evaluated * 2 * 40
    assert known.gpu_hours == pytest.approx(forwards * 35.313 / 152 / 3600, rel=1e-4)
    assert known.gpu_hours == pytest.approx(7963, abs=1)
    judged = known.judges["complex_edit"]
    assert judged.requests == (2_560_000 + evaluated) * 3 * 2
    # an image is 255 tokens; two images and 260 of text, one image and 140 of text, three times
    assert judged.tokens_in / judged.requests == pytest.approx((2 * 255 + 260 + 255 + 140) / 2)
    assert judged.dollars == pytest.approx(2_566_464 * (3495 * 2.5 + 480 * 10) / 1e6)
    assert judged.dollars == pytest.approx(34_744, abs=1)


def test_its_nft_by_hand() -> None:
    known = of_file(
        "qwen_image_edit_2511_nft", *JUDGE, TWO_STEPS, "training.max_steps=10000", "training.eval_every=100",
        "algorithm.old_policy=ramp_half", "algorithm.timesteps_per_image=2", "algorithm.kl_weight=2e-4",
        "rollout.num_steps=30",
    )  # fmt: skip
    # two noised copies: under the old policy and the reference; forward, backward and again
    assert known.forwards == Forwards(30, 2 * 2, 2 * 3)
    hours = (2_560_000 * 40 + 6464 * 40) * 35.313 / 152 / 3600
    assert known.gpu_hours == pytest.approx(hours, rel=1e-4)
    assert known.gpu_hours == pytest.approx(6624, abs=1)


def test_flux_2_by_hand() -> None:
    """DiffusionNFT of FLUX.2 [dev] at 512 x 512: 1,024 tokens of the image, 512 of the prompt; 8 double and 48 single
    blocks of width 6,144 with a gated MLP of 3 times the width."""
    known = of_file(
        "flux2_dev_nft", "training.max_steps=1000", "training.eval_every=20", "algorithm.kl_weight=0",
        "optimizer.gradient_accumulation=96",
    )  # fmt: skip
    wide = 6144
    blocks = 56 * (26 * wide * wide * 1536 + 4 * wide * 1536**2)
    modulations = 2 * wide * (6 + 6 + 3) * wide
    ends = 2 * wide * (128 * 1024 + 15360 * 512 + 128 * 1024) + 4 * wide * wide + 2 * (2 * 256 * wide + 2 * wide * wide)
    assert known.tflop_per_forward == pytest.approx((blocks + modulations + ends) / 1e12)
    assert known.tflop_per_forward == pytest.approx(87.8, abs=0.1)
    assert known.images == 768_000
    assert known.forwards == Forwards(8, 2, 2 * 3)
    hours = (768_000 * 16 + 51 * 64 * 28) * known.tflop_per_forward / (0.2 * 989) / 3600
    assert known.gpu_hours == pytest.approx(hours, rel=1e-6)
    assert (known.gpu_hours, known.measured) == (pytest.approx(1526, abs=3), False)


def test_kontext_by_hand() -> None:
    """DiffusionNFT of FLUX.1-Kontext at 512 x 512: 1,024 tokens each of image and source, 512 of the prompt."""
    known = of_file(
        "flux_kontext_nft", *JUDGE, TWO_STEPS, "training.max_steps=5000", "training.eval_every=60",
        "algorithm.old_policy=ramp_half", "algorithm.timesteps_per_image=2", "algorithm.kl_weight=1e-3",
        "rollout.num_steps=20",
    )  # fmt: skip
    blocks = 57 * (24 * D * D * 2560 + 4 * D * 2560**2)
    modulations = 19 * 24 * D * D + 38 * 6 * D * D
    ends = 2 * D * (64 * 2048 + 4096 * 512 + 64 * 2048) + 4 * D * D
    vectors = 2 * D * (256 + 256 + 768) + 3 * 2 * D * D
    assert known.tflop_per_forward == pytest.approx((blocks + modulations + ends + vectors) / 1e12)
    assert known.tflop_per_forward == pytest.approx(37.66, abs=0.02)
    assert (known.images, known.forwards) == (1_280_000, Forwards(20, 4, 6))
    hours = (1_280_000 * 30 + 85 * 64 * 28) * 37.66 / 266 / 3600
    assert known.gpu_hours == pytest.approx(hours, rel=1e-3)


def test_rates_are_those_measured() -> None:
    """The mean of the rows that recompute nothing."""
    measured = json.loads((REPOSITORY / "benchmarks/results/gpu.json").read_text(encoding="utf-8"))
    assert (measured["machine"]["gpu"], measured["side"]) == ("NVIDIA H200", 512)
    for network, family in (
        ("FluxTransformer2DModel", "flux_fill"),
        ("QwenImageTransformer2DModel", "qwen_image"),
        ("UNet2DConditionModel", "sd_inpaint"),
    ):
        whole = [row for row in measured["rows"] if row["case"].startswith(family) and "tflops" in row]
        rates = [row["tflops"] for row in whole if not row["settings"]["gradient_checkpointing"]]
        assert MEASURED[network] == pytest.approx(fmean(rates), abs=0.5)


def test_another_gpu_has_the_same_share_of_its_peak(run_with: Run) -> None:
    run = run_with("model.path=somewhere", "data.resolution=512")
    given = cost(run)
    assert (given.measured, given.tflops) == (True, 266)
    for gpu, rate in (("h100", 266), ("NVIDIA H100 PCIe", 266 * 756 / 989), ("4090", 266 * 165 / 989)):
        other = cost(run, gpu=gpu)
        assert (other.measured, other.tflops) == (False, pytest.approx(rate))
        assert given.gpu_hours is not None
        assert other.gpu_hours == pytest.approx(given.gpu_hours * 266 / rate)
    assert not cost(run_with("model.path=somewhere", "data.resolution=256")).measured
    with pytest.raises(ConfigError, match="--gpu: given 'gtx 1080'; expected a GPU whose peak is known: H100"):
        cost(run, gpu="gtx 1080")


@pytest.mark.parametrize(
    "path", default(cost_table.files(), cost_table.files()[::9].__contains__), ids=lambda path: path.stem
)
def test_parts_of_an_image_are_the_forwards_that_check_prints(path: object) -> None:
    """Of which every backward counts as two."""
    run = cost_table.read(path)  # type: ignore[arg-type]
    if run.algorithm.trains_text_encoder or not run.algorithm.trains_on_rewards:
        pytest.skip("another count")
    f = cost(run, 8).forwards
    own = 1 + (2 if run.model.train.kind == "full" else 1) + run.training.gradient_checkpointing
    printed = 3 + run.training.gradient_checkpointing
    assert f.sampling + f.ratios + f.training * printed / own == pytest.approx(derive(run, 8).forwards_per_image)


def test_the_last_epoch_is_sampled_whole(run_with: Run) -> None:
    """By rewards and judges, too; its samples are trained on by the steps that are left."""
    given = ["model.path=somewhere", "algorithm.inner_epochs=2", "training.eval_every=0"]
    n = derive(run_with(*given)).optimizer_steps_per_epoch
    one, begun, two = (cost(run_with(*given, f"training.max_steps={steps}")) for steps in (n, n + 1, 2 * n))
    assert [each.images / each.images_per_epoch for each in (one, begun, two)] == [1, 2, 2]
    hours = [each.gpu_hours or 0 for each in (one, begun, two)]
    left = two.forwards.training / two.forwards.all * (n - 1) / n
    assert n > 1 and (hours[2] - hours[1]) / (hours[2] - hours[0]) == pytest.approx(left)


def test_given_pairs_and_rows_are_counted(run_with: Run) -> None:
    manifest = ["data.format=manifest", "model.path=somewhere", "training.max_steps=10", "rewards={}"]
    sft = cost(run_with(*manifest, "algorithm.name=sft"), world_size=2)
    assert (sft.images, sft.supervised_rows) == (0, 10 * 4 * 2)
    pairs = cost(run_with(*manifest, "algorithm.name=dpo", "algorithm.pairs=offline"), world_size=2)
    assert (pairs.images, pairs.supervised_rows) == (0, 2 * 10 * 4 * 2)  # two images a pair


def test_the_size_beside_the_flops_is_that_of_the_network(run_with: Run) -> None:
    """With the strip of an in-context reference, which the network reads above the image."""
    run = run_with("model.path=black-forest-labs/FLUX.1-Fill-dev", "data.resolution=512", "data.reference_strip=288")
    assert dict(details_of(run, cost(run)))["TFLOP"].endswith(" a forward at 800 x 512")


def test_evaluations(run_with: Run) -> None:
    """At the start and the end; between them every so many steps, and at the end of a warm-up."""
    for overrides, count in (
        (["training.eval_every=0"], 2),
        (["training.eval_every=3"], 5),
        (["training.eval_every=5"], 3),
        (["training.eval_every=5", "algorithm.sft_steps=5"], 3),
        (["training.eval_every=5", "algorithm.sft_steps=4"], 4),
    ):
        assert evaluations(run_with("training.max_steps=10", *overrides)) == count


def test_questions_of_a_pair(run_with: Run) -> None:
    """K (K - 1) of a group, or 2 K a round; the source is a third image."""
    judge = "rewards={pairwise: {model: m, address: 'http://127.0.0.1:1/v1', task: edit}}"
    batch = ["rollout.group_size=6", "rollout.batch_size_per_device=6", "rollout.global_groups_per_batch=2"]
    (asked,) = run_with(judge, *batch).rewards["pairwise"].questions(6)
    assert (asked.number, asked.images) == (5, 3)
    (asked,) = run_with(judge, *batch, "rewards.pairwise.rounds=1").rewards["pairwise"].questions(6)
    assert asked.number == 2


def test_a_gold_judge_is_asked_in_evaluations(run_with: Run) -> None:
    gold = "rewards={ocr: {}, openai_judge: {model: auto, role: gold}}"
    run = run_with("model.path=somewhere", "training.max_steps=100", "evaluation.num_examples=5", gold)
    assert cost(run).judges["openai_judge"].requests == evaluations(run) * 5


@pytest.mark.parametrize(("size", "tokens"), [((512, 512), 255), ((1024, 1024), 765), ((2048, 4096), 1105)])
def test_tokens_of_an_image_at_openai(size: tuple[int, int], tokens: int) -> None:
    assert tiled_tokens(size) == tokens
    assert Question(images=2, text=10, tiled=True).tokens_in(size) == 2 * tokens + 10


def test_prices(run_with: Run) -> None:
    """Given ones; those of OpenAI's default model; nothing on this machine; else not known."""
    for options, prices in (
        ("model: auto", (2.5, 10.0)),
        ("model: gpt-5", None),
        ("model: auto, price_in: 1, price_out: 2", (1.0, 2.0)),
        ("model: auto, address: 'http://127.0.0.1:8001/v1'", (0.0, 0.0)),
        ("model: auto, address: 'http://judge:8001/v1'", None),
    ):
        run = run_with(f"rewards={{openai_judge: {{{options}}}}}")
        assert run.rewards["openai_judge"].prices() == prices
        assert (cost(run).dollars is None) == (prices is None)


def test_replicas_are_as_many_as_are_done_while_an_epoch_is_sampled(run_with: Run) -> None:
    run = run_with("model.path=somewhere", "data.resolution=512", "rewards.ocr.url=auto")
    known = cost(run, world_size=8)
    assert known.rollout_seconds is not None
    assert known.scored["ocr"].seconds == pytest.approx(64 * SECONDS_A_PAGE)
    assert known.scored["ocr"].needed == known.replicas
    assert (known.replicas - 1) * known.rollout_seconds < 64 * SECONDS_A_PAGE <= known.replicas * known.rollout_seconds
    assert f"{known.replicas} replicas would not be waited for" in "\n".join(cost_lines(run, known))


def test_questions_at_once_that_a_run_would_not_wait_for(run_with: Run) -> None:
    """64 images of one question each, 3 s a question; they are no servers to start."""
    judge = "rewards={openai_judge: {model: auto, concurrency: 3}}"
    run = run_with("model.path=somewhere", "data.resolution=512", judge)
    known = cost(run, world_size=2)
    assert known.rollout_seconds is not None and known.epoch_seconds is not None
    (one,) = known.scored.values()
    assert (one.seconds, one.instances) == (pytest.approx(64 * 3 / (2 * 3)), 6)
    assert one.needed == math.ceil(64 * 3 / known.rollout_seconds) > 6
    assert known.replicas == 1
    assert f"{one.needed} questions at once would not be waited for" in "\n".join(cost_lines(run, known))


def test_a_toy_model_says_what_is_not_known() -> None:
    printed = json.loads(retouch("check", TINY, "--json").out)["cost"]
    assert printed["images_per_epoch"] == 96
    assert printed["gpu_hours"] is None and printed["replicas"] == 1
    lines = retouch("check", TINY).out.splitlines()
    assert any(line.startswith("  not known      FLOPs and GPU hours: tiny has not the sizes") for line in lines)


def test_groups_that_are_sampled_again_are_not_known(run_with: Run) -> None:
    def told(rounds: int) -> str:
        return " ".join(cost(run_with(f"algorithm={{name: grpo, resample_rounds: {rounds}}}")).unknown)

    assert "algorithm.resample_rounds" in told(1) and "algorithm.resample_rounds" not in told(0)


@pytest.mark.parametrize("gpu", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "A4090"])
def test_a_smaller_gpu_of_the_same_number_is_unknown(gpu: str) -> None:
    assert known_peak("NVIDIA GeForce RTX 4090") == known_peak("4090") == known_peak("RTX4090") is not None
    assert known_peak(gpu) is None


def test_a_text_encoder_that_is_trained() -> None:
    """A step of 8 processes has 16 completions with an image each."""
    known = of_file("qwen_image_edit_vlm_grpo_8gpu", "training.max_steps=2000", "algorithm.trl.num_iterations=1")
    assert (known.images_per_epoch, known.images) == (16, 32_000)
    assert known.forwards.sampling == 100
    assert "text encoder" in " ".join(known.unknown)
    assert known.judges["complex_edit"].requests > 32_000


def test_the_cost_that_a_run_logs(
    run_with: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the GPUs of the machine; a fault of the count does not end the run."""
    run = run_with("model.path=somewhere", "data.resolution=512")
    monkeypatch.setattr(log, "nvidia_smi", lambda: ["NVIDIA A100-SXM4-80GB"])
    with caplog.at_level("INFO", logger="retouch"):
        log.log_cost(run, 4)
        assert "on NVIDIA A100-SXM4-80GB at 84 TFLOP/s (derived)" in caplog.text and "s on 4 GPUs" in caplog.text
        monkeypatch.setattr(log, "cost", lambda *given: 1 / 0)
        log.log_cost(run, 4)
    assert "cost of the run: not measured from here on (ZeroDivisionError" in caplog.text


def test_sizes_of_a_local_folder_are_claimed_only_if_its_config_has_them(run_with: Run, tmp_path: Path) -> None:
    """A shallow copy of FLUX had checkpoints of 133 GiB."""
    released = cost(run_with("model.path=somewhere"))
    assert released.checkpoint_bytes and released.tflop_per_forward
    config = FAMILIES["flux_fill"].spec.released["transformer"]
    (tmp_path / "transformer").mkdir()
    null = {**config, "out_channels": None}  # the default of the class
    for sizes, known in ((config, True), (null, True), ({**config, "num_layers": 1}, False), (None, False)):
        file = tmp_path / "transformer" / "config.json"
        file.unlink(missing_ok=True)
        if sizes is not None:
            file.write_text(json.dumps(dict(sizes)), encoding="utf-8")
        for path in (f"model.path={tmp_path}", f"model.transformer={{path: {tmp_path}, subfolder: transformer}}"):
            found = cost(run_with("model.path=somewhere", path))
            assert (found.checkpoint_bytes == released.checkpoint_bytes) is known
            assert (found.tflop_per_forward is None) is not known


def test_a_fine_tune_on_the_hub_is_counted_by_its_config_or_named(
    run_with: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config in the hub's cache, if it was downloaded: a pruned FLUX had the cost of a whole one."""
    released = FAMILIES["flux_fill"].spec.hub_ids[0]
    config, named = (
        FAMILIES["flux_fill"].spec.released["transformer"],
        f"whether some/model has the sizes of {released}",
    )
    file = tmp_path / "config.json"
    for sizes, known, told in ((None, True, True), (config, True, False), ({**config, "num_layers": 1}, False, False)):
        if sizes is not None:
            file.write_text(json.dumps(dict(sizes)), encoding="utf-8")
        asked: list[tuple[str, str]] = []

        def cached(hub_id: str, name: str, here: bool = sizes is not None, asked: list[Any] = asked) -> str | None:
            asked.append((hub_id, name))
            return str(file) if here else None

        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
        for path in ("model.path=some/model", "model.transformer={path: some/model, subfolder: transformer}"):
            run = run_with(f"model.path={released}", path)
            found = cost(run)
            assert (found.gpu_hours is not None and found.checkpoint_bytes is not None) is known
            assert ("not known" in "\n".join(line for line in cost_lines(run, found) if named in line)) is told
        assert set(asked) == {("some/model", "transformer/config.json")}
    asked.clear()
    assert not any("whether" in why for why in cost(run_with(f"model.path={released}")).unknown) and not asked


def test_a_download_is_offered_of_a_hub_id_alone(
    run_with: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a folder that is missing; and a folder comes before the released model of its name."""
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    for path, is_offered in (("some/model", True), (str(tmp_path / "missing"), False)):
        told = run_with(f"model.path={path}").model.assumed_sizes
        assert told is not None and told.endswith("downloads it") is is_offered
    spec = FAMILIES["flux_fill"].spec
    folder = tmp_path / spec.hub_ids[0] / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**spec.released["transformer"], "num_layers": 1}))
    monkeypatch.chdir(tmp_path)
    run = run_with(f"model.path={spec.hub_ids[0]}")
    assert not run.model.has_released_sizes
    (folder / "config.json").write_text(json.dumps(dict(spec.released["transformer"])))
    assert run.model.has_released_sizes and count_released(run) is None  # its other networks may have other sizes
    sizes = {"flux2_klein": {"path": KLEIN["base"][1]}, "sd3": {"path": "a/folder", "variant": "large"}}
    for family, section in sizes.items():  # of the smaller model, with the name of the larger one
        model = {"family": family, **section}
        assert not FAMILIES[family].model_validate(model).has_released_sizes
        inside = tmp_path / section["path"] / "transformer"
        inside.mkdir(parents=True)
        (inside / "config.json").write_text(json.dumps(dict(FAMILIES[family].spec.released["transformer"])))
        assert FAMILIES[family].model_validate(model).has_released_sizes
