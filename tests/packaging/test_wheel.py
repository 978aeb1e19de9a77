"""What we ship works where it is installed, from a folder that has a `tasks/` and a `flows/` of its own."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.cli.command import CommandLine
from tests.packaging.conftest import ROOT, Installation

PACKAGES = {"deployments", "flows", "tasks", "trainer"}


def test_the_wheel_holds_the_four_packages_whole_and_nothing_else(wheel: Path) -> None:
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == sources
    assert {name.split("/")[0] for name in shipped} == PACKAGES


def test_the_wheel_has_one_command_and_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert archive.read(entry_points).decode().split() == [
            "[console_scripts]",
            "shoal",
            "=",
            "deployments.cli:main",
        ]
        lines = archive.read(metadata).decode().splitlines()
    assert "Requires-Python: <3.14,>=3.11" in lines
    assert any(line.startswith("Requires-Dist: prefect") for line in lines)


@pytest.fixture
def hostile_folder(tmp_path: Path) -> Path:
    """A user's project: a job, and packages named like ours that no process of ours may import."""
    folder = tmp_path / "project"
    for name in ("tasks", "flows", "trainer"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('the {name}/ of the working directory')\n")
    shutil.copy(ROOT / "examples" / "quadratic.py", folder / "myjob.py")
    config = {
        "run_name": "mine",
        "steps": 3,
        "job": "myjob:LinearRegression",
        "num_hosts": {"max": 1},
        "engine": {"devices_per_host": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_the_installed_command_is_not_the_checkout(installation: Installation, hostile_folder: Path) -> None:
    where = CommandLine(
        folder=hostile_folder, prefect_home=hostile_folder.parent / "prefect", command=[str(installation.python), "-P"]
    )
    finished = where("-c", "import deployments, flows, tasks, trainer; print(trainer.__path__[0])")
    assert finished.stdout.strip() == str(installation.packages / "trainer")


@pytest.mark.parametrize("form", ["shoal", "python -m deployments.cli"])
def test_a_users_own_tasks_and_flows_shadow_nothing(
    installation: Installation, hostile_folder: Path, form: str
) -> None:
    command = [str(installation.shoal)] if form == "shoal" else [str(installation.python), "-m", "deployments.cli"]
    shoal = CommandLine(folder=hostile_folder, prefect_home=hostile_folder.parent / "prefect", command=command)
    helped = shoal("--help")
    assert (helped.exit_code, helped.stderr) == (0, "")
    assert "train" in helped.stdout
    planned = shoal("plan", "config.yaml", "--json")
    assert (planned.exit_code, planned.stderr) == (0, "")
    assert json.loads(planned.stdout)["hosts"] == ["host-0"]
    trained = shoal("train", "config.yaml")
    assert trained.exit_code == 0, trained.stderr
    assert (hostile_folder / "runs" / "mine" / "commits" / "3.1.json").exists()
    assert trained.left_behind == ()
