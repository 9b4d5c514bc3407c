"""Models as figures of a design: what serving and training a decoder of given sizes take, and the loss it reaches.

Serving is one batch of requests after another: each prompt by itself, then a step of all for every token of the answer.
Training is the step of one GPU of as many as it takes, without messages, optimizer and restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.designs.loads import step_joules
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.graph.configs.config import whole
from neusight_jax.graph.configs.shape import ModelShape
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.cluster import gpu_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.prices import SECONDS_PER_HOUR
from neusight_jax.model.latency import kernel_latency, latency
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.roofline import Relaxation
from neusight_jax.records import Record
from neusight_jax.sweeps.space import MODEL_FIELDS
from neusight_jax.workloads import Workload

SIZED: tuple[str, ...] = ("parameters", "active_parameters", "memory_bytes", "memory_share")
"""Metrics of a model that grow with it: elements of its weights, and those a token meets; memory of serving it, also
over that of the GPU."""
LOSS = "loss"
"""Metric of the law: it falls as the model or its training grows."""
SERVED: tuple[str, ...] = ("ttft_s", "tpot_s", "cost_per_mtok", "price_per_hour")
"""Metrics of requests: to the first token of a prompt alone, of each further one; dollars as of `loads.SERVED`."""
TRAINED: tuple[str, ...] = ("train_days", "total_dollars")
"""Metrics with training: days on its GPUs, dollars of training and of the tokens served."""
METERED: tuple[str, ...] = ("energy_j", "total_joules")
"""Joules of a batch of requests; of training and of the tokens served."""
TRAINING_LENGTH = 4096
"""Longest sequence that training is counted at, tokens."""
HOFFMANN_RATIO = 20.0
"""Training tokens for a parameter where nobody says how many: Hoffmann et al. 2022, table 3."""
SECONDS_PER_DAY = 24.0 * SECONDS_PER_HOUR
ASPECTS: tuple[float, float] = (33.0, 715.0)
"""Width over depth of the two models whose losses Kaplan et al. 2020 (section 3.1) found within 3 %: 48 layers 1,600
wide, and 6 layers 4,288 wide."""


@dataclass(frozen=True)
class LossLaw(Record):
    """Loss of a dense model, E + A / N^alpha + B / D^beta, nats a token: N parameters trained on D tokens.

    Attributes:
      irreducible, of_parameters, of_tokens, alpha, beta: E, A, B and the exponents.
      parameters, tokens: least and most of the runs it was fitted to.
      source: who fitted it.
    """

    irreducible: float
    of_parameters: float
    of_tokens: float
    alpha: float
    beta: float
    parameters: tuple[float, float]
    tokens: tuple[float, float]
    source: str

    def __call__(self, parameters: ArrayLike, tokens: ArrayLike, shape: ModelShape | None = None) -> Any:
        """Loss; `shape`: not read."""
        n, d = jnp.asarray(parameters, float), jnp.asarray(tokens, float)
        return self.irreducible + self.of_parameters * n**-self.alpha + self.of_tokens * d**-self.beta

    def notes(self, parameters: float, tokens: float) -> list[str]:
        """Where the law comes from, and how far outside its runs a model lies."""
        sides = []
        for what, value, (least, most) in (
            ("parameters", parameters, self.parameters),
            ("tokens", tokens, self.tokens),
        ):
            beyond = max(least / value, value / most)
            where = f"{beyond:.3g} times outside" if beyond > 1.0 else "inside"
            sides.append(f"{value:.3g} {what} are {where} its {least:.3g} to {most:.3g}")
        return [f"loss by {self.source}: {', '.join(sides)}; it knows neither depth, width nor heads"]


_RUNS: dict[str, Any] = {"parameters": (7e7, 1.6e10), "tokens": (5e9, 5e11)}
LOSS_LAWS: dict[str, LossLaw] = {
    "hoffmann": LossLaw(1.69, 406.4, 410.7, 0.34, 0.28, **_RUNS, source="Hoffmann et al. 2022 (arXiv 2203.15556)"),
    "besiroglu": LossLaw(
        1.8172, 482.01, 2085.43, 0.3478, 0.3658, **_RUNS, source="Besiroglu et al. 2024 (arXiv 2404.10102)"
    ),
}
"""Laws by name: of the third approach, and its refit to the same runs."""
LossFunction: TypeAlias = Callable[[Any, Any, ModelShape], Any]
"""Loss from parameters, training tokens and shape, traced; a `LossLaw` or a function of the user's."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelUse:
    """A model with what is done with it, traced in its sizes.

    Attributes:
      shape: its sizes.
      training_tokens, served_tokens: over its life; served ones are of prompts and answers.
      training_gpus: that train it; price_per_hour: of one base GPU.
      input_tokens, output_tokens, batch_size: of requests, and how many are served together.
      dtypes: of arithmetic, weights and KV cache when it serves, as of `nj.graph_from_config`.
      loss: of the model; None = not counted.
      trains, metered: whether training, and joules, are forecast.
    """

    shape: ModelShape
    training_tokens: ArrayLike
    served_tokens: ArrayLike
    training_gpus: ArrayLike
    price_per_hour: ArrayLike
    input_tokens: int = field(metadata={"static": True})
    output_tokens: int = field(metadata={"static": True})
    batch_size: int = field(metadata={"static": True})
    dtypes: tuple[tuple[str, str | None], ...] = field(metadata={"static": True})
    loss: LossFunction | None = field(metadata={"static": True})
    trains: bool = field(default=False, metadata={"static": True})
    metered: bool = field(default=False, metadata={"static": True})

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics of the model that need a forecast."""
        return (*SERVED, *TRAINED * self.trains, *METERED[: 1 + self.trains] * self.metered)

    @property
    def sized_names(self) -> tuple[str, ...]:
        """Metrics of the model that need none."""
        return (*SIZED, *(LOSS,) * (self.loss is not None))

    def figure(self, name: str) -> ArrayLike:
        """One of `MODEL_FIELDS`."""
        value: ArrayLike = getattr(self if name == "training_tokens" else self.shape, name)
        return value

    def at(self, figures: Mapping[str, Any]) -> ModelUse:
        """The same with other figures; those of a machine are left out."""
        sizes = {name: value for name, value in figures.items() if name in MODEL_FIELDS}
        tokens = sizes.pop("training_tokens", self.training_tokens)
        return replace(self, shape=self.shape.replace(**sizes), training_tokens=tokens)

    def graph(self, mode: str, kv_length: int | None = None) -> Graph:
        """A step: the prefill of a prompt, a decode of the batch, or training on a sequence."""
        if mode == "training":
            return self.shape.graph(sequence_length=self._training_length, mode=mode, dtype=dict(self.dtypes)["dtype"])
        if mode == "prefill":
            return self.shape.graph(sequence_length=self.input_tokens, mode=mode, **dict(self.dtypes))
        mean = self.input_tokens + max(self.output_tokens // 2, 1)
        return self.shape.graph(batch_size=self.batch_size, mode=mode, kv_length=kv_length or mean, **dict(self.dtypes))

    def asked(self, names: Collection[str]) -> ModelUse:
        """The same with the forecasts that some metrics need."""
        joules = any(name in METERED for name in names)
        return replace(self, trains=any(name in (*TRAINED, METERED[1]) for name in names), metered=joules)

    def usual_budgets(self, names: Collection[str], mem_bytes: ArrayLike) -> dict[str, float]:
        """Budgets of every search: the memory there is, and the loss of the base, unless the loss is among `names`."""
        usual = {"memory_share": 1.0}
        if self.loss is not None and LOSS not in names:
            usual[LOSS] = float(self.sized(mem_bytes)[LOSS])
        return usual

    def notes(self, metrics: Mapping[str, float]) -> list[str]:
        """What to know of the loss of a model with these metrics."""
        if self.loss is None:
            return ["no loss was counted: a smaller model is always faster"]
        if not isinstance(self.loss, LossLaw):
            return ["loss by a function of the user's, whose range is not known"]
        notes = self.loss.notes(metrics["active_parameters"], float(np.asarray(self.training_tokens)))
        if metrics["active_parameters"] < 0.999 * metrics["parameters"]:
            notes.append("the law is of dense models: a mixture counts as its active parameters, and may do better")
        width = float(np.asarray(self.shape.hidden)) / float(np.asarray(self.shape.layers))
        if not ASPECTS[0] <= width <= ASPECTS[1]:
            notes.append(
                f"a model {width:.3g} times as wide as it is deep: shapes of {ASPECTS[0]:g} to {ASPECTS[1]:g} have the "
                "same loss within 3 % (Kaplan et al. 2020, arXiv 2001.08361); beyond nobody has said"
            )
        return notes

    @property
    def _training_length(self) -> int:
        return max(min(TRAINING_LENGTH, self.input_tokens + self.output_tokens), 1)

    def sized(self, mem_bytes: ArrayLike) -> dict[str, Array]:
        """`SIZED` and the loss, on a GPU with so much memory."""
        fullest = self.graph("decode", self.input_tokens + self.output_tokens)
        # A token meets as many experts as it takes.
        active = replace(self, shape=self.shape.replace(experts=self.shape.top_k)).graph("decode").parameters
        assert fullest.footprint is not None
        memory = jnp.asarray(fullest.footprint.total, float)
        measures = {
            "parameters": jnp.asarray(fullest.parameters, float),
            "active_parameters": jnp.asarray(active, float),
            "memory_bytes": memory,
            "memory_share": memory / mem_bytes,
        }
        if self.loss is not None:
            measures[LOSS] = jnp.asarray(self.loss(active, self.training_tokens, self.shape), float)
        return measures


def model_metrics(
    use: ModelUse, predictor: Predictor, machine: GPU, dearer: Array, relaxation: Relaxation
) -> tuple[dict[str, Array], Float[Array, " one"], dict[str, Float[Array, " one"]]]:
    """Metrics of a model on a machine, seconds of a batch of requests, and the same by family.

    Args:
      use: the model and what is done with it.
      predictor: what forecasts.
      machine: one GPU.
      dearer: dollars of the machine over those of the base.
      relaxation: see `latency.kernel_latency`.
    """
    prompt, step = use.graph("prefill"), use.graph("decode")
    # One table, so that the forecast of a family is traced once.
    kernels = replace(prompt, nodes=(*prompt.nodes, *step.nodes)).kernels
    of_one = kernel_latency(predictor, machine, kernels, relaxation=relaxation)
    of_prompt = {
        name: jnp.where(np.asarray(batch.node) < len(prompt.nodes), jnp.asarray(batch.count), 0.0)
        for name, batch in kernels.families.items()
    }
    of_step = {name: batch.count - of_prompt[name] for name, batch in kernels.families.items()}
    first_s, further_s = (
        sum((counts[name] @ rows for name, rows in of_one.items()), jnp.zeros(())) for counts in (of_prompt, of_step)
    )
    batch, output = float(use.batch_size), float(use.output_tokens)
    tokens = batch * (use.input_tokens + output)
    seconds = batch * first_s + output * further_s
    parts = {name: ((batch * of_prompt[name] + output * of_step[name]) @ rows)[None] for name, rows in of_one.items()}
    price = use.price_per_hour * dearer
    dollars_per_s = price / SECONDS_PER_HOUR
    more: dict[str, Any] = {
        "ttft_s": first_s,
        "tpot_s": further_s,
        "latency_s": first_s + (output - 1.0) * further_s,
        "tokens_per_s": tokens / seconds,
        "price_per_hour": price,
        "cost_per_mtok": 1e6 * dollars_per_s * seconds / tokens,
    }
    served = use.served_tokens / tokens
    if use.metered:
        drawn = ((first_s, of_prompt, batch), (further_s, of_step, output))
        joules = [
            times * step_joules(predictor, machine, each, 1, kernels, of_one, counts) for each, counts, times in drawn
        ]
        more["energy_j"] = joules[0] + joules[1]
    if use.trains:
        table = use.graph("training").kernels
        step_s = latency(predictor, machine, table, relaxation=relaxation)
        trained_s = use.training_tokens / use._training_length * step_s
        more["train_days"] = trained_s / use.training_gpus / SECONDS_PER_DAY
        more["total_dollars"] = dollars_per_s * (trained_s + served * seconds)
        if use.metered:
            rows = kernel_latency(predictor, machine, table, relaxation=relaxation)
            counts = {name: jnp.asarray(batch.count) for name, batch in table.families.items()}
            of_training = step_joules(predictor, machine, step_s, 1, table, rows, counts)
            more["total_joules"] = trained_s / step_s * of_training + served * more["energy_j"]
    return more, seconds[None], parts


def on_divisors(columns: dict[str, np.ndarray], use: ModelUse) -> dict[str, np.ndarray]:
    """Figures whose heads share KV heads equally, and whose tokens take no more experts than there are.

    Args:
      columns: free figures on their steps, each [point].
    """
    fitted = dict(columns)
    if "heads" in columns:
        shared = columns.get("kv_heads", np.asarray(use.shape.kv_heads, float))
        fitted["heads"] = shared * np.maximum(np.round(columns["heads"] / shared), 1.0)
    elif "kv_heads" in columns:
        heads = int(np.asarray(use.shape.heads))
        divisors = np.array([number for number in range(1, heads + 1) if heads % number == 0], float)
        nearest = np.abs(np.log(divisors[None] / columns["kv_heads"][:, None])).argmin(1)
        fitted["kv_heads"] = divisors[nearest]
    if "top_k" in columns:
        fitted["top_k"] = np.minimum(columns["top_k"], columns.get("experts", np.asarray(use.shape.experts, float)))
    return fitted


def model_use(
    model: ModelShape | str | Path | Mapping[str, Any],
    base: GPU,
    *,
    loss: str | LossFunction | None = "besiroglu",
    input_tokens: int = 1024,
    output_tokens: int = 256,
    batch_size: int = 1,
    dtype: str = "bf16",
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    training_tokens: float | None = None,
    served_tokens: float = 0.0,
    training_gpus: float = 1.0,
    price_per_hour: float | None = None,
) -> Workload:
    """A model whose sizes may vary, as the one workload of a design.

    Args:
      model: its base sizes, or what `ModelShape.from_config` reads them from.
      base: the machine a design starts from.
      loss: a name of `LOSS_LAWS`, a function of (parameters a token meets, training tokens, shape), or None.
      input_tokens, output_tokens: of a request.
      batch_size: requests served together.
      dtype, weight_dtype, kv_dtype: as of `nj.graph_from_config`; it is trained in `dtype`.
      training_tokens: None = 20 for a parameter of the base.
      served_tokens: of prompts and answers over its life.
      training_gpus: that train it.
      price_per_hour: of one base GPU; others cost as many times more as their dollars by the cost model. None = 1.
    Raises: `InputError` for unusable input.
    """
    shape = model if isinstance(model, ModelShape) else ModelShape.from_config(model)
    gpu_of(base).peak_flop_per_s(dtype)
    if isinstance(loss, str):
        if loss not in LOSS_LAWS:
            raise unknown_name("loss law", loss, LOSS_LAWS)
        loss = LOSS_LAWS[loss]
    amounts = {"training_tokens": training_tokens, "training_gpus": training_gpus, "price_per_hour": price_per_hour}
    for name, amount in amounts.items():
        if amount is not None and not 0 < amount < math.inf:
            raise InputError(f"{name} is {amount!r}, expected a positive number")
    if not 0 <= served_tokens < math.inf:
        raise InputError(f"served_tokens is {served_tokens!r}, expected a number of at least 0")
    requests = {"input_tokens": input_tokens, "output_tokens": output_tokens, "batch_size": batch_size}
    sizes: dict[str, Any] = {name: whole(name, number) for name, number in requests.items()}
    dtypes = (("dtype", dtype), ("weight_dtype", weight_dtype), ("kv_dtype", kv_dtype))
    use = ModelUse(shape, 1.0, served_tokens, training_gpus, price_per_hour or 1.0, **sizes, dtypes=dtypes, loss=loss)
    step = use.graph("decode")
    use = replace(use, training_tokens=training_tokens or HOFFMANN_RATIO * float(step.parameters or 0.0))
    notes = ["training is counted as the step of one GPU of as many as it takes: no messages, optimizer or restarts"]
    if training_tokens is None:
        notes.append(
            f"{float(np.asarray(use.training_tokens)):.3g} training tokens assumed: 20 for a parameter of the base"
        )
    options = {**step.options, **sizes, "served_tokens": served_tokens}
    described = replace(step, options=options, notes=(*step.notes, *notes), footprint=None)
    return Workload(f"{shape.name} requests {input_tokens}+{output_tokens}", described, described.kernels, step=use)
