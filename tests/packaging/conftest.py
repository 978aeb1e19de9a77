"""The world of these tests: what we ship, built once and installed where the checkout cannot be seen."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.command import plain_environment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the checkout without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(build, env=plain_environment(), capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@dataclass(frozen=True, kw_only=True)
class Installation:
    python: Path
    shoal: Path
    packages: Path


@pytest.fixture(scope="session")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel in a virtual environment of its own, which borrows our dependencies but not our editable install."""
    folder = tmp_path_factory.mktemp("installation") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], env=plain_environment(), check=True)
    python = folder / "bin" / "python"
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", *options, wheel],
        env=plain_environment(),
        check=True,
    )
    (packages,) = folder.glob("lib/python3.*/site-packages")
    # A path that a .pth file adds has its own .pth files ignored, and the editable install is one.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installation(python=python, shoal=folder / "bin" / "shoal", packages=packages)
