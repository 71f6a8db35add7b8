"""Reward entries that do not fit each other are refused, each with one message; their neighbours work."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from retouch.config import ConfigError, RunConfig, dump_run, load_run
from retouch.config.check import require_trainable, warnings_of
from retouch.config.training import COLUMNS
from retouch.observe.guards import GoldPairs, gold_level
from retouch.rewards import REWARDS
from retouch.rewards.server.launch import requested
from tests.command_line import retouch

GATE = "but gated_by is not set; leave it out"
BOX = "but crop is 'none'; set crop=mask_box, or leave it out"
DOWN = "rewards: no weight is above 0, and training would lower every reward; set one weight above 0"
GOLD = "but role is 'gold', which is never trained on; leave"


@pytest.mark.parametrize(
    ("rewards", "line"),
    [
        ("{ocr: {gate_threshold: 0.5}}", f"rewards.ocr.gate_threshold: given 0.5, {GATE}"),
        ("{ocr: {gate_floor: -1}}", f"rewards.ocr.gate_floor: given -1, {GATE}"),
        ("{ocr: {box_margin: 0.1}}", f"rewards.ocr.box_margin: given 0.1, {BOX}"),
        ("{ocr: {box_min_side: 64}}", f"rewards.ocr.box_min_side: given 64, {BOX}"),
        (
            "{ocr: {gated_by: ocr}}",
            "rewards.ocr.gated_by: given 'ocr', which is no other reward of the run; there is no other",
        ),
        (
            "{ocr: {}, seam: {gated_by: orc}}",
            "rewards.seam.gated_by: given 'orc', which is no other reward of the run; did you mean 'ocr'?",
        ),
        (
            "{ocr: {}, seam: {gated_by: ocr}, preservation: {gated_by: seam}}",
            "rewards.preservation.gated_by: given 'seam', which is gated itself; gate both by 'ocr'",
        ),
        (
            "{ocr: {role: gold}, seam: {gated_by: ocr}}",
            (
                "rewards.seam.gated_by: given 'ocr', whose role is 'gold': it is not scored in training; set its "
                "role=train, weight=0"
            ),
        ),
        (
            "{ocr: {}, seam: {role: gold, weight: 0.5}}",
            f"rewards.seam.weight: given 0.5, {GOLD} weight out, or set role=train",
        ),
        ("{ocr: {}, seam: {role: gold, min_group_std: 0.1}}", f"rewards.seam.min_group_std: given 0.1, {GOLD} it out"),
        (
            "{ocr: {}, seam: {role: gold, transform: win_rate}}",
            f"rewards.seam.transform: given 'win_rate', {GOLD} it out",
        ),
        (
            "{ocr: {role: gold}}",
            "rewards: every role is gold, but training needs one of role train; add one",
        ),
        (
            "{ocr: {weight: 0}, seam: {role: gold}}",
            "rewards: every weight is 0, but the objective is their weighted sum; set one weight above 0",
        ),
        ("{ocr: {weight: -1}}", DOWN),
        ("{ocr: {weight: -1}, seam: {weight: 0}}", DOWN),
        ("{ocr: {weight: -1}, seam: {role: gold}}", DOWN),
    ],
)
def test_entries_that_do_not_fit(rewards: str, line: str, problems: Callable[..., list[str]]) -> None:
    assert problems(f"rewards={rewards}") == [f"small.yaml: {line}"]


@pytest.mark.parametrize("transform", ["win_rate", "rank"])
def test_a_comparison_needs_somebody_to_beat(transform: str, problems: Callable[..., list[str]]) -> None:
    found = problems(f"rewards.ocr.transform={transform}", "algorithm={name: ppo}", "rollout.group_size=1")
    assert found == [
        (
            f"small.yaml: rewards.ocr.transform: given {transform!r}, but rollout.group_size is 1 and a group has "
            "no other samples; set rollout.group_size to 2 or more, or transform=none"
        )
    ]


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(
            (
                "model={family: qwen_image, path: tiny}",
                "data={format: prompts, path: x, resolution: 64}",
                "algorithm={name: vlm_grpo}",
            ),
            id="vlm_grpo",
        ),
        pytest.param(("data={format: manifest, path: x, resolution: 64}", "algorithm={name: kto}"), id="kto"),
        pytest.param(
            ("data={format: manifest, path: x, resolution: 64}", "algorithm={name: dpo, pairs: offline}"),
            id="offline dpo",
        ),
    ],
)
@pytest.mark.parametrize(
    "option",
    ["rewards.size.transform=win_rate", "rewards.size.min_group_std=0.1", "reward_client.probe_every=1"],
)
def test_what_compares_samples_or_probes_scorers_is_of_runs_that_do(
    option: str, algorithm: tuple[str, ...], run_with: Callable[..., RunConfig]
) -> None:
    """Under vlm_grpo TRL compares the values themselves, and no epoch of samples begins with a probe. A run of an
    earlier version may have them: its file is opened, and the run resumed, with a warning."""
    given = (*algorithm, "rewards={size: {scorer: jpeg_size}}", option)
    line = refused(run_with(*given))
    assert line.startswith(f"{option.partition('=')[0]}: given ")
    assert "does not read it" in line or "samples no images to train on" in line
    resumed = run_with(*given, "resume=auto")
    require_trainable(resumed)
    assert line in warnings_of(resumed)


@pytest.mark.parametrize(
    "rewards",
    [
        "{ocr: {weight: 0}, seam: {gated_by: ocr, gate_threshold: 0.5, gate_floor: -1}}",
        "{ocr: {weight: 0.1}, seam: {weight: -1}}",
        "{ocr: {transform: win_rate, noise: 0.1, crop: mask_box, box_margin: 0.1, box_min_side: 64}}",
        "{ocr: {}, seam: {role: gold, gated_by: ocr}, preservation: {role: gold, weight: 0}}",
    ],
)
def test_entries_that_do(rewards: str, run_with: Callable[..., RunConfig]) -> None:
    assert run_with(f"rewards={rewards}").rewards["ocr"].scorer == "ocr"


def refused(run: RunConfig) -> str:
    """The message for a run that is not trained."""
    with pytest.raises(ConfigError) as caught:
        require_trainable(run)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_a_reward_has_no_name_of_a_column_of_evaluations(name: str, run_with: Callable[..., RunConfig]) -> None:
    """A reward `text` would replace the target text of each row, and `level` would be in no mean and no alarm."""
    line = refused(run_with(f"rewards={{{name}: {{scorer: jpeg_size}}}}"))
    assert f"rewards.{name}: given as the name of a reward, but evaluations have a column {name!r} of their own" in line
    assert line.endswith("give it another name, with scorer: jpeg_size")
    require_trainable(run_with(f"rewards={{{name}_score: {{scorer: jpeg_size}}}}"))


def test_a_stop_needs_a_reward_that_can_fall(run_with: Callable[..., RunConfig]) -> None:
    [line] = warnings_of(run_with("evaluation.on_gold_fall=stop"))
    assert "evaluation.on_gold_fall: given 'stop', but no reward has role gold, and nothing would stop the run" in line
    assert warnings_of(run_with("evaluation.on_gold_fall=stop", "rewards.size={scorer: jpeg_size, role: gold}")) == []


def test_the_commands_for_options_beside_a_server_work() -> None:
    """As they stand in the message: the server has the options, and the override replaces the entry."""
    tiny = Path(__file__).parents[2] / "configs/tiny/flux_fill_grpo.yaml"
    refused = retouch("check", tiny, "rewards.ocr.weight=0.5", "rewards.ocr.url=http://a:1")
    assert refused.code == 2
    serve, entry = refused.err.strip().split("start it with `")[1].split("`, and replace the entry: ")
    assert requested(*shlex.split(serve)[3:6:2]) == {"ocr": {"detect": False, "threads": 1}}
    [override] = shlex.split(entry)
    assert override == 'rewards.ocr={"url": "http://a:1", "weight": 0.5}'
    assert retouch("check", tiny, override).code == 0


def test_gold_rewards_need_examples_for_their_later_alarms(run_with: Callable[..., RunConfig]) -> None:
    """By hand: six examples all fall by chance in 1 of 64 comparisons; the first may have a false alarm in 1 of 40, the
    second in 1 of 240."""
    gold, six = "rewards.size={scorer: jpeg_size, role: gold}", "evaluation.num_examples=6"
    steps = ("training.max_steps=200", "training.eval_every=100")  # evaluations of steps 0, 100, 200
    told = "evaluation.num_examples: given 6 examples, with which gold rewards can raise an alarm in 1 of 2 evaluations"
    assert warnings_of(run_with(gold, six, *steps)) == [f"{told} after the first; set it to 8 or more (64 is useful)"]
    for enough in (("evaluation.num_examples=8",), (six, "training.eval_every=0"), (six, "training.max_steps=100")):
        assert warnings_of(run_with(gold, *steps, *enough)) == []
    assert warnings_of(run_with(six, *steps)) == warnings_of(run_with(gold, six, *steps, "algorithm.name=sft")) == []
    only_sft = (six, *steps, "algorithm.sft_steps=200")  # no comparison: the other warnings stay
    assert warnings_of(run_with(gold, *only_sft)) == warnings_of(run_with(*only_sft))
    pairs = [GoldPairs(range(n), [1.0] * n, [1.0] * n).alarm("gold", gold_level(2)) for n in (7, 8)]
    assert pairs[0] is None and pairs[1] is not None


def test_a_plateau_needs_evaluations_that_could_show_it(run_with: Callable[..., RunConfig]) -> None:
    plateau = "training.stop_on_plateau=true"
    for other, said in {
        "training.eval_every=0": "training.eval_every: given 0, and training.stop_on_plateau will not stop the run; ",
        "training.eval_every=99999": "training.eval_every: given 99999, 1 evaluations of RL, but a plateau takes 7 to",
        "evaluation.num_examples=19": "evaluation.num_examples: given 19, but a plateau takes 20 to see, ",
        "algorithm.name=sft": "algorithm.name: given sft, which has no RL whose start is compared, ",
    }.items():
        found = [line for line in warnings_of(run_with(plateau, other)) if "stop_on_plateau" in line]
        assert [line.startswith(said) for line in found] == [True], found
    assert warnings_of(run_with(plateau, "evaluation.num_examples=20")) == warnings_of(run_with()) == []
    line = refused(run_with("training.stop_on_plateau=size"))
    assert "given size; expected true or a reward that evaluations score (" in line
    gold = "rewards.size={scorer: jpeg_size, role: gold}"
    for given in ("true", "size", "false"):
        require_trainable(run_with(f"training.stop_on_plateau={given}", gold))


def test_what_is_not_trained_is_refused_by_check_and_by_training_alone(
    run_with: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """A run of an earlier version may have it, and is opened all the same."""
    pytest.importorskip("torch")
    from retouch.observe import RunDir
    from retouch.training.beginning import require_can_begin

    run = run_with("training.stop_on_plateau=size", f"logging.dir={tmp_path}")
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(run), encoding="utf-8")
    assert load_run(file).training.stop_on_plateau == "size"
    with pytest.raises(ConfigError, match=r"training\.stop_on_plateau: given size"):
        require_can_begin(run, RunDir(run))
    outcome = retouch("check", file)
    assert outcome.code == 2 and "training.stop_on_plateau: given size" in outcome.err


def test_columns_of_evaluations_are_the_refused_names() -> None:
    pytest.importorskip("torch")
    from retouch.data.formats import FACETS
    from retouch.training.evaluation import Evaluation

    row = dict.fromkeys([*COLUMNS, "ocr"], 0.5)
    assert Evaluation([row], []).means().keys() - COLUMNS == {"ocr"}
    assert {*FACETS} <= COLUMNS


@pytest.mark.parametrize(
    ("rewards", "line"),
    [
        ("style: {gate: 0.0, threads: 2}", "rewards.style.threads: given 2, but gate is 0: nothing is read"),
        ("geneval: {timeout_s: 9}", "rewards.geneval.timeout_s: given 9, but detector_url is not set"),
        (
            "geneval: {detector_url: 'http://127.0.0.1:1', detector: d}",
            "rewards.geneval.detector: given 'd', but the server of detector_url has networks of its own",
        ),
        (
            "mine: {scorer: mmmg, model: m, reader: paddleocr}",
            "rewards.mine.reader: given 'paddleocr', but readability is not sam2",
        ),
    ],
)
def test_options_of_a_scorer_that_nothing_reads_are_warned_of(
    rewards: str, line: str, run_with: Callable[..., RunConfig]
) -> None:
    """Runs of earlier versions may have them."""
    assert any(told.startswith(line) for told in warnings_of(run_with(f"rewards={{{rewards}}}")))


def test_a_question_that_may_take_longer_than_its_request_is_warned_of(run_with: Callable[..., RunConfig]) -> None:
    """A judge has 180 s for a question, a request to its server had 60."""

    def told(*overrides: str) -> list[str]:
        run = run_with("rewards={asked: {scorer: openai_judge, model: m, url: auto}}", *overrides)
        return [line.partition(":")[0] for line in warnings_of(run) if "gives a question 180 s" in line]

    assert told() == ["reward_client.timeout_s"]
    assert told("reward_client.timeout_s=180") == told("rewards.asked.url=null") == []


def test_a_reward_of_a_server_needs_none_of_the_options_that_the_server_has() -> None:
    """Every scorer, also from the file that a run wrote."""
    for name, kind in REWARDS.available().items():
        entry = kind.model_validate({"scorer": name, "url": "http://127.0.0.1:9"})
        assert kind.model_validate(entry.model_dump()) == entry
    for given, message in (({}, "path"), ({"path": ""}, "given ''; expected a text; set path to one")):
        with pytest.raises(ValidationError, match=message):
            REWARDS["taste"].model_validate(given)


def test_a_new_run_that_may_resume_keeps_the_rules_of_new_runs(
    run_with: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """A scheduler's line has `resume=auto` from the first start on."""
    pytest.importorskip("torch")
    from retouch.observe import RunDir
    from retouch.training.beginning import require_can_begin

    run = run_with(
        "model.dtype=fp16", "training.mixed_precision='no'", "resume=auto", f"logging.dir={tmp_path}", "name=one"
    )
    with pytest.raises(ConfigError, match=r"given 'no', but model\.dtype is fp16"):
        require_can_begin(run, RunDir(run))
    (tmp_path / "one").mkdir()
    (tmp_path / "one/config.yaml").write_text(dump_run(run))
    require_can_begin(run, RunDir(run))
