"""The configuration of a run: the only home of defaults, with unit and range beside each field.

Written once into `run.json`; everything else receives values from here. Loaded from YAML or JSON plus
`--set a.b=value` overrides by `load_config`. Imports neither jax nor prefect, so that a bad configuration is
refused in well under a second.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trainer.errors import ConfigError

RUN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

Parallelism = Annotated[int, Field(ge=-1)]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    # Infinities would not survive the way through JSON to the workers.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        # YAML reads `yes` and `on` as true, and Python takes true for 1.
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("no_boolean", "true and false are no values of this setting")
        return value


class DataConfig(Section):
    path: str | None = None
    """Text files to train on: a file, a directory or a glob. None: the Python standard library's own sources."""


class NumHostsConfig(Section):
    min: int = Field(default=1, ge=1)
    """Below this many usable hosts the run waits for capacity instead of training."""
    max: int = Field(default=4, ge=1)
    """The run never uses more hosts. The pool starts with this many, unless `capacity.provider` says otherwise."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"num_hosts.min ({self.min}) is larger than num_hosts.max ({self.max})")
        return self


class EngineConfig(Section):
    kind: Literal["local"] = "local"
    """Where host agents are placed. `local`: on this machine, each host its own process group."""
    platform: Literal["cpu", "gpu", "tpu"] = "cpu"
    """JAX backend of the workers. `cpu` gives each host `devices_per_host` virtual devices."""
    devices_per_host: int = Field(default=2, ge=1, le=1024)
    """Devices that each host contributes."""
    hosts_per_slice: int = Field(default=1, ge=1)
    """Hosts joined by fast links; the failure domain: losing one host removes its slice."""
    replacement_delay_seconds: float = 5.0
    """A lost host comes back after this long, as a new pod would. 0: at once; negative: never."""
    device_memory_bytes: int | None = Field(default=None, gt=0)
    """Memory limit per device that plans respect. None: this machine's memory divided by its devices."""
    device_flops_per_second: float = Field(default=2e10, gt=0)
    """Sustained rate of one device, for the planner's cost model (it ranks meshes; it predicts nothing)."""
    ici_bytes_per_second: float = Field(default=4e9, gt=0)
    """Bandwidth between devices of one slice, for the cost model."""
    dcn_bytes_per_second: float = Field(default=5e8, gt=0)
    """Bandwidth between slices, for the cost model."""


class CapacityConfig(Section):
    """Where the number of hosts on offer comes from."""

    provider: Literal["local", "trace", "command"] = "local"
    """`local`: all of the pool, changed by `shoal capacity`. `trace`: a recording is replayed. `command`: a program is
    asked."""
    trace_path: str | None = None
    """For `trace`: a CSV file with lines `milliseconds,add|remove,node`."""
    trace_speed: float = Field(default=1.0, gt=0)
    """How many times faster than recorded the trace passes. Its time runs from the creation of the run."""
    trace_hosts: int | None = Field(default=None, ge=1)
    """Scale the trace so that its maximum becomes this many hosts. None: as recorded."""
    command: tuple[str, ...] = ()
    """For `command`: program and arguments. It prints `{"hosts": N, "price_per_host_hour": X}`; the price may be null
    or missing."""
    poll_seconds: float = Field(default=30.0, gt=0)
    """From the end of one question to `capacity.command` to the next."""
    command_timeout_seconds: float = Field(default=10.0, gt=0)
    """A command that takes longer is killed with all it started, and the last good answer stays."""
    max_price_per_host_hour: float | None = Field(default=None, gt=0)
    """At a higher price, in the command's currency, nothing counts as offered and the run waits. None: no limit."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.provider == "trace" and self.trace_path is None:
            raise ValueError("capacity.provider is trace: capacity.trace_path is needed")
        if self.provider == "command" and not (self.command and self.command[0]):
            raise ValueError(
                "capacity.provider is command: capacity.command is needed, a list of a program and its arguments"
            )
        if self.provider != "command" and self.max_price_per_host_hour is not None:
            raise ValueError(
                f"capacity.max_price_per_host_hour: capacity.provider {self.provider} knows no prices; allowed: command"
            )
        return self


class PoolConfig(Section):
    """A pool of hosts that outlives the runs it serves."""

    hosts: int = Field(default=4, ge=1)
    """The pool starts with this many hosts and never has more."""
    engine: EngineConfig = EngineConfig()
    """What its hosts are. Only runs whose own `engine` asks for such hosts are served."""
    contact_timeout_seconds: float = Field(default=10.0, gt=0)
    """A host that hears nothing from the run that commands it for this long kills the workers of that run."""
    keeper_timeout_seconds: float = Field(default=60.0, gt=0)
    """A host that hears nothing from the pool's keeper for this long ends itself and its workers."""
    capacity: CapacityConfig = CapacityConfig()
    """Where the number of its hosts comes from. `local`: `shoal pool --hosts N`."""


class ElasticConfig(Section):
    mode: Literal["resize", "pause"] = "resize"
    """`resize`: go on at once with the survivors. `pause`: wait for the lost hosts, same topology."""
    max_failures: int = Field(default=3, ge=0)
    """Failures without progress after which the run ends. Refilled whenever a step is committed."""
    wait_for_capacity_seconds: float = Field(default=3600.0, ge=0)
    """How long to wait for `num_hosts.min` usable hosts before the run ends with exit code 4."""
    grow_after_stable_seconds: float = Field(default=0.0, ge=0)
    """A host that appears counts after it has been usable for this long, unless fewer than `num_hosts.min` others are.
    0: at once."""
    min_dwell_seconds: float = Field(default=0.0, ge=0)
    """A group trains at least this long before it grows. Losses and leaving hosts are acted on at once all the same."""
    grow_payback_seconds: float | None = Field(default=None, gt=0)
    """A larger group must save the time that the resize costs within this long, or by the last step if that is sooner.
    None: any larger group will do."""
    contact_timeout_seconds: float = Field(default=10.0, gt=0)
    """A host agent that hears nothing from its controller for this long ends itself and its workers."""
    start_timeout_seconds: float = Field(default=180.0, gt=0)
    """From the order to start a worker to its rendezvous."""
    restore_timeout_seconds: float = Field(default=1800.0, gt=0)
    """From rendezvous to the first finished step: restore and compile."""
    step_timeout_seconds: float = Field(default=600.0, gt=0)
    """Between two finished steps; also for a group to stop after it was asked to, save included."""


class ParallelismConfig(Section):
    """Sizes of the mesh axes. -1: the planner decides, anew for each topology."""

    dcn_data_parallelism: Parallelism = -1
    """Replicas across slices."""
    dcn_fsdp_parallelism: Parallelism = 1
    """Shards of the train state across slices. 1 keeps a full copy in each slice; -1: the planner decides."""
    ici_fsdp_parallelism: Parallelism = -1
    """Shards of the train state inside a slice."""
    ici_tensor_parallelism: Parallelism = 1
    """Tensor parallelism inside a slice."""

    @model_validator(mode="after")
    def _not_zero(self) -> Self:
        for name in type(self).model_fields:
            if getattr(self, name) == 0:
                raise ValueError(f"parallelism.{name} is 0; allowed: -1 (the planner decides) or a number from 1 up")
        return self


class CheckpointConfig(Section):
    save_interval_steps: int = Field(default=50, ge=1)
    """Steps between checkpoints, which is also the length of a segment. The last step is always saved."""
    keep_last_n: int = Field(default=3, ge=1)
    """Newest committed checkpoints to keep."""
    keep_every: int | None = Field(default=None, ge=1)
    """Keep each committed step that is a multiple of this for ever."""
    async_save: bool = True
    """Write the checkpoint while the next segment trains."""
    compression: Literal["zstd", "none"] = "zstd"
    """Compression of array chunks, passed to Orbax."""


class SnapshotConfig(Section):
    """The memory tier. Read by the planner and refused when unsupported values are asked for."""

    interval_steps: Literal["auto", "off"] | Annotated[int, Field(ge=1)] = "off"
    """Steps between snapshots to host memory. Only `off` works in this version."""
    overhead_budget: float = Field(default=0.01, gt=0, lt=1)
    """Share of throughput that snapshots may cost when `interval_steps` is `auto`."""

    @model_validator(mode="after")
    def _supported(self) -> Self:
        if self.interval_steps != "off":
            raise ValueError("snapshot.interval_steps: the memory tier does not exist in this version; allowed: off")
        return self


class MetricsConfig(Section):
    """Live metrics for Prometheus, served by the flow's process while the run lives."""

    port: int | None = Field(default=None, ge=1, le=65535)
    """TCP port for Prometheus to scrape. None: no metrics are served."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. `0.0.0.0`: every network of this machine."""


class OptimizerConfig(Section):
    """AdamW with linear warm-up and cosine decay: a function of the step number alone."""

    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up from 0."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Step at which the decay ends. None: `steps` at the time the run was created."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate after the decay, as a fraction of the peak."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    b2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm limit. None: no clipping."""


class RunConfig(Section):
    """Everything that defines a training run."""

    run_name: str = Field(pattern=RUN_NAME_PATTERN)
    """Names the run and its directory: letters, digits, dot, dash and underscore, at most 100."""
    storage: str = Field(default="runs", min_length=1)
    """Directory under which run directories live."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seeds parameters, dropout and the sample order."""
    steps: int = Field(ge=1, lt=2**31)
    """Optimizer steps of the whole run."""
    global_batch_size: int = Field(default=16, ge=1)
    """Samples per step, whatever the number of hosts."""
    job: str = "lm"
    """What is trained: `lm`, or your own `package.module:Class`."""
    job_params: Mapping[str, Any] = Field(default_factory=dict)
    """Parameters of the job, validated by the job itself."""
    data: DataConfig = DataConfig()
    num_hosts: NumHostsConfig = NumHostsConfig()
    engine: EngineConfig = EngineConfig()
    capacity: CapacityConfig = CapacityConfig()
    elastic: ElasticConfig = ElasticConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        scheme, separator, _ = self.storage.partition("://")
        if separator:
            raise ValueError(f"storage: {scheme}:// is not supported in this version; allowed: a local path")
        if self.num_hosts.max < self.engine.hosts_per_slice:
            raise ValueError(
                f"num_hosts.max ({self.num_hosts.max}) is smaller than engine.hosts_per_slice "
                f"({self.engine.hosts_per_slice}): not one whole slice could exist"
            )
        whole_slices = self.num_hosts.max // self.engine.hosts_per_slice
        if whole_slices * self.engine.hosts_per_slice < self.num_hosts.min:
            raise ValueError(
                f"num_hosts.min ({self.num_hosts.min}) cannot be reached: num_hosts.max ({self.num_hosts.max}) holds "
                f"only {whole_slices} whole slices of engine.hosts_per_slice ({self.engine.hosts_per_slice})"
            )
        return self


# What may differ when a run of the same name is started again. Everything else is fixed for the life of a run.
# The path of the data may differ, its content may not: that is compared by its hash.
CHANGEABLE_ON_RESUME = frozenset(
    {
        "storage",
        "data",
        "steps",
        "num_hosts",
        "engine",
        "capacity",
        "elastic",
        "parallelism",
        "checkpoint",
        "snapshot",
        "metrics",
    }
)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML or JSON file, apply `a.b=value` overrides (values are YAML) and validate.

    Raises:
        ConfigError: unreadable file, malformed text, unknown key (the nearest valid name is quoted) or bad value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config file {str(path)!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the config file {str(path)!r}: it is not UTF-8 text") from error
    try:
        values = yaml.safe_load(text)  # JSON is a subset of YAML
    except (yaml.YAMLError, ValueError) as error:  # ValueError: looks like a date or number and is none, as 2024-13-45
        raise ConfigError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; a mapping of keys to values is needed")
    for override in overrides:
        apply_override(values, override)
    return parse_config(values)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Apply one `a.b=value` to a nested mapping, in place.

    Raises:
        ConfigError: no `=`, empty key, or the path runs through something that is not a mapping.
    """
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set takes key=value, for example --set steps=100; given: {override!r}")
    *parents, last = key.split(".")
    for parent in parents:
        child = values.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {parent!r} is not a group of settings but {child!r}")
        values = child
    try:
        values[last] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"--set {override}: the value is not valid YAML; put text with special characters in quotes of its own"
        ) from error


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Validate plain values into a `RunConfig`.

    Raises:
        ConfigError: one line per problem: key, what was given, what is allowed.
    """
    try:
        return RunConfig.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(describe_problem(RunConfig, problem) for problem in error.errors())) from error


def describe_problem(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    """One line for one pydantic problem, with the nearest valid name for an unknown key."""
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        # A key at the wrong level is as common as a typo: look for it in the whole tree as well.
        elsewhere = [full for full in _all_keys(model) if full.split(".")[-1] == location[-1]]
        candidates = elsewhere or [".".join([*location[:-1], name]) for name in nearest]
        if candidates:
            return f"unknown key {key!r}: did you mean {candidates[0]!r}?"
        return f"unknown key {key!r}" + (f": allowed here: {', '.join(sorted(known))}" if known else "")
    if problem["type"] == "missing":
        return f"{key} is missing: it has no default"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not key or problem["type"] == "value_error":
        return message
    if key == "run_name" and problem["type"] == "string_pattern_mismatch":
        message = "allowed: letters, digits, '.', '-' and '_', starting with a letter or digit, at most 100"
    elif problem["type"] == "string_type":
        message = "a text is needed; put what looks like a number or a date in quotes"
    elif problem["type"] == "model_type" and (known := _known_keys(model, location)):
        message = f"this is a group of settings: {', '.join(known)}"
    return f"{key}: {message} (given: {json.dumps(problem['input'], default=str, ensure_ascii=False)})"


def _known_keys(model: type[BaseModel], parents: Sequence[str]) -> list[str]:
    for parent in parents:
        field = model.model_fields.get(parent)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []  # a user's own parameters may nest in ways that name no single model
        model = field.annotation
    return list(model.model_fields)


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _all_keys(field.annotation, prefix + name + ".")
    return keys


def differing_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """Fixed settings (those not in `CHANGEABLE_ON_RESUME`) whose values differ, as `key: old -> new`."""

    def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, Mapping):
                flat |= flatten(value, f"{prefix}{key}.")
            else:
                flat[prefix + key] = value
        return flat

    before, after = (
        flatten(config.model_dump(mode="json", exclude=set(CHANGEABLE_ON_RESUME))) for config in (old, new)
    )
    return [
        f"{key}: {json.dumps(before.get(key))} -> {json.dumps(after.get(key))}"
        for key in sorted(before | after)
        if before.get(key) != after.get(key)
    ]
