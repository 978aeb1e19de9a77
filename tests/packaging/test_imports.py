"""What import-linter cannot say: what is really loaded when our modules are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import HEAVY, plain_environment
from tests.packaging.conftest import ROOT
from trainer.config import parse_config


def loaded_after(statement: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh interpreter that ran the statement."""
    script = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script], env=plain_environment(), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout))


def modules_of(package: str) -> list[str]:
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / package).rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


def test_the_orchestrator_loads_prefect_and_none_of_the_packages_that_compute() -> None:
    loaded = loaded_after("import flows.train, deployments.cli, trainer.control.controller")
    assert loaded & HEAVY == {"prefect"}


def test_the_command_line_loads_none_of_them() -> None:
    assert loaded_after("import deployments.cli") & HEAVY == set()


def test_every_module_of_the_library_can_be_loaded_without_prefect() -> None:
    assert "prefect" not in loaded_after(f"import {', '.join(modules_of('trainer'))}")


def test_every_module_of_the_library_outside_compute_and_jobs_can_be_loaded_without_jax() -> None:
    light = [name for name in modules_of("trainer") if name.split(".")[1:2] not in (["compute"], ["jobs"])]
    assert "trainer.control.controller" in light
    assert loaded_after(f"import {', '.join(light)}") & HEAVY == set()


@pytest.mark.parametrize(
    ("arguments", "opens_a_backend"),
    [(["-m", "trainer.compute.describe"], False), (["-c", "import jax; jax.devices()"], True)],
)
def test_describing_a_job_opens_no_backend(arguments: list[str], opens_a_backend: bool, tmp_path: Path) -> None:
    """JAX is told to use a backend that does not exist, so whoever opens one fails; asking for devices does."""
    (tmp_path / "text.txt").write_text("text " * 100)
    config = parse_config({"run_name": "described", "steps": 3, "data": {"path": "text.txt"}})
    ran = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=tmp_path,
        input=config.model_dump_json(),
        env=plain_environment() | {"JAX_PLATFORMS": "no_such_backend"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode != 0) == opens_a_backend, ran.stderr
