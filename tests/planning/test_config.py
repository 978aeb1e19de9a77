"""Configuration: what is accepted, and what a person reads when it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from pydantic import BaseModel

from trainer.config import CHANGEABLE_ON_RESUME, RunConfig, differing_keys, load_config, parse_config
from trainer.errors import ConfigError

MINIMAL = {"run_name": "first", "steps": 100}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    return str(caught.value)


def leaf_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, pydantic.fields.FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaf_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def test_a_name_and_a_number_of_steps_are_enough() -> None:
    config = parse_config(MINIMAL)
    assert (config.run_name, config.steps, config.seed) == ("first", 100, 0)


@pytest.mark.parametrize("missing", ["run_name", "steps"])
def test_settings_without_a_default_are_asked_for_by_name(missing: str) -> None:
    assert (
        refusal({key: value for key, value in MINIMAL.items() if key != missing})
        == f"{missing} is missing: it has no default"
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"stepz": 5}, "unknown key 'stepz': did you mean 'steps'?"),
        ({"num_hosts": {"maks": 5}}, "unknown key 'num_hosts.maks': did you mean 'num_hosts.max'?"),
        (
            {"save_interval_steps": 5},
            "unknown key 'save_interval_steps': did you mean 'checkpoint.save_interval_steps'?",
        ),
        ({"elastic": {"steps": 5}}, "unknown key 'elastic.steps': did you mean 'steps'?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_name(values: dict[str, Any], expected: str) -> None:
    assert refusal(MINIMAL | values) == expected


def test_an_unknown_key_that_resembles_nothing_is_refused_with_all_valid_names() -> None:
    assert refusal(MINIMAL | {"num_hosts": {"qqqq": 1}}) == "unknown key 'num_hosts.qqqq': allowed here: max, min"


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"steps": 0}, ["steps", "greater than or equal to 1", "given: 0"]),
        ({"steps": "many"}, ["steps", "integer", '"many"']),
        ({"run_name": "../evil"}, ["run_name", "allowed: letters", '"../evil"']),
        ({"run_name": "a/b"}, ["run_name", '"a/b"']),
        ({"run_name": ""}, ["run_name"]),
        ({"global_batch_size": 0}, ["global_batch_size"]),
        ({"num_hosts": {"min": 5, "max": 4}}, ["num_hosts.min (5)", "num_hosts.max (4)"]),
        (
            {"num_hosts": {"max": 1}, "engine": {"hosts_per_slice": 2}},
            ["num_hosts.max (1)", "engine.hosts_per_slice (2)"],
        ),
        ({"parallelism": {"ici_tensor_parallelism": 0}}, ["parallelism.ici_tensor_parallelism is 0", "-1"]),
        ({"parallelism": {"dcn_data_parallelism": -2}}, ["parallelism.dcn_data_parallelism", "-2"]),
        ({"snapshot": {"interval_steps": "auto"}}, ["snapshot.interval_steps", "allowed: off"]),
        ({"storage": "gs://bucket"}, ["storage", "a local path"]),
        ({"capacity": {"provider": "trace"}}, ["capacity.trace_path is needed"]),
        ({"capacity": {"provider": "command"}}, ["capacity.command is needed", "a list of a program"]),
        ({"capacity": {"provider": "command", "command": [""]}}, ["capacity.command is needed"]),
        ({"capacity": {"max_price_per_host_hour": 2}}, ["max_price_per_host_hour", "local knows no prices", "command"]),
        ({"capacity": {"provider": "cloud"}}, ["capacity.provider", "trace", '"cloud"']),
        ({"elastic": {"mode": "stretch"}}, ["elastic.mode", "resize", "pause", '"stretch"']),
    ],
)
def test_a_bad_value_is_refused_with_its_key_what_was_given_and_what_is_allowed(
    values: dict[str, Any], parts: list[str]
) -> None:
    message = refusal(MINIMAL | values)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_each_problem_has_its_own_line() -> None:
    lines = refusal({"run_name": "a", "steps": 0, "sede": 1}).split("\n")
    assert len(lines) == 2
    assert {line.split(":")[0] for line in lines} == {"steps", "unknown key 'sede'"}


@pytest.mark.parametrize(
    "text",
    [
        "run_name: first\nsteps: 100\nnum_hosts: {max: 3}\n",
        '{"run_name": "first", "steps": 100, "num_hosts": {"max": 3}}',
    ],
)
def test_yaml_and_json_mean_the_same(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path / "config", text)) == parse_config(MINIMAL | {"num_hosts": {"max": 3}})


def test_overrides_go_before_the_file_and_reach_into_groups_that_the_file_lacks(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", "run_name: first\nsteps: 100\ncheckpoint: {keep_last_n: 5}\n")
    config = load_config(
        path, ["steps=7", "checkpoint.save_interval_steps=2", "data.path=null", "job_params.dims=[1, 2]"]
    )
    assert config.steps == 7
    assert (config.checkpoint.keep_last_n, config.checkpoint.save_interval_steps) == (5, 2)
    assert config.data.path is None
    assert config.job_params == {"dims": [1, 2]}


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("steps", "--set takes key=value"),
        ("=5", "--set takes key=value"),
        ("a..b=5", "--set takes key=value"),
        ("steps.more=5", "'steps' is not a group of settings but 100"),
        ("steps=[1", "the value is not valid YAML"),
        ("num_hosts.maks=5", "did you mean 'num_hosts.max'?"),
    ],
)
def test_an_override_that_cannot_be_applied_is_quoted(tmp_path: Path, override: str, part: str) -> None:
    path = write(tmp_path / "config.yaml", "run_name: first\nsteps: 100\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"steps: [1", "neither YAML nor JSON"), (b"- 1\n", "holds a list"), (b"\xff\xfe\xff", "cannot read")],
)
def test_a_file_that_is_not_a_mapping_is_refused_with_its_name(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=part) as caught:
        load_config(path)
    assert "broken.yaml" in str(caught.value)


def test_a_missing_file_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="run_name is missing"):
        load_config(write(tmp_path / "empty.yaml", ""))


def test_a_config_cannot_be_changed_once_made() -> None:
    config = parse_config(MINIMAL)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.steps = 5
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.num_hosts.max = 5


def test_a_config_survives_json() -> None:
    config = parse_config(MINIMAL | {"job_params": {"layers": 2}, "num_hosts": {"min": 2}})
    assert parse_config(json.loads(config.model_dump_json())) == config


def test_every_setting_is_documented() -> None:
    undocumented = [name for name, field in leaf_fields(RunConfig) if not field.description]
    assert undocumented == []


def test_only_name_and_steps_have_no_default() -> None:
    assert [name for name, field in leaf_fields(RunConfig) if field.is_required()] == ["run_name", "steps"]


def test_settings_fixed_for_the_life_of_a_run_are_named_with_both_values() -> None:
    old = parse_config(MINIMAL | {"job_params": {"layers": 2}})
    new = parse_config(MINIMAL | {"seed": 3, "job_params": {"layers": 4, "width": 8}, "optimizer": {"b1": 0.5}})
    assert differing_keys(old, new) == [
        "job_params.layers: 2 -> 4",
        "job_params.width: null -> 8",
        "optimizer.b1: 0.9 -> 0.5",
        "seed: 0 -> 3",
    ]


def test_settings_about_size_and_operation_may_change_when_a_run_goes_on() -> None:
    new = parse_config(
        {
            "run_name": "first",
            "steps": 200,
            "storage": "elsewhere",
            "num_hosts": {"max": 9},
            "engine": {"devices_per_host": 8},
            "elastic": {"max_failures": 9},
            "parallelism": {"ici_fsdp_parallelism": 2},
            "checkpoint": {"keep_last_n": 1},
        }
    )
    assert differing_keys(parse_config(MINIMAL), new) == []
    assert set(RunConfig.model_fields) >= CHANGEABLE_ON_RESUME
