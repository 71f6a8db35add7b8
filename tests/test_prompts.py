"""Prompts that are cut are counted as the text encoders count them, for every family and in every command that encodes,
and an item whose text no encoder reads is a bad item."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from retouch.algorithms.vlm_grpo.responses import chat_messages, tokenize, tokenizer_of
from retouch.algorithms.vlm_grpo.run import load_policy
from retouch.config import RunConfig, parse_run
from retouch.config.load import load_run
from retouch.data.base import DataError, ItemFiles
from retouch.data.buckets import Buckets
from retouch.families import FAMILIES
from retouch.families.diffusion import FamilyModel
from retouch.families.loading import component_path, family_class
from retouch.families.prompts import PromptCheck
from retouch.families.qwen.text import Shown, prefix_length
from retouch.families.text import TextEncoder
from retouch.families.tiny import tiny_pipeline
from retouch.use import items
from retouch.use.items import SampleRequest, items_to_sample
from tests.command_line import Outcome, retouch
from tests.tiny_models import tiny_model

SIZE = (32, 64)
BLANK = Image.new("RGB", (SIZE[1], SIZE[0]))
COUNTS = ("text_mask", "text_length", "text_kinds")
"""Outputs that depend on the number of tokens alone."""

every_family = pytest.mark.parametrize("family", list(FAMILIES))


@cache
def tiny(family: str) -> FamilyModel:
    """A family's model with random weights; tests do not change it."""
    return family_class(family).from_pipeline(tiny_pipeline(family, seed=3))


def images_of(model: Any) -> tuple[int, ...]:
    """Tokens of the images that a text encoder always reads with a prompt."""
    tokens = model.vision_tokens(SIZE)
    return (tokens,) if tokens and "source" in model.needs else ()


def room(reader: Any, images: tuple[int, ...], *, closed: bool) -> int:
    """Letters of a prompt that a reader reads; every letter is a token."""
    return reader.length - (reader.count("x", images, closed=closed) - 1)


@every_family
def test_what_is_counted_is_what_the_encoder_reads(family: str) -> None:
    """A prompt that fits takes as many tokens as there may be, one more letter one more; what stands behind the limit
    changes nothing in the output of the encoder, and the last letter before it does."""
    model = tiny(family)
    images = images_of(model.config)

    def output(encoder: Any, prompt: str) -> torch.Tensor:
        return encoder([Shown.of(prompt, [BLANK]) if images else prompt])

    for name, encoder in model.texts().encoders.items():
        reader: Any = encoder.reader
        whole = "x" * room(reader, images, closed=True)
        for closed in (True, False):  # what is counted with it changes no number
            one, other = (reader.count(prompt, images, closed=closed) for prompt in (whole, "an 'é'"))
            assert reader.counts([whole, "an 'é'", whole], images, closed=closed) == [one, other, one]
        assert reader.count(whole, images) == reader.length == reader.count(whole + "x", images) - 1
        read = "x" * room(reader, images, closed=False)
        assert len(read) >= len(whole)
        one, other = output(encoder, read + "y" * 30), output(encoder, read + "z" * 40)
        assert torch.equal(one, other), name
        if name not in COUNTS:
            assert not torch.equal(one, output(encoder, read[:-1] + "w" + "y" * 30)), name


@every_family
def test_every_encoder_of_a_family_is_counted(family: str) -> None:
    spec = FAMILIES[family].spec
    readers = {encoder.reader.name for encoder in tiny(family).texts().encoders.values()}
    assert readers == {name for name in spec.networks if name.startswith("text_encoder")}


def run_of(family: str, path: object, reward: str = "ocr", **model: Any) -> RunConfig:
    images = {"format": "manifest", "path": "unread", "resolution": list(SIZE)}
    return parse_run(
        {
            "name": "t",
            "model": {"family": family, "path": str(path), "dtype": "fp32", **model},
            "data": {**images, "format": "manifest" if FAMILIES[family].spec.needs else "prompts"},
            "algorithm": {"name": "grpo"},
            "rewards": {reward: {}},
        }
    )


def model_folder(family: str) -> str:
    return component_path(tiny_model(family), family)


@every_family
def test_cut_prompts_are_named_without_weights(family: str, tmp_path: Path) -> None:
    """The number of prompts that each encoder cuts, and every item whose text all of them lose."""
    weights = shutil.ignore_patterns("*.safetensors", "*.bin", "vae", "transformer", "unet")
    folder = Path(shutil.copytree(model_folder(family), tmp_path / "model", ignore=weights))
    run = run_of(family, folder)
    images = images_of(run.model)
    readers = family_class(family).prompt_readers(run.model, str(folder))
    fit = min(room(reader, images, closed=True) for reader in readers.values())
    reach = max(room(reader, images, closed=False) for reader in readers.values())
    source = tmp_path / "source.png" if images else None
    prompts = [
        "x" * fit,
        "x" * (fit + 1),
        "x" * (reach - 4) + "OPEN and more",
        "x" * (reach - 3) + "OPEN and more",
        "x" * (reach + 9) + "SALE",
    ]
    texts = [{}, {}, {"text": "OPEN"}, {"text": "OPEN"}, {"text": "SALE"}]
    items = [ItemFiles(i, p, source, metadata=t) for i, (p, t) in enumerate(zip(prompts, texts, strict=True))]
    warnings, problems = PromptCheck(run, local=True)(run.data, items)
    assert sorted(problems) == [3, 4]
    assert str(problems[3]).startswith("item 3: no text encoder reads the text 'OPEN' in the prompt: it ends at token ")
    expected = {
        name: cut
        for name, reader in readers.items()
        if (cut := sum(reader.count(prompt, images) > reader.length for prompt in prompts))
    }
    assert len(warnings) == len(expected) and max(expected.values()) == 4
    for warning, (name, cut) in zip(warnings, expected.items(), strict=True):
        longest = readers[name].count(prompts[4], images)
        assert warning.startswith(f"{cut} of 5 prompts are longer than the {readers[name].length} tokens that {name} ")
        assert f"the longest takes {longest} (item 4: 'xxx" in warning
    assert PromptCheck(run, local=True)(run.data, items[:1]) == ([], {})


def test_a_prompt_is_counted_with_the_image_in_its_own_shape(tmp_path: Path) -> None:
    """Shapes of one area take different numbers of tokens: a prompt that fits beside the image of its example is not
    cut because another shape takes more. A file that is gone counts as the largest."""
    run = run_of("qwen_image_edit", model_folder("qwen_image_edit"))
    section = run.data.model_copy(update={"resolution": Buckets(pixels=64 * 64, multiple=16, max_aspect=16)})
    tokens = {run.model.vision_tokens(shape): shape for shape in section.sizes}
    least, most = tokens[min(tokens)], tokens[max(tokens)]
    assert least != most
    for shape in (least, most):
        Image.new("RGB", shape[::-1]).save(tmp_path / f"{shape[0]}.png")
    [reader] = family_class("qwen_image_edit").prompt_readers(run.model, model_folder("qwen_image_edit")).values()
    prompt = "x" * room(reader, (min(tokens),), closed=True)
    files = [tmp_path / f"{least[0]}.png", tmp_path / f"{most[0]}.png", tmp_path / "gone.png"]
    items = [ItemFiles(i, prompt, file) for i, file in enumerate(files)]
    check = PromptCheck(run, local=True)
    assert check(section, items[:1]) == ([], {})
    [warning], _ = check(section, items)
    assert warning.startswith("2 of 3 prompts are longer than ")


def test_one_encoder_that_reads_a_text_is_enough() -> None:
    """FLUX.1: CLIP reads 24 tokens of the tiny base, T5 as many as the run file allows."""
    item = ItemFiles(7, "A wooden shop sign over a door; the text on it is 'OPEN'")
    run = run_of("flux_fill", "tiny")
    [warning], problems = PromptCheck(run)(run.data, [item, replace(item, prompt="a sign")])
    assert not problems
    assert warning == (
        "1 of 2 prompts are longer than the 24 tokens that text_encoder reads, and are cut; the longest takes 46 (item "
        "7: \"A wooden shop sign over a door; the text on it is 'OPEN'\"); text_encoder_2 reads them whole"
    )
    short = run_of("flux_fill", "tiny", max_sequence_length=24)
    warnings, problems = PromptCheck(short)(short.data, [item])
    assert [w.rpartition("; ")[2] for w in warnings] == [
        "shorten them",
        "shorten them, or raise model.max_sequence_length",
    ]
    assert str(problems[0]) == (
        "item 7: no text encoder reads the text 'OPEN' in the prompt: it ends at token 45 of text_encoder, which reads "
        "24, and at token 56 of text_encoder_2, which reads 24; put it nearer to the start of the prompt, or raise "
        "model.max_sequence_length"
    )


LONG = "A wooden shop sign over a door; "


@pytest.mark.parametrize(
    ("prompt", "metadata", "lost"),
    [
        (LONG + "'OPEN'", {}, True),
        ("'OPEN' on " + LONG, {}, False),
        ("'OPEN' on " + LONG + "'OPEN'", {}, False),
        ("'OPEN' on " + LONG + "'OPEN'", {"text": "open"}, False),
        (LONG + "OPEN", {"text": "OPEN"}, True),
        (LONG + "GRAND OPENING", {"text": "GRAND\nOPENING"}, True),
        ("'ON' " + LONG + "'OFF'", {"lines": [{"text": "ON"}, {"text": "OFF"}]}, True),
        ("'ON' 'OFF' " + LONG, {"lines": ["ON", "OFF"]}, False),
        (LONG, {"text": "OPEN"}, False),  # the prompt does not name it
        (LONG, {}, False),
        (LONG + "'OPEN'", {"lines": "broken"}, False),
    ],
)
def test_the_text_that_must_be_read(prompt: str, metadata: dict[str, Any], lost: bool) -> None:
    run = run_of("sd_inpaint", "tiny")
    _, problems = PromptCheck(run)(run.data, [ItemFiles(0, prompt, metadata=metadata)])
    assert bool(problems) is lost


@pytest.mark.parametrize(("reward", "lost"), [("ocr", [0, 1, 2]), ("jpeg_size", [1, 2])])
def test_quotes_are_a_text_where_a_reward_reads_one(reward: str, lost: list[int]) -> None:
    """A run without such rewards, which may have begun before prompts were counted, keeps all its items: the order of
    its examples depends on their number. The text of an item is one in any run."""
    own = [{}, {"text": "OPEN"}, {"lines": ["OPEN"]}]
    items = [ItemFiles(i, LONG + "'OPEN'", metadata=metadata) for i, metadata in enumerate(own)]
    run = run_of("sd_inpaint", "tiny", reward)
    [warning], problems = PromptCheck(run)(run.data, items)
    assert warning.startswith("3 of 3 prompts are longer than the ")
    assert list(problems) == lost
    assert all("reads the text 'OPEN' in the prompt" in str(problem) for problem in problems.values())


def test_a_prompt_of_which_nothing_is_read_is_lost() -> None:
    run = run_of("z_image", tiny_model("z_image"), max_sequence_length=4)  # the chat before it takes more
    _, problems = PromptCheck(run)(run.data, [ItemFiles(0, "a sign")])
    assert "no text encoder reads the prompt: it begins at token" in str(problems[0])


def test_several_source_images_leave_less_for_the_prompt(tmp_path: Path) -> None:
    run = run_of("qwen_image_edit", "tiny", max_sequence_length=96)
    item = ItemFiles(0, "x" * 70, tmp_path / "a.png")
    assert PromptCheck(run)(run.data, [item]) == ([], {})
    [warning], _ = PromptCheck(run)(run.data, [replace(item, more_paths=(tmp_path / "b.png",) * 5)])
    assert "1 of 1 prompts are longer than the 96 tokens" in warning
    with_strip = run.data.model_copy(update={"reference_strip": 256})  # the encoder reads it above the source
    [warning], _ = PromptCheck(run)(with_strip, [item])
    assert "1 of 1 prompts are longer than the 96 tokens" in warning


def test_files_of_embeddings_replace_t5(tmp_path: Path) -> None:
    run = run_of("flux_fill", "tiny", max_sequence_length=24)
    item = ItemFiles(0, LONG + "'OPEN'", embedding_path=tmp_path / "t5.pt")
    [warning], problems = PromptCheck(run)(run.data, [item])
    assert "24 tokens that text_encoder reads" in warning and not problems
    [warning], problems = PromptCheck(run)(run.data, [item, ItemFiles(1, "a sign")])
    assert "1 of 2 prompts are longer than the 24 tokens that text_encoder reads" in warning and not problems


def test_a_negative_prompt_is_counted() -> None:
    options: dict[str, Any] = {"max_sequence_length": 24, "true_guidance_scale": 2.0, "negative_prompt": LONG}
    warnings = PromptCheck(run_of("flux_fill", "tiny", **options)).fixed()
    assert len(warnings) == 2 and all(w.startswith("model.negative_prompt: 1 of 2 prompts") for w in warnings)
    assert PromptCheck(run_of("flux_fill", "tiny")).fixed() == []


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Prompts of each call of a tokenizer, as they are counted."""
    calls, counts = list[list[str]](), TextEncoder.counts

    def recorded(encoder: TextEncoder, given: Any, *arguments: Any, **options: Any) -> list[int]:
        calls.append(list(given))
        return counts(encoder, given, *arguments, **options)

    monkeypatch.setattr(TextEncoder, "counts", recorded)
    return calls


def test_short_prompts_are_not_tokenized(counted: list[list[str]]) -> None:
    """Reading 100,000 of them would take seconds at every start."""
    run = run_of("flux_fill", "tiny", max_sequence_length=512)
    assert PromptCheck(run)(run.data, [ItemFiles(i, f"sign {i}") for i in range(50)]) == ([], {})
    assert counted == [[""], [""]]  # once for each encoder
    PromptCheck(run)(run.data, [ItemFiles(0, "開業")])
    assert counted[2:] == [["開業"]] * 2  # its characters may take several tokens each


def test_long_prompts_are_tokenized_together(counted: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for each would take many times longer; equal ones are counted once, and every one is found."""
    monkeypatch.setattr("retouch.families.prompts._AT_ONCE", 4)
    run = run_of("sd_inpaint", "tiny")
    long = [f"{LONG * (1 + i % 3)}{i // 2}" for i in range(12)]
    texts = [f"{prompt} 'OPEN'" for prompt in long]
    items = [ItemFiles(i, prompt) for i, prompt in enumerate(texts + texts[:3])]
    [warning], problems = PromptCheck(run)(run.data, items)
    assert warning.startswith("15 of 15 prompts are longer")
    assert list(problems) == list(range(15))
    assert [len(call) for call in counted] == [1, 4, 4, 4, 4, 4, 4]


# --- vlm_grpo ---


def vlm_run(**algorithm: Any) -> RunConfig:
    overrides = [f"algorithm.{name}={value}" for name, value in algorithm.items()]
    return load_run(Path(__file__).parents[1] / "configs/tiny/qwen_image_edit_vlm_grpo.yaml", overrides)


def test_prompts_of_vlm_grpo_are_counted_as_its_policy_reads_them(tmp_path: Path) -> None:
    """States beyond model.max_sequence_length are an error or cut there, those of the completion first."""
    run = vlm_run()
    _, processor, task = load_policy(run)
    side = run.data.size
    source = Image.new("RGB", (side[1], side[0]))
    drop = prefix_length(tokenizer_of(processor), task)

    def states(prompt: str) -> int:
        [ids] = tokenize(processor, task, [chat_messages(task, prompt)], [[source]]).prompt_ids
        return len(ids) - drop

    limit: int = run.model.max_sequence_length  # type: ignore[union-attr]
    fits = "x" * (limit - states(""))
    assert states(fits) == limit
    items = [ItemFiles(0, fits, tmp_path / "a.png"), ItemFiles(1, fits + "x", tmp_path / "a.png")]
    [warning], _ = PromptCheck(run)(run.data, items)
    assert f"1 of 2 prompts are longer than the {limit} tokens" in warning and f"takes {limit + 1} (item 1" in warning


def test_completions_that_replace_the_prompt_have_no_cut_prompt(tmp_path: Path) -> None:
    run = vlm_run(conditioning="rewrite_text")
    assert PromptCheck(run)(run.data, [ItemFiles(0, "x" * 999, tmp_path / "a.png")]) == ([], {})


# --- commands ---

PROBLEM = "no text encoder reads the text 'OPEN' in the prompt"


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A run file whose list has three items: one that fits, one with a text that is cut, one cut behind its text."""
    Image.new("RGB", (64, 32), "white").save(tmp_path / "a.png")
    mask = Image.new("L", (64, 32))
    mask.paste(255, (8, 8, 56, 24))
    mask.save(tmp_path / "m.png")
    prompts = ["The text is 'OPEN'.", LONG + "the text is 'OPEN'.", "'OPEN' is written on it in gold"]
    files = {"image": "a.png", "mask": "m.png", "text": "OPEN"}
    (tmp_path / "list.json").write_text(json.dumps([{**files, "prompt": p} for p in prompts]), encoding="utf-8")
    run = {
        "name": "t",
        "seed": 0,
        "model": {
            "family": "flux_fill",
            "path": "tiny",
            "dtype": "fp32",
            "max_sequence_length": 24,
            "train": {"kind": "lora", "rank": 4},
        },
        "data": {"format": "manifest", "path": str(tmp_path / "list.json"), "resolution": [32, 64], "target": "none"},
        "rollout": {
            "group_size": 2,
            "global_groups_per_batch": 1,
            "batch_size_per_device": 2,
            "num_steps": 2,
            "noise_level": 0.7,
        },
        "algorithm": {"name": "grpo"},
        "rewards": {"jpeg_size": {}},
        "optimizer": {"batch_size_per_device": 2, "gradient_accumulation": 1},
        "training": {"max_steps": 1, "checkpoint_every": 0, "eval_every": 0, "mixed_precision": "no"},
        "evaluation": {"num_examples": 1},
        "logging": {"dir": str(tmp_path / "runs"), "sinks": []},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    return tmp_path / "run.yaml"


def told(outcome: Outcome) -> str:
    """What was logged, without the breaks of its lines."""
    return " ".join(outcome.err.split())


def cut(count: int, of: int) -> str:
    return f"{count} of {of} prompts are longer than the 24 tokens that text_encoder reads, and are cut"


def test_validate_lists_the_item_and_counts_the_others(listed: Path) -> None:
    outcome = retouch("data", "validate", listed)
    assert outcome.code == 2 and "2 items can be used; 1 problem" in outcome.out
    assert "item 1                   " + PROBLEM in outcome.out
    assert "warning: " + cut(2, 3) in outcome.out


def test_check_reads_no_tokenizer(listed: Path) -> None:
    assert retouch("check", listed).code == 0


def test_train_leaves_the_item_out_or_ends(listed: Path) -> None:
    outcome = retouch("train", listed)
    assert outcome.code == 0, outcome.err
    assert "data: " + cut(2, 3) in told(outcome) and "data: skipped item 1: " + PROBLEM in told(outcome)
    refused = retouch("train", listed, "data.max_bad_items=0", "name=other")
    assert refused.code == 2 and "1 of 3 items are broken, more than max_bad_items 0" in refused.err
    assert PROBLEM in refused.err


def test_doctor_warns_or_names_the_fix(listed: Path) -> None:
    out = retouch("doctor", listed).out
    assert "warning  data                   " + cut(2, 3) in out and "1 more are broken and left out" in out
    lines = retouch("doctor", listed, "data.max_bad_items=0").out.splitlines()
    assert any(line.startswith("fix      data ") and PROBLEM in line for line in lines)


def test_precompute_keeps_the_item_and_says_so(listed: Path, tmp_path: Path) -> None:
    """Training without the tokenizers cannot know it, and requires its embeddings."""
    folder = tmp_path / "embeddings"
    outcome = retouch("data", "precompute", listed, "--out", folder)
    assert outcome.code == 0 and cut(2, 3) in told(outcome) and PROBLEM in told(outcome)
    assert retouch("train", listed, f"model.embeddings={folder}").code == 0
    refused = retouch("data", "precompute", listed, "data.max_bad_items=0", "--out", folder)
    assert refused.code == 2 and PROBLEM in refused.err


def test_embeddings_do_without_tokenizers(listed: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(model_folder("flux_fill"), tmp_path / "bare"))
    folder = tmp_path / "embeddings"
    assert retouch("data", "precompute", listed, f"model.path={bare}", "--out", folder).code == 0
    bare = bare.rename(tmp_path / "moved")
    for part in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        shutil.rmtree(bare / part)
    run = load_run(listed, [f"model.path={bare}", f"model.embeddings={folder}"])
    item = ItemFiles(0, LONG + "'OPEN'")
    assert PromptCheck(run)(run.data, [item]) == ([], {})
    [note], problems = PromptCheck(run, local=True)(run.data, [item])
    assert note.startswith("prompts are not counted: model.path: cannot load tokenizer/") and not problems


@pytest.mark.parametrize(
    ("prompt", "reward", "code"),
    [
        (LONG + "'OPEN'", "ocr", 2),
        (LONG + "'OPEN'", "jpeg_size", 0),
        ("'OPEN' in gold on wood, lit at night", "ocr", 0),
    ],
)
def test_sample_refuses_a_text_that_is_cut(prompt: str, reward: str, code: int, listed: Path, tmp_path: Path) -> None:
    place = ["--image", tmp_path / "a.png", "--mask", tmp_path / "m.png", "--out", tmp_path / "out"]
    text = listed.read_text(encoding="utf-8").replace("jpeg_size: {}", f"{reward}: {{}}")
    listed.write_text(text, encoding="utf-8")
    outcome = retouch("sample", "--config", listed, *place, "--prompt", prompt)
    assert outcome.code == code and cut(1, 1) in told(outcome)
    assert (PROBLEM in outcome.err) is (code == 2)


def test_sample_names_a_prompt_without_an_image_that_is_cut(
    listed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = yaml.safe_load(listed.read_text(encoding="utf-8"))
    run["model"] |= {"family": "sd3", "path": str(model_folder("sd3"))}
    (tmp_path / "prompts.txt").write_text("a sign\n", encoding="utf-8")
    run["data"] = {"format": "prompts", "path": str(tmp_path / "prompts.txt"), "resolution": [32, 64]}
    items_to_sample(parse_run(run), SampleRequest(prompt="a sign" * 40))
    assert "1 of 1 prompts are longer than the 24 tokens that" in caplog.text


def test_the_import_of_torch_is_named_before_prompts_are_counted(
    listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizers import it, which takes seconds; a mistake in the options is told before."""

    def stop(*_: object) -> None:
        raise DataError("counted")

    monkeypatch.setattr(items, "require_read", stop)
    place = ["--image", tmp_path / "a.png", "--mask", tmp_path / "m.png", "--out", tmp_path / "out"]
    outcome = retouch("sample", "--config", listed, *place, "--prompt", "a sign")
    first, last = outcome.err.splitlines()
    assert "loading torch, then flux_fill" in first and last == "error: counted"
    mistakes = ([], ["--fit", "x"], ["--text", "A"], ["--reference", "r.png"], ["--box", "1,2,3,4"])
    for n, mistake in enumerate(mistakes):
        refused = retouch("sample", "--config", listed, *place, *(["--prompt", "a"] if n else []), *mistake)
        assert refused.code == 2 and refused.err.startswith("error: -"), refused.err


def test_sample_leaves_an_item_of_a_list_out(listed: Path, tmp_path: Path) -> None:
    outcome = retouch("sample", "--config", listed, "--data", tmp_path / "list.json", "--out", tmp_path / "out")
    assert outcome.code == 0 and len(list((tmp_path / "out").glob("*.png"))) == 2
    assert "--data: skipped item 1: " + PROBLEM in told(outcome)


def test_a_model_that_is_not_here_is_not_counted(listed: Path) -> None:
    """`data validate` downloads nothing."""
    outcome = retouch("data", "validate", listed, "--resolution", "32")
    assert outcome.code == 2
    text = listed.read_text(encoding="utf-8").replace("path: tiny", "path: somebody/FLUX")
    listed.write_text(text, encoding="utf-8")
    outcome = retouch("data", "validate", listed)
    assert outcome.code == 0 and "prompts are not counted: somebody/FLUX is not on this machine" in outcome.out
