"""The configuration reference, made from the models: `python -m deployments.reference > docs/configuration.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from deployments.serve_config import ScheduleConfig, ServeConfig, ServedRun
from trainer.config import CHANGEABLE_ON_RESUME, PoolConfig, RunConfig

_HEADER = """\
# Configuration

A YAML or JSON file, with `--set key=value` on top. Unknown keys are refused with the nearest valid name. Keys marked
↻ may differ when a run of the same name is started again; all others are fixed for the life of a run.

<!-- Made by `python -m deployments.reference > docs/configuration.md`; a test compares. -->

"""
_SERVE_HEADER = """\
## shoal serve

The YAML file of `shoal serve`; see [serving.md](serving.md). `runs` is a list: each entry has the keys `runs[].…`.

"""
_TABLE = """\
| key | default | allowed | meaning |
|---|---|---|---|
"""


def rows(model: type[BaseModel], prefix: str = "", *, changeable: bool = False) -> Iterator[str]:
    """Table lines of a model and the models inside it."""
    for name, field in model.model_fields.items():
        may_change = changeable or (model is RunConfig and name in CHANGEABLE_ON_RESUME)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from rows(field.annotation, f"{prefix}{name}.", changeable=may_change)
            continue
        mark = " ↻" if may_change else ""
        meaning = " ".join((field.description or "").split())
        yield f"| `{prefix}{name}`{mark} | {_default(field)} | {_allowed(model, name)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "`{}`"
    if field.default is PydanticUndefined:
        return "required"
    return f"`{json.dumps(field.default)}`"


def _allowed(model: type[BaseModel], name: str) -> str:
    schema = model.model_json_schema()["properties"][name]
    options = schema.get("anyOf", [schema])
    return " or ".join(_option(option) for option in options)


def _option(schema: dict[str, object]) -> str:
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        assert isinstance(values, list)
        return ", ".join(f"`{value}`" for value in values)
    bounds = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}
    text = ["section" if "$ref" in schema else str(schema.get("type", "any"))]
    text += [template.format(schema[key]) for key, template in bounds.items() if key in schema]
    return " ".join(text)


def reference() -> str:
    served = [
        *rows(ServeConfig),
        *rows(PoolConfig, "pool."),
        *rows(ServedRun, "runs[]."),
        *rows(ScheduleConfig, "runs[].schedule."),
    ]
    return f"{_HEADER}{_TABLE}" + "\n".join(rows(RunConfig)) + f"\n\n{_SERVE_HEADER}{_TABLE}" + "\n".join(served) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
