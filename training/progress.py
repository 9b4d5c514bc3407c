"""The state of an unfinished training run, kept beside its output so that it can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from neusight_jax.errors import InputError
from neusight_jax.files import remove_folder, write_atomically, write_text_atomically
from neusight_jax.model.checkpoint import CARD, tree_from_arrays, tree_to_arrays
from neusight_jax.training.fit import FitState, Job, Kind, Settings, init_state
from neusight_jax.training.rows import Rows

_ASKED = "run.json"


def kept_steps(output: Path) -> str:
    """What an interrupted run left to go on with, in words; "" for nothing."""
    if (output / CARD).is_file() or not (_folder(output) / _ASKED).is_file():
        return ""
    return "what was fitted so far is kept: the same command with --resume goes on"


def _folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.partial")


class Saved:
    """A folder `.NAME.partial` beside the output: one file per fit, and what the run was asked to do."""

    def __init__(self, output: Path, asked: Mapping[str, Any]) -> None:
        self.folder = _folder(output)
        self.asked = json.loads(json.dumps(asked))

    def check(self) -> None:
        """`InputError` unless there is a run to go on with, and it was asked the same."""
        path = self.folder / _ASKED
        if not path.is_file():
            raise InputError(f"nothing to resume: {self.folder} is missing; run without --resume")
        if json.loads(path.read_text()) != self.asked:
            raise InputError(f"{path}: recipe, hold-out or seed differ from this run; repeat them, or drop --resume")

    def discard(self) -> None:
        """Forget the run."""
        remove_folder(self.folder)

    def save(self, name: str, state: FitState) -> None:
        """Keep the state of one fit, whole or not at all."""
        if not (self.folder / _ASKED).exists():
            write_text_atomically(self.folder / _ASKED, json.dumps(self.asked))
        flat = tree_to_arrays(state)
        write_atomically(self._file(name), lambda path: save_file(flat, path))

    def load(self, name: str, kind: Kind, rows: Rows, jobs: Sequence[Job], settings: Settings) -> FitState:
        """The kept state of one fit, or a fresh one."""
        fresh = init_state(kind, rows, jobs, settings)
        path = self._file(name)
        if not path.is_file():
            return fresh
        try:
            flat = load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not readable ({error}); remove it to train this family again") from None
        kept = tree_from_arrays(fresh, flat, path)
        state: FitState = jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), fresh, kept)  # counters are whole
        return state

    def _file(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.safetensors"
