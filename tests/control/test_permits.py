"""What a served deployment may use: nothing leads out of what is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.config import RunConfig
from trainer.errors import RefusedError
from trainer.permits import PERMITS_VARIABLE, Permits, permits_of


@pytest.fixture
def permits(tmp_path: Path) -> Permits:
    (tmp_path / "runs").mkdir()
    (tmp_path / "texts").mkdir()
    return Permits(
        jobs=("lm", "mine:Job"),
        storage_roots=(tmp_path / "runs",),
        data_roots=(tmp_path / "texts",),
        commands=(("spot-hosts", "--zone", "a"),),
    )


def config(tmp_path: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate({"run_name": "r", "steps": 1, "storage": str(tmp_path / "runs")} | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"storage": "runs/team"},
        {"storage": "runs/../runs"},
        {"job": "mine:Job"},
        {"data": {"path": "texts"}},
        {"data": {"path": "texts/**/*.txt"}},
        {"metrics": {"port": 9000}},
        {"capacity": {"provider": "trace", "trace_path": "texts/spot.csv"}},
        {"capacity": {"provider": "command", "command": ["spot-hosts", "--zone", "a"]}},
        {"metrics": {"host": "0.0.0.0"}},  # says where, but opens nothing
    ],
)
def test_accepts_what_is_listed(
    tmp_path: Path, permits: Permits, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    permits.check(config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"storage": "elsewhere"}, "allow.storage_roots"),
        ({"storage": "runs/../elsewhere"}, "allow.storage_roots"),
        ({"storage": "runs-too"}, "allow.storage_roots"),
        ({"storage": "runs/link"}, "allow.storage_roots"),
        ({"job": "mine:Other"}, "allow.jobs"),
        ({"data": {"path": "/etc/passwd"}}, "allow.data_roots"),
        ({"data": {"path": "texts/../*"}}, "allow.data_roots"),
        ({"data": {"path": "texts/link/*.txt"}}, "allow.data_roots"),
        ({"metrics": {"port": 9000, "host": "0.0.0.0"}}, "allow.metrics_hosts"),
        ({"capacity": {"provider": "trace", "trace_path": "/etc/passwd"}}, "allow.data_roots"),
        ({"capacity": {"provider": "trace", "trace_path": "texts/../trace.csv"}}, "allow.data_roots"),
        ({"capacity": {"trace_path": "/etc/passwd"}}, "allow.data_roots"),
        ({"capacity": {"provider": "command", "command": ["rm", "-r", "."]}}, "allow.commands"),
        ({"capacity": {"provider": "command", "command": ["spot-hosts", "--zone", "b"]}}, "allow.commands"),
        ({"capacity": {"provider": "command", "command": ["spot-hosts"]}}, "allow.commands"),
        ({"capacity": {"command": ["rm"]}}, "allow.commands"),
    ],
)
def test_refuses_the_rest_and_says_what_is_listed(
    tmp_path: Path, permits: Permits, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for root in ("runs", "texts"):
        (tmp_path / root / "link").symlink_to("/tmp")
    with pytest.raises(RefusedError, match=key):
        permits.check(config(tmp_path, **changes))


def test_reach_the_flow_process_through_the_environment(permits: Permits) -> None:
    assert permits_of({PERMITS_VARIABLE: permits.model_dump_json()}) == permits
    assert permits_of({}) is None
