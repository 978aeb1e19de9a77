"""What is committed can be installed by anybody, anywhere: pinned, hashed, and free of traces of our machines."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.conftest import ROOT

PYTHONS = ["3.11", "3.12", "3.13"]


def locked() -> list[tuple[Requirement, list[str]]]:
    """Each pin of requirements.lock with its hashes."""
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    pins = []
    for line in text.splitlines():
        requirement, *hashes = line.split(" --hash=")
        pins.append((Requirement(requirement.strip()), [value.strip() for value in hashes]))
    return pins


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["dev"]]
    return [Requirement(text) for text in requirements + project["build-system"]["requires"]]


def test_every_line_of_the_lock_file_is_one_exact_version_with_its_hashes() -> None:
    pins = locked()
    assert len(pins) > 100
    for requirement, hashes in pins:
        (specifier,) = requirement.specifier
        assert (specifier.operator, requirement.url) == ("==", None)
        assert hashes, f"{requirement} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes)


def test_the_lock_file_names_no_index_and_no_address() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert re.findall(r"(?m)^.*(?:://|--index|--extra-index|--find-links|--trusted-host|^-).*$", text) == []


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_file_pins_what_the_project_asks_for_on_every_supported_python(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    pinned = {
        canonicalize_name(requirement.name): next(iter(requirement.specifier)).version
        for requirement, _ in locked()
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }
    for requirement in wanted():
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is locked at {version}: run `make lock`"


def test_nothing_that_is_committed_names_a_path_of_the_machine_it_was_written_on() -> None:
    traces = "|".join([re.escape(str(ROOT)), re.escape(sys.prefix), "/wor[k]/", "/roo[t]/"])
    found = subprocess.run(
        ["git", "-c", "safe.directory=*", "grep", "--line-number", "-I", "--extended-regexp", traces],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode in (0, 1), found.stderr
    assert found.stdout == ""
