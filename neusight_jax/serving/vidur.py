"""Vidur: step times as the execution-time predictor of Microsoft's simulator of serving (PyPI `vidur`, MIT).

Agrawal et al., Vidur: A Large-Scale Simulation Framework for LLM Inference, MLSys 2024. Written against vidur 0.0.26.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.serving.times import Times
from neusight_jax.units import MS


class ExecutionTimePredictor:
    """Answers as Vidur's `BaseExecutionTimePredictor` does, from the step times of a replica.

    Put in place of the one that a simulation trains: `replica_scheduler._execution_time_predictor`, or what the
    registry returns. One pipeline stage; what a step consists of is not told apart.
    """

    def __init__(self, times: Times) -> None:
        self.times = times
        self._run = jax.jit(Times.batch_s)

    def step_s(self, queries: Sequence[int], context: Sequence[int]) -> float:
        """Seconds of a step.

        Args:
          queries: new tokens of every request; context: its tokens after the step, as Vidur's batches have them.
        Raises: `InputError` for lists of different length, or fewer tokens after the step than are new.
        """
        new, after = np.asarray(queries, np.float32), np.asarray(context, np.float32)
        if new.shape != after.shape or new.ndim != 1 or np.any(new < 1) or np.any(after < new):
            raise InputError("queries and context are one list each, of 1 new token or more and no fewer in all")
        padding = (0, max(1 << (max(len(new), 16) - 1).bit_length(), 16) - len(new))  # few programs
        return float(self._run(self.times, np.pad(new, padding), np.pad(after - new, padding)))

    def get_execution_time(self, batch: Any, pipeline_stage: int) -> Any:
        """Vidur's `ExecutionTime` of one of its batches. `InputError` for a second pipeline stage, or without Vidur."""
        if pipeline_stage != 0:
            raise InputError(f"pipeline stage {pipeline_stage}: these step times are of one stage; expected 0")
        try:
            from vidur._native.entities import ExecutionTime
        except ImportError:
            raise InputError("vidur is not installed; pip install vidur") from None
        milliseconds = self.step_s(batch.num_q_tokens, batch.num_kv_tokens) / MS
        return ExecutionTime(1, *(0.0,) * 11, milliseconds, 0.0, 0.0)  # all of it as `add_time` of one layer
