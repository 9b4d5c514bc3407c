"""Rollouts: a step of reinforcement learning, in which a model writes the responses that it is then trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.forecast import Forecast
from neusight_jax.graph.configs.config import whole
from neusight_jax.hardware.cluster import Cluster
from neusight_jax.job.job import Job
from neusight_jax.model.predictor import Predictor
from neusight_jax.records import Record
from neusight_jax.serving.answers import serve

ROLLOUT_PARTS: tuple[str, ...] = ("rollout_s", "scoring_s")
"""Parts of a step of reinforcement learning beside `forecast.PARTS`: an engine writes responses, forward passes score
them."""


@dataclass(frozen=True)
class Rollout(Record):
    """Responses of a step of reinforcement learning, as GRPO and PPO have it.

    Attributes:
      responses: to each prompt; all are trained on, so that a step has global batch size / responses prompts.
      response_tokens: of each; the rest of the sequence is the prompt.
      scoring: forward passes over all sequences beside those of the update: of the policy that wrote them and of a
        reference.
    Raises: `InputError` for what is no positive whole number.
    """

    responses: int
    response_tokens: int
    scoring: int = 2

    def __post_init__(self) -> None:
        for name in ("responses", "response_tokens"):
            whole(name, getattr(self, name))

    def notes(self) -> tuple[str, ...]:
        """Assumptions of the step, in words."""
        return (
            f"rollout: {self.responses} responses of {self.response_tokens} tokens to each prompt, all as long, by "
            "vLLM on the same GPUs, with nearly all of their memory; a prompt is read once",
            f"scoring: {self.scoring} forward passes; rewards, and bringing weights to the engine, take no time",
        )


def rollout_step(
    predictor: Predictor,
    cluster: Cluster,
    job: Job,
    update: Forecast,
    rollout: Rollout,
    config: str | Path | Mapping[str, Any],
) -> Forecast:
    """The forecast of a step of reinforcement learning: the update's, with the rollout and the scoring before it.

    Every `tensor` GPUs of the job's layout are one replica of a serving engine in the closed form of `nj.serve`, at its
    share of the responses. Where their KV cache does not fit at once, they are written one part after another.

    Args:
      predictor, cluster, job, update: of the training step, and its forecast.
      rollout: what is written; config: of the model, as `nj.job_from_config` takes it.
    Raises: `InputError` where a sequence has no prompt, the batch is no multiple of the responses, or no replica holds
      the model.
    """
    plan = job.plan
    prompt = plan.sequence_length - rollout.response_tokens
    if prompt < 1:
        raise InputError(
            f"sequence_length {plan.sequence_length} holds a response of {rollout.response_tokens} tokens and no "
            "prompt; give a longer sequence"
        )
    if plan.global_batch_size % rollout.responses:
        raise InputError(
            f"global_batch_size {plan.global_batch_size} is no multiple of {rollout.responses} responses to a prompt"
        )
    replicas = plan.layout.gpus // plan.layout.tensor
    users = plan.global_batch_size / replicas
    served = serve(
        predictor,
        {"rollout": cluster},
        config,
        input_tokens=prompt,
        output_tokens=rollout.response_tokens,
        users=max(users, 1.0),
        method="estimate",
        tensor_parallel=[plan.layout.tensor],
        expert_parallel=[1],
        options={"prefix_share": 1.0 - 1.0 / rollout.responses},
    ).best
    rate = plan.layout.tensor * (served.tokens_per_s_gpu or 0.0)  # of one replica
    rollout_s = max(users, 1.0) * rollout.response_tokens / rate
    scoring_s = rollout.scoring * update.forward_s
    interval = None
    if update.interval_s:
        low, high = (
            rollout_s * further_s / served.tpot_s["p50"] + end * (1.0 + scoring_s / update.total_s)
            for further_s, end in zip(served.intervals["tpot_s"], update.interval_s, strict=True)
        )
        interval = (low, high)
    watts = (served.power_w or 0.0) / (served.replicas or 1) * min(replicas, plan.global_batch_size)
    return replace(
        update,
        parts={**update.parts, **dict(zip(ROLLOUT_PARTS, (rollout_s, scoring_s), strict=True))},
        energy_j=update.energy_j + watts * rollout_s + update.power_w * scoring_s,
        interval_s=interval,
        workload={**update.workload, "responses": rollout.responses, "response_tokens": rollout.response_tokens},
        notes=(*update.notes, *rollout.notes()),
    )
