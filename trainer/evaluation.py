"""What is asked of an evaluation and what it answers: the JSON of `python -P -m trainer.compute.evaluate`."""

from __future__ import annotations

import math
import signal
import sys

from pydantic import BaseModel, ConfigDict

from trainer.config import RunConfig
from trainer.description import ask
from trainer.processes import tethered


class EvaluationRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    config: RunConfig
    """The run's own, but for the path of the data."""
    checkpoint: str
    """Path of the checkpoint's directory."""
    own_data_hash: str | None
    """Content hash of the data that the run trains on, if those are to be used; None: other data."""
    trained_steps: int
    """Steps that the run trains or has trained, abandoned ones included."""
    batches: int


class Measurement(BaseModel):
    # A loss may be NaN or infinite, and the answer still has to be read.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    loss: float
    """Mean over the samples."""
    samples: int
    tokens: int
    data: str
    held_out: bool | None
    """Whether the run never trains on these samples. None: other data, of which nothing is known."""


class Evaluation(BaseModel):
    """How good the state of one checkpoint is. In JSON, a loss that is not finite is null."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_name: str
    step: int
    incarnation: int
    checkpoint: str
    """Relative to the run directory."""
    loss: float
    """Mean over the samples, in the unit of the job; of the language model, nats per token."""
    perplexity: float | None
    """Of the language model; None for other jobs."""
    samples: int
    tokens: int
    data: str
    held_out: bool | None
    """As `Measurement.held_out`."""

    @property
    def kind_of_samples(self) -> str:
        """For people."""
        match self.held_out:
            case True:
                return "samples that the run does not train on"
            case False:
                return "samples that the run trains on (it uses all of its data)"
            case None:
                return "samples of other data"

    @property
    def line(self) -> str:
        """The result in one line for people."""
        perplexity = f", perplexity {self.perplexity:.3f}" if self.perplexity is not None else ""
        return (
            f"step {self.step} ({self.checkpoint}): loss {self.loss:.4f}{perplexity} "
            f"on {self.samples} {self.kind_of_samples}: {self.data}"
        )


def evaluation_steps(
    *, num_samples: int, global_batch_size: int, trained_steps: int, batches: int
) -> tuple[range, bool]:
    """The steps whose samples are evaluated, and whether the run never trains on them.

    Step `s` has samples `(s - 1) * global_batch_size` on of the run's own order, whose first epoch holds each sample
    once. So the steps after the last one that the run trains hold unseen samples until that epoch ends. If not one
    whole batch is left of it, they hold seen ones.
    """
    unseen = num_samples // global_batch_size - trained_steps
    count = min(batches, unseen) if unseen > 0 else batches
    return range(trained_steps + 1, trained_steps + 1 + count), unseen > 0


def perplexity_of(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def measure(request: EvaluationRequest) -> Measurement:
    """Ask a process of its own, which ends with this one. It uses the CPU: the devices are for training.

    Raises:
        StorageError: the checkpoint cannot be read, or holds another state than the job's.
        DataError: the data are missing, too short, or not those of the run.
        UserCodeError: the job raised.
        ConfigError: the job no longer accepts its parameters.
    """
    command = tethered([sys.executable, "-P", "-m", "trainer.compute.evaluate"], signal.SIGKILL)
    return Measurement.model_validate_json(ask(command, request.model_dump_json(), "evaluating"))
