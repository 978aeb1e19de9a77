"""From the configuration's `job` and `job_params` to a `TrainingJob`.

Runs the user's code: the import of the module and the constructor.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

import pydantic
from pydantic import BaseModel

from trainer.config import describe_problem
from trainer.errors import ConfigError, ShoalError, UserCodeError
from trainer.jobs.protocol import TrainingJob
from trainer.planning.footprint import AxisRule

BUILT_IN = {"lm": "trainer.jobs.language_model:LanguageModel"}

_METHODS = sorted(name for name, value in vars(TrainingJob).items() if inspect.isfunction(value) and name[0] != "_")
_PATTERN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def resolve(job: str) -> type[TrainingJob]:
    """The class that `job` names: `lm`, or `package.module:Class` found on `sys.path`.

    Raises:
        ConfigError: malformed, no such module, no such class, or the class is not a `TrainingJob`.
        UserCodeError: the module exists and importing it raised; `details` holds the traceback.
    """
    target = BUILT_IN.get(job, job)
    if not _PATTERN.fullmatch(target):
        raise ConfigError(
            f"job: {job!r} is not known; allowed: {', '.join(map(repr, BUILT_IN))} or 'package.module:Class'"
        )
    module_name, class_name = target.split(":")
    cls = getattr(_import(job, module_name), class_name, None)
    if not isinstance(cls, type):
        found = "has no" if cls is None else f"has a {type(cls).__name__}, not a class, named"
        raise ConfigError(f"job {job!r}: module {module_name!r} {found} {class_name!r}")
    if problems := _class_problems(cls):
        raise ConfigError(f"job {job!r} is not a TrainingJob: {'; '.join(problems)}")
    return cast(type[TrainingJob], cls)


def make_job(job: str, job_params: Mapping[str, Any]) -> TrainingJob:
    """Resolve, validate the parameters and construct.

    Raises:
        ConfigError: as `resolve`, or `job_params` does not fit: one line per problem.
        UserCodeError: as `resolve`, or the job's validators or constructor raised.
    """
    cls = resolve(job)
    # The extra level gives every problem its full key: job_params.dropout.
    wrapper = pydantic.create_model("JobParams", job_params=(cls.Params, ...))
    try:
        params = dict(wrapper.model_validate({"job_params": dict(job_params)}))["job_params"]
        made = cast(Callable[[BaseModel], TrainingJob], cls)(params)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_describe(wrapper, problem) for problem in error.errors())) from error
    except ShoalError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UserCodeError(
            f"job {job!r} cannot be made from its parameters: {type(error).__name__}: {error}",
            details=traceback.format_exc(),
        ) from error
    if problems := _instance_problems(made):
        raise ConfigError(f"job {job!r} is not a TrainingJob: {'; '.join(problems)}")
    return made


def _import(job: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself, or a package above it, is missing; anything else is missing from within it.
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"job {job!r}: there is no module {error.name!r} on sys.path (working directory: {os.getcwd()}); "
                "install it, or start from the directory that holds it"
            ) from error
        raise _import_failed(job, module_name, error) from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and a script may exit
        raise _import_failed(job, module_name, error) from error


def _import_failed(job: str, module_name: str, error: BaseException) -> UserCodeError:
    return UserCodeError(
        f"job {job!r}: importing {module_name!r} failed: {type(error).__name__}: {error}",
        details="".join(traceback.format_exception(error)),
    )


def _class_problems(cls: type) -> list[str]:
    missing = [name for name in _METHODS if not callable(getattr(cls, name, None))]
    params = getattr(cls, "Params", None)
    problems = [f"missing {', '.join(missing)}"] if missing else []
    if not (isinstance(params, type) and issubclass(params, BaseModel)):
        problems.append("Params must be a pydantic BaseModel class")
    if "loss" not in missing:
        try:
            loss = inspect.signature(getattr(cls, "loss"))  # noqa: B009  # mypy: a plain type has no loss
            loss.bind("self", "params", "batch", "weights", "keys", remat="none")
        except TypeError as error:
            problems.append(f"loss must accept (params, batch, weights, keys, *, remat): {error}")
    return problems


def _instance_problems(made: TrainingJob) -> list[str]:
    problems = []
    tokens = getattr(made, "tokens_per_row", None)
    if not isinstance(tokens, int) or tokens < 1:
        problems.append(f"tokens_per_row must be a whole number from 1 up (given: {tokens!r})")
    rules = getattr(made, "axis_rules", None)
    if not isinstance(rules, Mapping) or not set(rules.values()) <= set(get_args(AxisRule)):
        problems.append(
            f"axis_rules must map axis names to {', '.join(map(repr, get_args(AxisRule)))} (given: {rules!r})"
        )
    return problems


def _describe(wrapper: type[BaseModel], problem: Any) -> str:
    line = describe_problem(wrapper, problem)
    # A validator's own message comes without its key.
    return line if "job_params" in line else f"{'.'.join(map(str, problem['loc']))}: {line}"
