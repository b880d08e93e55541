from __future__ import annotations

from pathlib import Path

import pytest

import trainer
from trainer.config import Config
from trainer.config_file import load_config, parse_config, to_toml
from trainer.errors import ConfigError
from trainer.objective import Objective

CONFIGS = sorted((Path(trainer.__file__).parent / "configs").glob("*.toml"))
MODEL = {"model": {"path": "m"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[optimizer]\nlr = 1e-4\n', encoding="utf-8")
    return path


def test_file_and_overrides_fill_one_object(file: Path) -> None:
    config = load_config(file, ["optimizer.lr=1e-5", "train.output=runs/x", "rollout.stop=['a']"])
    assert config.optimizer.lr == 1e-5
    assert config.train.output == "runs/x"
    assert config.rollout.stop == ("a",)
    assert config.optimizer.beta1 == 0.9


def test_nested_override_and_value_with_equals_sign(file: Path) -> None:
    config = load_config(
        file, ["data.arithmetic.max_operand=9", "data.arithmetic.question={a}{op}{b}=?"]
    )
    assert config.data.arithmetic.max_operand == 9
    assert config.data.arithmetic.question == "{a}{op}{b}=?"


def test_resolved_toml_reads_back_to_the_same_object(tmp_path: Path) -> None:
    config = parse_config(
        {
            **MODEL,
            "rollout": {"stop": ['"', "\n", "é\x7f"], "chat_template_kwargs": {"a b": {"c": [1]}}},
            "data": {"source": "jsonl", "path": "dir\\x.jsonl", "system": "Be brief.\t"},
            "evaluation": {"path": "y.jsonl"},
            "objective": {"name": "dapo", "beta": 0.01},
        }
    )
    copy = tmp_path / "config.toml"
    copy.write_text(to_toml(config), encoding="utf-8")
    assert load_config(copy) == config


def test_configuration_is_frozen(file: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(file).optimizer.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "where", "says"),
    [
        ("optimizer.learning_rate=1", "optimizer.learning_rate", "lr"),
        ("train.stepz=1", "train.stepz", "steps?"),
        ("optimiser.lr=1", "optimiser", "optimizer?"),
        ("data.arithmetic.max=9", "data.arithmetic.max", "max_operand"),
        ("rollout.temperature=0", "rollout.temperature", "greater than or equal to 0.01"),
        ("rollout.temperature=0.005", "rollout.temperature", "greater than or equal to 0.01"),
        ("rollout.temperature=2.5", "rollout.temperature", "less than or equal to 2"),
        ("rollout.group_size=1", "rollout.group_size", "greater than or equal to 2"),
        ("optimizer.lr=-1", "optimizer.lr", "greater than or equal to 0"),
        ("optimizer.lr=nan", "optimizer.lr", "finite"),
        ("train.steps=many", "train.steps", "integer"),
        ("server.url=localhost:8300", "server.url", "pattern"),
        ("data.path=x.jsonl", "data", "a path goes with jsonl and dataset"),
        ("data.source=jsonl", "data", "a path goes with jsonl and dataset"),
        ("data.split=test", "data", "only source 'dataset' has splits"),
        ("data.template=hello", "data", "{prompt}"),
        ("data.arithmetic.question={c}", "data.arithmetic", "{a}, {op} and {b}"),
        ("evaluation.path=x.jsonl", "configuration", "held-out problems of its own"),
        ("evaluation.split=test", "configuration", "only source 'dataset' has splits"),
        ("objective.name=ppo", "configuration", "no objective 'ppo'"),
        ("objective.clip_low=2", "configuration", "clip_low"),
        ("objective.kl=k9", "configuration", "k9"),
        ("objective.correction=token_mask", "configuration", "needs a band"),
        ("objective.overlong_cache=5", "configuration", "punishes nothing"),
        ("objective.normalise=each", "configuration", "needs several rewards"),
        ("rollout.refill_budget=-1", "rollout.refill_budget", "greater than or equal to 0"),
    ],
)
def test_refusals_name_the_key_and_what_is_allowed(
    file: Path, override: str, where: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    (problem,) = caught.value.problems
    assert problem.where == where
    assert says in problem.allowed


def test_every_problem_is_reported_at_once(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["optimizer.lr=-1", "train.steps=0", "train.x=1"])
    assert {p.where for p in caught.value.problems} == {"optimizer.lr", "train.steps", "train.x"}


def test_jsonl_needs_held_out_rows_or_no_evaluation() -> None:
    data = {"source": "jsonl", "path": "x.jsonl"}
    with pytest.raises(ConfigError, match=r"evaluation\.path is missing"):
        parse_config({**MODEL, "data": data})
    parse_config({**MODEL, "data": data, "evaluation": {"prompts": 0}})


@pytest.mark.parametrize("key", ["every", "samples"])
def test_evaluation_of_nothing_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"need evaluation\.prompts above 0"):
        parse_config({**MODEL, "evaluation": {"prompts": 0, key: 5}})


def test_template_arguments_without_a_template_are_refused() -> None:
    data = {"source": "jsonl", "path": "x.jsonl", "chat": False}
    rollout = {"chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(ConfigError, match="no effect with"):
        parse_config({**MODEL, "data": data, "rollout": rollout, "evaluation": {"path": "y"}})


@pytest.mark.parametrize("override", ["lr=1", "optimizer.lr", "=1", "optimizer.=1", ".lr=1"])
def test_malformed_overrides(file: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_config(file, [override])


def test_override_below_a_value_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="a value, not a section"):
        load_config(file, ["model.path.x=1"])


def test_unreadable_files(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("a = ", encoding="utf-8")
    for path in (broken, tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            load_config(path)


def test_missing_model_is_one_clear_problem() -> None:
    with pytest.raises(ConfigError, match="model: got nothing"):
        parse_config({})


def test_servers_are_one_or_several_and_each_once() -> None:
    def urls(**server: object) -> tuple[str, ...]:
        return parse_config({**MODEL, "server": server}).server.every_url()

    assert urls(url="http://a:1") == ("http://a:1",)
    assert urls(url="http://a:1", urls=["http://b:1", "http://c:1"]) == ("http://b:1", "http://c:1")
    with pytest.raises(ConfigError, match="names a server twice"):
        urls(urls=["http://b:1", "http://b:1/"])
    with pytest.raises(ConfigError, match=r"server\.urls\.0"):
        urls(urls=["b:1"])


def test_dr_grpo_divides_by_max_tokens_unless_told() -> None:
    def length(**objective: object) -> int | None:
        rollout = {"max_tokens": 77}
        config = parse_config({**MODEL, "rollout": rollout, "objective": objective})
        return config.objective.resolve(config.rollout.max_tokens).constant_length

    assert length(name="dr_grpo") == 77
    assert length(name="dr_grpo", constant_length=50) == 50
    assert length(name="grpo", reduction="dr_grpo") == 77
    assert length(name="rloo") == 1
    assert length(name="grpo") is None


def resolved(**objective: object) -> Objective:
    reward = {"functions": [{"function": "exact"}, {"function": "numeric", "weight": 0.5}]}
    return parse_config({**MODEL, "objective": objective, "reward": reward}).resolved_objective()


def test_every_part_of_an_objective_can_be_configured() -> None:
    objective = resolved(
        name="cispo",
        clip_low=0.2,
        clip_high=0.5,
        beta=0.1,
        kl="k1_reward",
        baseline="leave_one_out",
        scale="batch_std",
        truncated="punish",
        overlong_cache=64,
        overlong_weight=0.5,
        correction="geometric_mask",
        correction_low=0.5,
        correction_high=2.0,
    )
    assert objective.clip_bounds == (0.8, 1.5)
    assert objective.correction_band == (0.5, 2.0)
    assert objective.overlong == (512, 64, 0.5)
    assert objective.rewards == (("exact", 1.0), ("numeric", 0.5))
    assert (objective.kl, objective.baseline) == ("k1_reward", "leave_one_out")
    assert resolved(normalise="each").normalise == "each"


def test_a_bound_of_a_preset_can_be_opened() -> None:
    assert resolved(name="dapo", clip_low="off").clip_bounds == (0.0, 1.28)
    assert resolved(name="cispo").clip_bounds == (0.0, 5.0)
    assert resolved(name="cispo_two_sided").clip_bounds == (0.8, 1.28)
    assert resolved(name="dual_clip").dual_clip == 3.0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert isinstance(load_config(path), Config)
