"""What the documentation says of settings is what the code says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import trainer
from deployments.reference import reference, rows
from trainer.jobs.language_model import PRESETS, LanguageModelParams, Shape

DOCS = Path(trainer.__file__).parents[1] / "docs"


def table(columns: list[str], lines: list[str]) -> str:
    return "\n".join([f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *lines])


def test_the_configuration_reference_is_as_it_is_made() -> None:
    assert (DOCS / "configuration.md").read_text() == reference(), "python -m deployments.reference renews it"


def test_the_parameters_of_the_built_in_job_are_documented() -> None:
    made = table(["key", "default", "allowed", "meaning"], list(rows(LanguageModelParams, "job_params.")))
    assert made in (DOCS / "jobs.md").read_text(), f"docs/jobs.md should hold\n{made}"


def test_the_presets_of_the_built_in_job_are_documented() -> None:
    names = [field.name for field in dataclasses.fields(Shape)]
    lines = [
        f"| `{preset}` | {' | '.join(f'{value:.9g}' for value in dataclasses.astuple(shape))} |"
        for preset, shape in PRESETS.items()
    ]
    made = table(["preset", *(f"`{name}`" for name in names)], lines)
    assert made in (DOCS / "jobs.md").read_text(), f"docs/jobs.md should hold\n{made}"
