"""Checkpoints by orbax, bound to the configuration that made them.

A save is atomic: orbax writes into a temporary folder and renames it. What a failed or
killed save leaves behind is removed, so that no half-written checkpoint is found.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from .errors import UserError


_OVERHEAD = 2**20  # orbax's metadata, generously


class Checkpoints:
    """The checkpoints of one output folder."""

    def __init__(self, out: Path, configuration: dict[str, Any]) -> None:
        """Checkpoints live in `out/checkpoints`, two at a time."""
        self.folder = (out / "checkpoints").absolute()
        self.configuration = configuration

    def clear(self) -> None:
        """Forget an earlier run and record this one's configuration.

        Raises:
            UserError: If the folder holds something that is not a run of this program.
        """
        if self.folder.exists() and not self._record.exists():
            raise UserError(
                f"{self.folder} exists and was not made by this program;"
                " choose another --out"
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._record.write_text(json.dumps(self.configuration, indent=2) + "\n")

    def save(self, step: int, state: Any) -> None:
        """Write the state after `step` steps.

        Raises:
            UserError: If it cannot be written; nothing half-written stays.
        """
        try:
            self._reserve(2 * sum(x.nbytes for x in jax.tree.leaves(state)) + _OVERHEAD)
            with self._manager() as manager:
                manager.save(step, args=ocp.args.StandardSave(state), force=True)
        except (OSError, ValueError, RuntimeError) as error:
            for path in self.folder.glob("*tmp*"):
                shutil.rmtree(path, ignore_errors=True)
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(
                f"the checkpoint of step {step} could not be written to {self.folder}"
                f" ({reason[0][:200]}); free space there and --resume, or choose"
                " another --out"
            ) from error

    def restore(self, like: Any) -> tuple[int, Any]:
        """The newest checkpoint, placed as `like` is.

        Raises:
            UserError: If there is none, or it belongs to another configuration.
        """
        self._check_configuration()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        arguments = ocp.args.StandardRestore(abstract)
        with self._manager() as manager:
            step = manager.latest_step()
            if step is None:
                raise UserError(
                    f"--resume found no checkpoint in {self.folder}; start without it"
                )
            try:
                return step, manager.restore(step, args=arguments)
            except Exception as error:
                raise UserError(
                    f"the checkpoint {self.folder / str(step)} is damaged; remove it"
                    " and --resume from the one before, or start without --resume"
                ) from error

    def _reserve(self, size: int) -> None:
        """Raise OSError unless `size` bytes are free.

        Asked first, because orbax writes in threads that report a full disk with a
        page of tracebacks each.
        """
        with tempfile.TemporaryFile(dir=self.folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)

    @property
    def _record(self) -> Path:
        return self.folder / "configuration.json"

    def _check_configuration(self) -> None:
        if not self._record.exists():
            raise UserError(
                f"--resume found no run in {self.folder}; start without it first"
            )
        try:
            recorded = dict(json.loads(self._record.read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(f"{self._record} is damaged; start anew") from error
        changed = [
            "the documents changed since"
            if name == "documents"
            else f"{name}: {recorded.get(name)!r} then, {value!r} now"
            for name, value in self.configuration.items()
            if recorded.get(name) != value
        ]
        if changed:
            raise UserError(
                f"--resume of another configuration ({'; '.join(changed)});"
                " give the same options, or another --out"
            )

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=False,
        )
        return ocp.CheckpointManager(self.folder, options=options)
