"""The world of these tests: one command in an empty folder, and one finished run on 1 host with 1 device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.command import CommandLine, Finished

# Small enough for a run of seconds: 257 samples of 16 bytes.
TEXT = "the quick brown fox jumps over the lazy dog, then rests. " * 73
BASE: dict[str, Any] = {
    "run_name": "first",
    "storage": "storage",
    "steps": 7,
    "global_batch_size": 4,
    "job": "lm",
    "job_params": {"preset": "0.5m", "seq_len": 16},
    "data": {"path": "text.txt"},
    "num_hosts": {"max": 1},
    "engine": {"devices_per_host": 1},
    "checkpoint": {"save_interval_steps": 3, "keep_last_n": 10},
}


def furnish(folder: Path, **changed: Any) -> Path:
    """A folder with config.yaml and text.txt, and nothing else."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(BASE | changed, allow_unicode=True), encoding="utf-8")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def shoal(tmp_path: Path) -> CommandLine:
    """The command in a fresh folder that holds config.yaml and text.txt."""
    return CommandLine(folder=furnish(tmp_path / "folder"), prefect_home=tmp_path / "prefect")


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    shoal: CommandLine
    trained: Finished
    directory: Path


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """7 steps with a checkpoint each 3, under a path that a shell, a terminal or a URL could misread."""
    base = tmp_path_factory.mktemp("finished")
    folder = furnish(base / "my runs [/bold] größer")
    shoal = CommandLine(folder=folder, prefect_home=base / "prefect")
    trained = shoal("train", "config.yaml")
    return FinishedRun(shoal=shoal, trained=trained, directory=folder / "storage" / "first")
