"""The configuration of a service: what is refused, and how that is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import deployments.serve
from deployments.serve import check_directory
from deployments.serve_config import ServeConfig, load_serve_config, load_served_runs
from trainer.errors import ConfigError, RefusedError

ALLOW = {"storage_roots": ["runs"]}


def load(tmp_path: Path, **values: Any) -> ServeConfig:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"allow": ALLOW, **values}))
    return load_serve_config(path)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"cron": "0 2 * * *"}, "timezone is missing"),
        ({"timezone": "UTC"}, "exactly one of cron and interval_seconds"),
        ({"timezone": "UTC", "cron": "0 2 * * *", "interval_seconds": 60}, "exactly one of cron and interval_seconds"),
        ({"timezone": "Mars/Olympus", "cron": "0 2 * * *"}, "'Mars/Olympus' is no time zone"),
        ({"timezone": "UTC", "cron": "every night"}, "'every night' is no cron line"),
        ({"timezone": "UTC", "interval_seconds": 0}, "interval_seconds"),
        ({"timezone": "UTC", "interval_seconds": 60, "if_running": "double"}, "if_running"),
    ],
)
def test_a_bad_schedule_is_refused(tmp_path: Path, schedule: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, runs=[{"name": "one", "config": "run.yaml", "schedule": schedule}])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"runs": [{"name": "one", "config": "a"}, {"name": "one", "config": "b"}]}, "one is there twice"),
        ({"runs": [{"name": "train", "config": "a"}]}, "train is the name of the deployment"),
        ({"runs": [{"name": "a/b", "config": "a"}]}, "runs.0.name"),
        ({"prot": 4200}, "did you mean 'port'"),
        ({"heartbeat_seconds": 60, "lost_after_seconds": 120}, "three times heartbeat_seconds"),
        ({"allow": {"jobs": ["lm"]}}, "allow.storage_roots is missing"),
    ],
)
def test_a_bad_service_is_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, **values)


def test_run_configurations_are_read_beside_the_file_and_held_to_its_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"run_name": "r", "steps": 5, "storage": "runs"}))
    config = load(tmp_path, runs=[{"name": "one", "config": "run.yaml", "set": ["steps=7"]}])
    ((served, run),) = load_served_runs(tmp_path / "serve.yaml", config)
    assert (served.name, run.steps) == ("one", 7)

    outside = load(tmp_path, runs=[{"name": "one", "config": "run.yaml", "set": ["storage=elsewhere"]}])
    with pytest.raises(RefusedError, match="storage 'elsewhere' is not served here"):
        load_served_runs(tmp_path / "serve.yaml", outside)


@pytest.mark.parametrize("name", ["tasks/", "flows.py", "trainer/"])
def test_a_directory_whose_modules_would_be_taken_for_ours_is_refused(tmp_path: Path, name: str) -> None:
    check_directory(tmp_path)
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.touch()
    with pytest.raises(RefusedError, match=name.removesuffix("/").removesuffix(".py")):
        check_directory(tmp_path)
    check_directory(Path(deployments.serve.__file__).parent.parent)  # where they are ours
