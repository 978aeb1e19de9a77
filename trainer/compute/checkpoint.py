"""The durable tier as a worker sees it: save the sharded state through Orbax, restore it onto this mesh.

One `Checkpointer` per incarnation. It knows nothing of commits, retention or choice: the controller does those.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from trainer import wire
from trainer.config import CheckpointConfig
from trainer.store import checkpoint_path

PyTree = Any

# Orbax lets each replica write its part of an array, cut out on the device by a program of its own for each shape.
# The first save of every incarnation would compile them (0.9 s for 18 small shapes on CPU), to gain nothing below this.
_LEAST_BYTES_PER_REPLICA = 4 << 20


class Checkpointer:
    """Saves by all processes of the group at the same steps. What became of a save is told through `report`."""

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        run_directory: Path,
        incarnation: int,
        timeout_seconds: float,
        report: Callable[[wire.Saving | wire.Saved | wire.SaveFailed], None],
    ) -> None:
        self._config = config
        self._run_directory = run_directory
        self._incarnation = incarnation
        self._report = report
        self._last_step: int | None = None
        # With its processes named, Orbax meets them at the coordinator; else it runs a collective over all devices.
        multiprocessing = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes=set(range(jax.process_count()))
        )
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(
                use_compression=config.compression == "zstd",
                multiprocessing_options=multiprocessing,
                type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                    (
                        jax.Array,
                        ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_LEAST_BYTES_PER_REPLICA),
                    )
                ),
            ),
            timeout_secs=int(timeout_seconds),
            multiprocessing_options=multiprocessing,
        )
        # Whoever waits for a save learns of its failure; the loop must not wait, so a thread does.
        self._begun: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._finisher = threading.Thread(target=self._finish_saves, name="checkpoint-finisher", daemon=True)
        self._finisher.start()
        self._idle = threading.Event()
        self._idle.set()

    def save(self, step: int, state: PyTree) -> None:
        """Begin to save `state`, which may be donated to the next step as soon as this returns.

        Waits for the save before it, if that still runs. Does nothing if this step is saved already.
        """
        if step == self._last_step:
            return
        self._idle.wait()
        started = time.monotonic()
        self._last_step = step
        path = self._run_directory / checkpoint_path(self._incarnation, step)
        self._idle.clear()
        try:
            self._orbax.save(path, args=ocp.args.PyTreeSave(state))
        except (OSError, ValueError, RuntimeError) as error:
            self._idle.set()
            self._report(wire.SaveFailed(step=step, reason=f"{type(error).__name__}: {error}"))
            return
        self._report(wire.Saving(step=step, blocking_seconds=time.monotonic() - started))
        self._begun.put((step, started))
        if not self._config.async_save:
            self._idle.wait()

    def wait(self) -> None:
        """Return once the save in flight, if any, is complete or has failed."""
        self._idle.wait()

    def _finish_saves(self) -> None:
        while True:
            step, started = self._begun.get()
            try:
                self._orbax.wait_until_finished()
            except Exception as error:  # noqa: BLE001  whatever a storage raises is the reason the save failed for
                self._report(wire.SaveFailed(step=step, reason=f"{type(error).__name__}: {error}"))
            else:
                self._report(wire.Saved(step=step, seconds=time.monotonic() - started))
            finally:
                self._idle.set()


def restore(path: Path, abstract_state: PyTree, *, partial: bool = False) -> PyTree:
    """Read a checkpoint onto the shardings of `abstract_state` (jax.ShapeDtypeStruct leaves), each process its part.

    `partial`: the checkpoint may hold more than is asked for, which is then not read.

    Raises:
        ValueError: the saved tree differs from `abstract_state`.
    """
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract_state)
    state = checkpointer.restore(
        path,
        args=ocp.args.PyTreeRestore(item=abstract_state, restore_args=restore_args, partial_restore=partial),
    )
    jax.block_until_ready(state)
    return state
