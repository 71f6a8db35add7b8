"""From YAML, environment and overrides to a run, and back."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from retouch.config import ConfigError, RunConfig, dump_run, load_run, parse_run, yaml12
from retouch.config.load import overlaid, read_yaml

from .conftest import BASE, REPOSITORY, TINY
from .leaves import leaves

RunWith = Callable[..., RunConfig]

PUBLISHED = sorted(
    path
    for path in (REPOSITORY / "configs").rglob("*.yaml")
    if not {"accelerate", "evaluation"} & {*path.relative_to(REPOSITORY).parts}
)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: str(path.relative_to(REPOSITORY / "configs")))
def test_every_published_run_parses_and_survives_a_dump(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ("CALLIGRAPHER_PATH", "ADAPTER_PATH", "IMAGE_ROOT")
    for name in ("DATA_PATH", "EVAL_DATA_PATH", "MODEL_PATH", "DATA_JSON_PATH", *paths):
        monkeypatch.setenv(name, f"/given/{name}")
    run = load_run(path)
    assert parse_run(yaml.safe_load(dump_run(run))) == run


def test_there_are_published_runs() -> None:
    assert TINY in PUBLISHED


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ('name="1e5"', 'logging.dir="1e5"', 'data.path="no"'),
        ("name=2025-01-01", "data.path='~'"),
        ("optimizer.lr=1e-5", "optimizer.eps=1e-08", "rollout.window={range: [0.0, 0.25], size: 1}"),
        ("rewards={reader: {scorer: ocr, url: auto, score: confidence}, preservation: {weight: -0.5}}",),
        ("rewards.ocr={url: ['http://a:1', 'http://b:2'], weight: 0.7}",),
        ("algorithm={name: ppo}", "rollout.group_size=1"),
        (
            "algorithm={name: sft, region: mask}",
            "data.resolution=[64, 128]",
            "model.train={kind: lora, targets: [to_q]}",
        ),
        ("model={family: sd_inpaint, path: tiny}", "rollout={step_rule: ddim, eta: 0.5}"),
        ("algorithm={name: nft, old_policy: 2, region: mask, region_dilation: 1, seam_weight: 0.5}",),
        ("algorithm={name: dpo, pairs: offline}", "data={format: manifest, path: x, resolution: 64}", "rewards={}"),
        ("evaluation.data={format: manifest, path: ü.json, image_root: /x}", "ema={}", "evaluation.weights=ema"),
    ],
    ids=lambda overrides: " ".join(overrides) or "defaults",
)
def test_a_dumped_run_loads_as_the_same_run(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run = parse_run(BASE, overrides)
    (tmp_path / "config.yaml").write_text(dump_run(run), encoding="utf-8")
    assert load_run(tmp_path / "config.yaml") == run


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1.0e-4", 1e-4), ("1E-4", 1e-4), ("1.e-4", 1e-4), (".5e-3", 5e-4), ("+2e+3", 2000.0), ("3", 3.0)],
)
def test_numbers_with_an_exponent_are_numbers(text: str, value: float, run_with: RunWith) -> None:
    assert run_with(f"optimizer.lr={text}").optimizer.lr == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10), ("-010", -10), ("0o10", 8), ("0x1F", 31), ("1:30", "1:30"), ("1_000", "1_000"), ("0b1", "0b1"),
        ("+7", 7), ("1.", 1.0), (".5", 0.5), (".inf", math.inf), ("-.Inf", -math.inf), ("no", "no"), ("Off", "Off"),
        ("TRUE", True), ("~", None), ("2025-01-01", "2025-01-01"), ("1e3", 1000.0), ("0o8", "0o8"), ("1.2.3", "1.2.3"),
        ("=", "="), ("'010'", "010"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = yaml12.parse(f"a: {text}")["a"]
    assert found == value and type(found) is type(value)
    assert yaml12.parse(yaml.dump({"a": text}, Dumper=yaml12.Dumper)) == {"a": text}  # as a string


@pytest.mark.parametrize(
    ("key", "value"), [("seed", "1_000"), ("optimizer.lr", "1_0.0"), ("training.max_steps", "'1_0'")]
)
def test_text_with_digits_and_underscores_is_no_number(key: str, value: str, run_with: RunWith) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: given '1_0.*number without _"):
        run_with(f"{key}={value}")
    assert run_with("name=1_000").name == "1_000"


@pytest.mark.parametrize(
    "key", ["training.keep_checkpoints", "training.eval_every", "algorithm.kl_weight", "data.resolution", "data.limit"]
)
def test_a_truth_value_is_no_number(key: str, run_with: RunWith) -> None:
    """`keep_checkpoints: true` would keep one checkpoint, and delete the others."""
    with pytest.raises(ConfigError, match=rf"{key}: given true; expected a number; write one, or leave \w+ out"):
        run_with(f"{key}=true")
    with pytest.raises(ConfigError, match=r"rollout\.guidance_scale: given false; expected a number"):
        run_with("rollout.guidance_scale=false")
    assert run_with("training.gradient_checkpointing=false", "algorithm.guard=true").algorithm.guard  # type: ignore[union-attr]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(i)}: &{chr(i)} [{', '.join([f'*{chr(i - 1)}'] * 9)}]\n" for i in range(ord("b"), ord("k"))
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB, "a: &a [*a]", "a: &a {b: *a}", "[" * 3000 + "]" * 3000, "a: " + "9" * 5000, "a: !!int x", "a: !!float {}",
        "a: !!timestamp 3", "a: !!binary '\u00e9'", "a: !!python/object:os.system x", "a: !!bool maybe", "a: !!set [1]",
        "a: !!omap 3", "? [a]\n: b", "a: " + "x" * 1_000_001, "a: 1\0", "!!int _: 3",
    ],
    ids=range(17),
)  # fmt: skip
def test_hostile_run_files_are_one_message(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    started = time.process_time()
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(tmp_path / "run.yaml")
    assert time.process_time() - started < 5


def test_a_long_chain_of_files_is_refused(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i}.yaml").write_text(f"extends: {i + 1}.yaml\n", encoding="utf-8")
    (tmp_path / "30.yaml").write_text("name: x\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="more than 20 run files extend each other"):
        read_yaml(tmp_path / "0.yaml")


def test_exponents_in_a_file_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("a: 1e-4\nb: '1e-4'\nc: e4\nd: 1e\n", encoding="utf-8")
    assert read_yaml(tmp_path / "run.yaml") == {"a": 1e-4, "b": "1e-4", "c": "e4", "d": "1e"}


def test_no_is_a_word_and_still_false_where_a_truth_value_is_asked_for(run_with: RunWith) -> None:
    run = run_with("training={mixed_precision: no, gradient_checkpointing: no}", "rollout.shared_noise=yes")
    assert run.training.mixed_precision == "no"
    assert run.training.gradient_checkpointing is False
    assert run.rollout.shared_noise is True


def test_a_date_is_a_name(run_with: RunWith) -> None:
    assert run_with("name=2025-01-01").name == "2025-01-01"


def test_a_key_that_stands_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("optimizer: {lr: 1e-4}\nname: a\noptimizer: {eps: 1e-6}\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"run\.yaml: not valid YAML: the key 'optimizer' stands there twice at line 3,"
    ):
        load_run(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such run file; `retouch init --example list`"),
        (b"a: [1", "not valid YAML: .*expected ',' or ']'.* line 1"),
        (b"\xff\xfe\x00", "not valid YAML: 'utf-8' codec"),
        (b"", "expected a mapping of keys to values; the file holds nothing"),
        (b"- 1\n- 2\n", "expected a mapping of keys to values; the file holds a list"),
    ],
)
def test_files_that_hold_no_run(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_run(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_variables_of_sections_that_are_not_read_may_be_unset(
    run_with: RunWith, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(run_with()), encoding="utf-8")
    for section in ("data", "evaluation.data"):
        given = [f"{section}={{format: self_bench, path: '${{NOWHERE}}'}}"]
        for others in ([], ["warmup_data"]):
            with pytest.raises(ConfigError, match=rf"^{section}\.path: \$\{{NOWHERE\}} is not set in the environment"):
                load_run(file, given, unread=others)
        load_run(file, given, unread=[section])
    monkeypatch.setenv("NOWHERE", "here")
    assert load_run(file, ["data.path=${NOWHERE}"], unread=["data"]).data.path == "here"


def test_a_folder_is_no_run_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; give a run file"):
        load_run(tmp_path)


# --- extends ---


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Write run files beside each other; the path of the last."""

    def write(**files: str) -> Path:
        path = tmp_path
        for name, text in files.items():
            path = tmp_path / f"{name}.yaml"
            path.write_text(text, encoding="utf-8")
        return path

    return write


BELOW = """
name: below
seed: 3
model: {family: flux_fill, path: tiny, train: {kind: lora, rank: 4, alpha: 8}}
data: {format: self_bench, path: a, target: none, resolution: [32, 64]}
rollout: {group_size: 4, window: {size: 3, position: fixed}}
algorithm: {name: grpo, clip_range: 1e-3, kl_weight: 0.5}
rewards: {ocr: {weight: 2, detect: false}, preservation: {}}
optimizer: {betas: [0.8, 0.9]}
"""


def test_a_run_file_lies_over_the_one_it_extends(written: Callable[..., Path]) -> None:
    path = written(
        below=BELOW,
        above="extends: below.yaml\nname: above\nrollout: {window: {size: 2}}\nrewards: {ocr: {weight: 1}}\n"
        "optimizer: {betas: [0.5, 0.6]}\nmodel: {train: {rank: 8}}",
    )
    run, below = load_run(path), load_run(path.parent / "below.yaml")
    assert (run.name, run.seed, below.name) == ("above", 3, "below")
    assert run.rollout.window is not None
    assert (run.rollout.group_size, run.rollout.window.size, run.rollout.window.position) == (4, 2, "fixed")
    assert {k: (r.weight, getattr(r, "detect", None)) for k, r in run.rewards.items()} == {
        "ocr": (1, False),
        "preservation": (1, None),
    }
    assert run.optimizer.betas == (0.5, 0.6)  # lists are replaced
    assert run.model.train.model_dump(exclude_none=True) == {"kind": "lora", "rank": 8, "alpha": 8, "init": "uniform"}
    assert read_yaml(path).keys() == read_yaml(path.parent / "below.yaml").keys()
    assert load_run(path, ["seed=9"]).seed == 9


@pytest.mark.parametrize(
    ("train", "alpha"),
    [
        ("{kind: lora}", 64),
        ("{kind: lora, rank: 8}", 16),
        ("{kind: lora, rank: 8, alpha: null}", 16),
        ("{kind: lora, rank: 8, alpha: 64}", 64),
        ("{kind: ip_adapter, weights: kv_lora, rank: 4}", 8),
    ],
)
def test_alpha_is_twice_the_rank_unless_given(train: str, alpha: float, written: Callable[..., Path]) -> None:
    """And stands as a number in the run directory, from which the run goes on whatever the default is then."""
    run = load_run(written(below=BELOW), [f"model.train={train}"])
    assert run.model.train.alpha == alpha  # type: ignore[union-attr]
    assert yaml.safe_load(dump_run(run))["model"]["train"]["alpha"] == alpha


def test_another_kind_of_section_starts_afresh(written: Callable[..., Path]) -> None:
    path = written(
        below=BELOW,
        above="extends: below.yaml\nmodel: {train: {kind: full}}\nalgorithm: {name: nft}\n"
        "data: {format: manifest, path: b, resolution: 64}\nrollout: {window: null}",
    )
    run = load_run(path)
    assert run.model.train.model_dump() == {"kind": "full"} and run.model.path == "tiny"
    assert run.data == parse_run(BASE, ["data={format: manifest, path: b, resolution: 64}"]).data
    assert run.algorithm == parse_run(BASE, ["algorithm={name: nft}"]).algorithm  # the kl_weight of below is GRPO's
    assert run.rollout.window is None and run.rollout.group_size == 4


def test_a_run_file_may_extend_one_that_extends(written: Callable[..., Path]) -> None:
    path = written(below=BELOW, middle="extends: below.yaml\nseed: 4", top="extends: middle.yaml\nname: top")
    assert (load_run(path).name, load_run(path).seed, load_run(path).rollout.group_size) == ("top", 4, 4)


def test_what_cannot_be_extended(written: Callable[..., Path]) -> None:
    circle = written(a="extends: b.yaml", b="extends: a.yaml")
    with pytest.raises(ConfigError, match=r"b\.yaml: extends itself by way of b\.yaml, a\.yaml$"):
        load_run(circle)
    with pytest.raises(ConfigError, match=r"extends: given \['x'\]; name one run file, relative to this one"):
        load_run(written(c="extends: [x]"))
    path = written(d="extends: nowhere.yaml")
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert str(caught.value) == (
        f"{path}: extends: given 'nowhere.yaml', but there is no {path.parent}/nowhere.yaml; the name is relative to "
        "this file"
    )


def test_null_takes_a_reward_or_an_optional_section_away(written: Callable[..., Path]) -> None:
    path = written(
        below=BELOW + "ema: {decay: 0.9}\n",
        above="extends: below.yaml\nrewards: {ocr: null, again: {scorer: ocr}}\nema: null\nrollout: {window: null}",
    )
    run = load_run(path)
    assert list(run.rewards) == ["preservation", "again"]
    assert run.ema is None and run.rollout.window is None
    assert list(load_run(path, ["rewards.preservation=null"]).rewards) == ["again"]
    assert load_run(path, ["rewards.ocr={}"]).rewards["ocr"].weight == 1  # not the 2 of below


def test_null_in_a_table_that_replaces_all_rewards_is_refused(tmp_path: Path) -> None:
    """It would switch the reward on, with its defaults, where somebody meant to switch it off."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: t\nmodel: {path: tiny}\ndata: {format: self_bench, path: x}\nalgorithm: {name: sft}\n"
        "rewards: {ocr: {}, seam: }\n"
    )
    assert set(load_run(path).rewards) == {"ocr", "seam"}  # a file may leave the options out
    with pytest.raises(
        ConfigError, match=r"rewards\.clip: given null in a table that replaces all rewards; leave clip"
    ):
        load_run(path, ["rewards={seam: {}, clip: null}"])


@pytest.mark.parametrize("rewards", ["{ocr: {}}", ""])
def test_a_reward_that_is_not_there_cannot_be_taken_away(rewards: str, written: Callable[..., Path]) -> None:
    """Nor does the null stand for its defaults, as it does in a file that extends none."""
    below = f"name: below\nalgorithm: {{name: grpo}}\n{'rewards: ' if rewards else ''}{rewards}"
    path = written(below=below, above="extends: below.yaml\nrewards: {preservation: null}")
    there = "ocr" if rewards else "none at all"
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert str(caught.value) == (
        f"{path}: rewards.preservation: given null, which takes a reward away, but there is none of that name "
        f"({there}); leave it out, or write preservation: {{}} for its defaults"
    )
    with pytest.raises(ConfigError, match=r"^rewards\.read: given null, which takes a reward away"):
        load_run(written(alone=BELOW), ["rewards.read="])


NO_REWARD = {
    "rewards.vlm.weight=0.5": "known: ocr; to add it, set 'rewards.vlm={weight: 0.5}'",
    "rewards.vlm.url=http://a:1": "known: ocr; to add it, set 'rewards.vlm={url: http://a:1}'",
    "rewards.orc.weight=2": "did you mean 'ocr'?; to add it, set 'rewards.orc={scorer: NAME, weight: 2}'",
    "rewards.read.scorer=ocr": "known: ocr; to add it, set 'rewards.read={scorer: ocr}'",
    "rewards.vlm.a.b={c: 1}": "known: ocr; to add it, set 'rewards.vlm={a: {b: {c: 1}}}'",
}


@pytest.mark.parametrize("override", NO_REWARD)
def test_an_option_of_a_reward_that_the_run_does_not_have_is_refused(override: str) -> None:
    """It added the reward with its defaults: of `vlm`, a network of 7 billion weights in the training process."""
    key, _, value = override.partition("=")
    message = f"{key}: given {value}, but the run has no reward {key.split('.')[1]!r}; {NO_REWARD[override]}"
    for run in (lambda: parse_run(BASE, [override]), lambda: parse_run(overlaid(BASE, {key: value}))):
        with pytest.raises(ConfigError) as caught:
            run()
        assert str(caught.value) == message
    with pytest.raises(ConfigError, match="; it has none; to add it, set "):
        parse_run({**BASE, "rewards": None}, [override])
    with pytest.raises(ConfigError, match="but the run has no reward 'ocr'"):
        parse_run(BASE, ["rewards.preservation={}", "rewards.ocr=null", "rewards.ocr.weight=1"])


def test_a_whole_entry_adds_a_reward_which_then_takes_options() -> None:
    for overrides in (
        ["rewards.vlm={}", "rewards.vlm.weight=0.5"],
        ["rewards={vlm: {weight: 2}}", "rewards.vlm.weight=0.5"],
    ):
        assert parse_run(BASE, overrides).rewards["vlm"].weight == 0.5
    merged = overlaid(BASE, {"rewards.vlm": {}, "rewards.vlm.weight": 0.5, "rewards.ocr.weight": 2})
    assert {name: one.weight for name, one in parse_run(merged).rewards.items()} == {"ocr": 2, "vlm": 0.5}
    assert parse_run(overlaid(BASE, {"rewards": {"vlm": {"weight": 0.5}}})).rewards["vlm"].weight == 0.5


def test_rewards_is_the_only_table_of_sections_of_a_run_file() -> None:
    """An option of an entry that does not exist is refused for rewards; another table needs the same."""
    tables = {leaf.key.partition(".*")[0] for leaf in leaves(RunConfig) if ".*." in leaf.key}
    assert tables == {"rewards"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluation.data.path=x", "run: evaluation.data: the kind is missing; set evaluation.data.format"),
        ("warmup_data.path=x", "run: warmup_data: the kind is missing; set warmup_data.format"),
        ("plugins.0=x", "run: plugins: given {'0': 'x'}; input should be a valid list"),
        ("rewards.ocr.url.0=http://a:1", "run: rewards.ocr.url: given {'0': 'http://a:1'}; set null "),
    ],
)
def test_a_dotted_key_makes_no_section_unseen(override: str, message: str) -> None:
    """Of optional sections only those are made whose every key has a default (`ema.decay=0.9`)."""
    with pytest.raises(ConfigError) as caught:
        parse_run(BASE, [override])
    assert str(caught.value).startswith(message)
    assert parse_run(BASE, ["ema.decay=0.9"]).ema is not None
    window = parse_run(BASE, ["rollout.window.size=1"]).rollout.window
    assert window is not None and window.size == 1


def test_options_of_a_reward_may_be_null(written: Callable[..., Path]) -> None:
    below = BELOW.replace("{weight: 2, detect: false}", "{weight: 2, url: auto}")
    run = load_run(written(below=below, above="extends: below.yaml\nrewards: {ocr: {url: null}}"))
    assert (run.rewards["ocr"].url, run.rewards["ocr"].weight) == (None, 2)


FAMILYLESS = BELOW.replace("family: flux_fill, path: tiny", "path: somebody/FLUX, max_sequence_length: 24")


@pytest.mark.parametrize("below", [BELOW, FAMILYLESS])
def test_nothing_of_one_family_goes_over_to_another(below: str, written: Callable[..., Path]) -> None:
    """Also where the file below leaves its family to the default."""
    path = written(
        below=below,
        above="extends: below.yaml\nmodel: {family: sd_inpaint}\nalgorithm: {name: nft}\nrollout: {window: null}",
    )
    run = load_run(path)
    assert run.model == parse_run(BASE, ["model={family: sd_inpaint}"]).model
    assert run.rollout.group_size == 4  # the other sections stay
    same = load_run(written(same="extends: below.yaml\nmodel: {family: flux_fill, train: {rank: 8}}"))
    assert same.model.path == load_run(path.parent / "below.yaml").model.path
    assert same.model.train.model_dump()["rank"] == 8


def test_what_another_family_has_not_is_refused(written: Callable[..., Path]) -> None:
    path = written(
        below=BELOW.replace("group_size: 4", "group_size: 4, guidance_scale: 30"),
        above="extends: below.yaml\nmodel: {family: sd_inpaint}",
    )
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert str(caught.value) == (
        f"{path}: model.family: given 'sd_inpaint' over 'flux_fill', for which rollout.guidance_scale 30 was set; set "
        "guidance_scale anew (null takes the model's own)"
    )
    for scale in (5.0, None):
        text = f"extends: below.yaml\nmodel: {{family: sd_inpaint}}\nrollout: {{guidance_scale: {scale or 'null'}}}"
        assert load_run(written(said=text)).rollout.guidance_scale == scale
    rule = written(
        below=BELOW.replace("group_size: 4", "step_rule: flow_sde"),
        above="extends: below.yaml\nmodel: {family: sd_inpaint}",
    )
    with pytest.raises(ConfigError, match="given 'flow_sde', but sd_inpaint predicts the noise; set one of ddim"):
        load_run(rule)


@pytest.mark.parametrize("family", ["model.family=sd_inpaint", "model={family: sd_inpaint}"])
def test_an_override_of_the_family_does_not_inherit_a_guidance_scale(family: str) -> None:
    """As a file that extends one, and as `overlaid`: FLUX's 30 is no scale of classifier-free guidance."""
    below = {**BASE, "rollout": {"guidance_scale": 30}}
    with pytest.raises(ConfigError, match=r"'sd_inpaint' over 'flux_fill', for which rollout\.guidance_scale 30 was"):
        parse_run(below, [family])
    for anew in ("rollout.guidance_scale=null", " rollout.guidance_scale=5.0", "rollout={group_size: 4}"):
        assert parse_run(below, [family, anew]).rollout.guidance_scale == (5.0 if "5.0" in anew else None)
    assert parse_run(below, ["model.family=flux_fill"]).rollout.guidance_scale == 30


def test_a_reward_that_another_scorer_gives_starts_afresh(written: Callable[..., Path]) -> None:
    """Its scorer below is its name; its weight there was for that."""
    path = written(below=BELOW, above="extends: below.yaml\nrewards: {ocr: {scorer: preservation}}")
    found = load_run(path).rewards["ocr"].model_dump()
    assert (found["scorer"], found["weight"], found["paste_back"]) == ("preservation", 1, False)
    assert "detect" not in found


def test_only_files_extend(problems: Callable[..., list[str]]) -> None:
    (line,) = problems("extends=other.yaml")
    assert line.startswith("small.yaml: extends: unknown key")


# --- environment ---


def test_variables_are_filled_in(monkeypatch: pytest.MonkeyPatch, run_with: RunWith) -> None:
    monkeypatch.setenv("A_FOLDER", "/given")
    monkeypatch.setenv("A_SIDE", "128")
    run = run_with("data.path=${A_FOLDER}/train-${A_SIDE}", "data.resolution=${A_SIDE}")
    assert run.data.path == "/given/train-128"
    assert run.data.resolution == 128


@pytest.mark.parametrize(
    ("set_to", "expected"),
    [
        ({"FIRST": "a", "SECOND": "b"}, "a"),
        ({"SECOND": "b"}, "b"),
        ({}, "http://c:1/v1"),
        ({"FIRST": "", "SECOND": ""}, "http://c:1/v1"),
    ],
)
def test_a_default_may_name_another_variable(
    set_to: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an empty variable takes the default, as in a shell."""
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    run = parse_run(BASE, ["data.path=${FIRST:-${SECOND:-http://c:1/v1}}"])
    assert run.data.path == expected


def test_a_default_stands_in_for_a_variable_that_is_not_set(monkeypatch: pytest.MonkeyPatch, run_with: RunWith) -> None:
    monkeypatch.delenv("A_FOLDER", raising=False)
    assert run_with("data.path=${A_FOLDER:-runs/data}/x").data.path == "runs/data/x"
    assert run_with("data.path=x${A_FOLDER:-}").data.path == "x"
    monkeypatch.setenv("A_FOLDER", "/given")
    assert run_with("data.path=${A_FOLDER:-runs/data}/x").data.path == "/given/x"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.path=${NOT_SET}", "data.path"),
        ("rewards.ocr.url=['http://${NOT_SET}:1']", "rewards.ocr.url"),
        ("name=${NOT_SET}", "name"),
    ],
)
def test_a_variable_that_is_not_set_names_itself_and_its_key(
    override: str, key: str, monkeypatch: pytest.MonkeyPatch, problems: Callable[..., list[str]]
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    assert problems(override) == [
        f"{key}: ${{NOT_SET}} is not set in the environment; export NOT_SET=... or pass {key}=..."
    ]


# --- overrides ---


def test_overrides_set_values_sections_and_missing_parents(run_with: RunWith) -> None:
    run = run_with(
        "rollout.group_size=4", "evaluation.data={format: self_bench, path: a=b}", "ema.decay=0.9", "data.limit="
    )
    assert run.rollout.group_size == 4
    assert run.evaluation.data is not None and run.evaluation.data.path == "a=b"
    assert run.ema is not None and run.ema.decay == 0.9
    assert run.data.limit is None


def test_the_last_override_wins_and_the_given_mapping_stays(run_with: RunWith) -> None:
    assert run_with("seed=1", "seed=2").seed == 2
    assert "seed" not in BASE


@pytest.mark.parametrize("override", ["abc", "=3", "a..b=1", ".a=1", "a.=1", ""])
def test_override_syntax(override: str, problems: Callable[..., list[str]]) -> None:
    assert problems(override) == [
        f"override {override!r}: write it as key=value with a dotted key, like rollout.group_size=4"
    ]


@pytest.mark.parametrize(
    ("override", "part", "value"),
    [
        ("name.first=1", "name", "'small'"),
        ("data.resolution.0=1", "resolution", "64"),
        ("data.path.a.b=1", "path", "'some"),
    ],
)
def test_a_value_has_no_keys_to_override(
    override: str, part: str, value: str, problems: Callable[..., list[str]]
) -> None:
    (line,) = problems(override)
    assert line.startswith(f"override {override!r}: {part!r} holds {value}")
    assert line.endswith("which has no keys")


def test_an_override_must_be_yaml(problems: Callable[..., list[str]]) -> None:
    (line,) = problems("name=[")
    assert line.startswith("override 'name=[': the value is not valid YAML: ")


# --- overrides of the Python interface ---


def test_dotted_keys_and_sections_mean_the_same() -> None:
    """And merge as a file that extends the run does: a reward is taken away, a section of another kind replaces it."""
    run = {"rollout": {"group_size": 2, "num_steps": 4}, "rewards": {"ocr": {"weight": 1}}, "ema": {"decay": 0.9}}
    expected = {"rollout": {"group_size": 8, "num_steps": 4}, "rewards": {"clip": {}}, "ema": None}
    dotted = {"rollout.group_size": 8, "rewards.ocr": None, "rewards.clip": {}, "ema": None}
    nested = {"rollout": {"group_size": 8}, "rewards": {"clip": {}}, "ema": None}
    assert overlaid(run, dotted) == overlaid(run, nested) == expected
    train = {"model": {"train": {"kind": "lora", "rank": 4}}}
    assert overlaid(train, {"model.train": {"kind": "full"}}) == {"model": {"train": {"kind": "full"}}}
    given = {"data": {"path": Path("a/b"), "resolution": (32, 64)}}
    assert overlaid({}, given) == {"data": {"path": "a/b", "resolution": [32, 64]}}


@pytest.mark.parametrize("table", [{"vlm": {"weight": 0.5}}, {"ocr": {}, "seam": {"weight": 0.1}}])
def test_a_table_of_rewards_replaces_all_of_them_everywhere(table: dict[str, Any]) -> None:
    """In Python as on the command line; null, which removes a reward from what is merged, is refused in both."""
    typed = [f"rewards={json.dumps(table)}"]
    assert parse_run(overlaid(BASE, {"rewards": table})) == parse_run(BASE, typed)
    assert parse_run(BASE, typed).rewards.keys() == table.keys()
    for refused in (
        lambda: overlaid(BASE, {"rewards": {"ocr": None, **table}}),
        lambda: parse_run(BASE, [f"rewards={json.dumps({'ocr': None, **table})}"]),
    ):
        if "ocr" not in table:
            with pytest.raises(ConfigError, match=r"rewards\.ocr: given null in a table that replaces all rewards"):
                refused()


@pytest.mark.parametrize("changes", [{"a.b": 1, "a": {"b": 2}}, {"a": 1, "a.b": 2}, {"a.b": 1, "a": 2}])
def test_a_key_that_is_given_twice(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"override a(\.b)?: given more than once; give it once"):
        overlaid({}, changes)


# --- what is text, and no variable or comment ---


def test_a_variable_that_holds_a_variable_is_read_back_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump is read with the variables of another day, and they are no part of the run."""
    monkeypatch.setenv("PLACE", "/a/${HOME}/$${HOME}/$x/${NONE:-b}")
    run = parse_run(BASE, ["data.path='${PLACE}'", "name=a"])
    assert run.data.path == "/a/${HOME}/$${HOME}/$x/${NONE:-b}"
    (tmp_path / "config.yaml").write_text(dump_run(run), encoding="utf-8")
    monkeypatch.delenv("PLACE")
    assert load_run(tmp_path / "config.yaml", trust=False) == run  # names no variable that would need consent
    assert dump_run(load_run(tmp_path / "config.yaml")) == dump_run(run)


def test_two_dollars_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "x")
    for text, value in (("$${PLACE}", "${PLACE}"), ("$$${PLACE}", "$${PLACE}"), ("$$x ${PLACE}", "$$x x")):
        assert parse_run(BASE, [f"data.path='{text}'"]).data.path == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("/a/b #1", "/a/b #1"),
        ("#1", "#1"),
        (" /a #1 # 2 ", "/a #1 # 2"),
        ("/a/b\t#1", "/a/b\t#1"),
        ("/a#1", "/a#1"),
        ("'/a/b #1'", "/a/b #1"),
        ('"/a" # a comment behind quotes', "/a"),
    ],
)
def test_an_override_holds_no_comment(text: str, value: str) -> None:
    assert parse_run(BASE, [f"data.path={text}"]).data.path == value


def test_this_dir_is_the_folder_of_the_file_that_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that is extended, and from any working directory."""
    folder = tmp_path / "${A} b"
    folder.mkdir()
    (folder / "base.yaml").write_text(yaml.safe_dump({**BASE, "data": {**BASE["data"], "path": "${THIS_DIR}/l.json"}}))
    (tmp_path / "run.yaml").write_text('extends: "${A} b/base.yaml"\nlogging: {dir: "${THIS_DIR}/runs"}\n')
    monkeypatch.chdir(tmp_path)
    near = load_run("run.yaml")
    monkeypatch.chdir("/")
    far = load_run(tmp_path / "run.yaml")
    assert near == far and near.data.path == f"{folder}/l.json" and str(near.logging.dir) == f"{tmp_path}/runs"
