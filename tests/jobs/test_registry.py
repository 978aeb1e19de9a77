"""From names in a configuration to jobs, with user modules written to disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.errors import ConfigError, UserCodeError
from trainer.jobs.language_model import LanguageModel
from trainer.jobs.registry import make_job, resolve

Module = Callable[[str], str]
_numbers = itertools.count()

WHOLE_JOB = """
from pydantic import BaseModel, Field, field_validator

class Job:
    class Params(BaseModel, extra="forbid"):
        width: int = Field(default=1, ge=1)
        name: str = "job"
        @field_validator("name")
        @classmethod
        def check(cls, value):
            if value == "bad":
                raise ValueError("this name is taken")
            if value == "bug":
                raise KeyError("a bug in a validator")
            return value
    tokens_per_row = 1
    axis_rules = {"features": "fsdp"}
    def __init__(self, params): self.params = params
    def init(self, key): ...
    def logical_axes(self): ...
    def loss(self, params, batch, weights, keys, *, remat): ...
    def data(self, path): ...
    def flops_per_row(self): ...
    def activation_bytes_per_row(self): ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Writes a module under a name of its own, importable for the length of the test."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        name = f"user_module_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def test_lm_is_the_built_in_language_model() -> None:
    assert resolve("lm") is LanguageModel
    job = make_job("lm", {"seq_len": 9})
    assert isinstance(job, LanguageModel)
    assert job.tokens_per_row == 9


def test_a_job_of_ones_own_is_found_by_module_and_class(module: Module) -> None:
    job = make_job(f"{module(WHOLE_JOB)}:Job", {"width": 3})
    assert job.params.width == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("job", ["", "transformer", "a/b.py:Job", "module:", ":Job", "module:Job.Inner", "mod ule:Job"])
def test_a_malformed_name_is_refused_with_what_is_allowed(job: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(job)
    assert str(refused.value) == f"job: {job!r} is not known; allowed: 'lm' or 'package.module:Class'"


@pytest.mark.parametrize(
    ("job", "missing"),
    [("no_such_package.jobs:Job", "no_such_package"), ("json.no_such_module:Job", "json.no_such_module")],
)
def test_a_module_that_does_not_exist_is_a_mistake_in_the_configuration(job: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no module '{missing}' on sys.path"):
        resolve(job)


@pytest.mark.parametrize(
    ("source", "summary", "traceback"),
    [
        ("import numpy_ng", "ModuleNotFoundError: No module named 'numpy_ng'", "import numpy_ng"),
        ("def broken(:\n", "SyntaxError", "def broken(:"),
        ("1 / 0", "ZeroDivisionError: division by zero", "1 / 0"),
        ("import sys; sys.exit(1)", "SystemExit: 1", "sys.exit(1)"),
    ],
    ids=["missing dependency", "syntax error", "exception", "exit"],
)
def test_an_error_while_importing_is_the_users_and_shows_its_traceback(
    module: Module, source: str, summary: str, traceback: str
) -> None:
    name = module(source)
    with pytest.raises(UserCodeError) as failed:
        resolve(f"{name}:Job")
    assert str(failed.value).startswith(f"job '{name}:Job': importing '{name}' failed: {summary}")
    assert traceback in failed.value.details


def test_a_missing_class_is_told_from_something_that_is_no_class(module: Module) -> None:
    name = module("Job = 3")
    with pytest.raises(ConfigError, match=f"module '{name}' has no 'Other'$"):
        resolve(f"{name}:Other")
    with pytest.raises(ConfigError, match=f"module '{name}' has a int, not a class, named 'Job'$"):
        resolve(f"{name}:Job")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("def init", "def initialise", "missing init$"),
        ("def data", "data = 3\n    def read", "missing data$"),
        ("class Params(BaseModel", "class Params(dict", "Params must be a pydantic BaseModel class"),
        (", *, remat)", ")", r"loss must accept \(params, batch, weights, keys, \*, remat\): got an unexpected"),
    ],
)
def test_a_class_that_is_no_training_job_is_refused_with_what_it_lacks(
    module: Module, old: str, new: str, problem: str
) -> None:
    assert old in WHOLE_JOB
    source = WHOLE_JOB.replace(old, new).replace('(dict, extra="forbid")', "(dict)")
    with pytest.raises(ConfigError, match=f"is not a TrainingJob: .*{problem}"):
        resolve(f"{module(source)}:Job")


def test_everything_missing_is_named_at_once(module: Module) -> None:
    name = module("class Job: pass")
    with pytest.raises(ConfigError) as refused:
        resolve(f"{name}:Job")
    assert str(refused.value) == (
        f"job '{name}:Job' is not a TrainingJob: missing activation_bytes_per_row, data, flops_per_row, init, "
        "logical_axes, loss; Params must be a pydantic BaseModel class"
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("tokens_per_row = 1", "", r"tokens_per_row must be a whole number from 1 up \(given: None\)"),
        ("tokens_per_row = 1", "tokens_per_row = 0", r"tokens_per_row must be a whole number from 1 up \(given: 0\)"),
        ('"features": "fsdp"', '"features": "data"', r"axis_rules must map axis names to 'fsdp', 'tensor', 'none'"),
    ],
)
def test_attributes_are_checked_on_the_made_job_because_init_may_set_them(
    module: Module, old: str, new: str, problem: str
) -> None:
    assert old in WHOLE_JOB
    with pytest.raises(ConfigError, match=problem):
        make_job(f"{module(WHOLE_JOB.replace(old, new))}:Job", {})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"width": 0}, "job_params.width: Input should be greater than or equal to 1 (given: 0)"),
        ({"widht": 2}, "unknown key 'job_params.widht': did you mean 'job_params.width'?"),
        ({"name": "bad"}, "job_params.name: this name is taken"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_with_their_key(
    module: Module, params: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_job(f"{module(WHOLE_JOB)}:Job", params)
    assert str(refused.value) == message


def test_every_problem_of_the_parameters_has_its_line(module: Module) -> None:
    with pytest.raises(ConfigError) as refused:
        make_job(f"{module(WHOLE_JOB)}:Job", {"width": "wide", "depth": 1})
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("source", "params"),
    [
        (WHOLE_JOB, {"name": "bug"}),
        (WHOLE_JOB.replace("self.params = params", 'raise KeyError("a bug in the constructor")'), {}),
    ],
    ids=["validator", "constructor"],
)
def test_a_bug_in_validator_or_constructor_is_the_users_with_traceback(
    module: Module, source: str, params: dict[str, object]
) -> None:
    with pytest.raises(UserCodeError, match="cannot be made from its parameters: KeyError: 'a bug in") as failed:
        make_job(f"{module(source)}:Job", params)
    assert "Traceback" in failed.value.details
