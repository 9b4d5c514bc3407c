"""Serving: steps as a grid, the steady state of a replica, and how many of which GPU a load needs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.hardware.cluster import on_device
from neusight_jax.hardware.prices import Prices
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.kernels.grouped_gemm import expert_dims
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.records import as_text
from neusight_jax.serving import slopes
from neusight_jax.serving.choices import Serving
from neusight_jax.serving.layouts import capacity
from neusight_jax.serving.steady import Lengths, Steady, demand, steady
from neusight_jax.serving.steps import Model, Steps, axes, load_model, steps
from neusight_jax.serving.times import Engine, Options, Times, _between, best_drafts, times, usual_options

PREDICTOR = RooflinePredictor()
FREE = Engine(step_s=0.0, sequence_s=0.0, request_s=0.0, first_steps=0.0, kernels=1.0, experts=1.0, wave=0.0)
LENGTHS = Lengths(512, 128)
OPTIONS = Options(chunk_tokens=1024, max_batch=32)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(TINY, "bf16")


@pytest.fixture(scope="module")
def written(model: Model) -> Steps:
    return steps(model, Parallelism(), 8, ("bf16", "fp16", "fp32"), axes(640, 1024, 32))


@pytest.fixture(scope="module")
def own(written: Steps) -> Times:
    return times(PREDICTOR, nj.load_cluster("1x H100"), written, FREE)


RUN = jax.jit(steady)


def at(own: Times, load: float, **changes: Any) -> Steady:
    return RUN(own, demand(LENGTHS, dataclasses.replace(OPTIONS, **changes)), load, 32.0)


@pytest.mark.parametrize(("batch", "context"), [(1, 128), (8, 512), (32, 256)])
def test_a_decode_step_is_the_graphs(own: Times, batch: int, context: int) -> None:
    graph = nj.graph_from_config(TINY, batch, context, "decode", "bf16")
    expected = float(nj.latency(PREDICTOR, nj.load_gpu("H100"), graph.kernels))
    assert float(own.step_s(batch, context)) == pytest.approx(expected, rel=1e-4)


def test_a_prefill_step_is_the_graphs(own: Times) -> None:
    graph = nj.graph_from_config(TINY, 1, 512, "prefill", "bf16")
    expected = float(nj.latency(PREDICTOR, nj.load_gpu("H100"), graph.kernels))
    assert float(own.step_s(0.0, 1.0, 512, 0)) == pytest.approx(expected, rel=1e-3)


def test_steps_between_points_lie_between_them(own: Times) -> None:
    values = own.step_s(np.array([8.0, 11.0, 16.0]), 300.0)
    assert values.shape == (3,)
    assert np.all(np.diff(np.asarray(values)) > 0)
    assert float(own.step_s(0.0, 100.0)) == 0.0


def test_tables_go_as_powers_between_their_points() -> None:
    table = jnp.array([[1.0, 4.0], [2.0, 8.0], [18.0, 72.0]])  # over 1, 2, 6 and 0, 3
    rows, columns = np.array([1.0, 2.0, 3.0, 6.0, 9.0, 0.5]), np.array([0.0, 3.0, 1.0, 1.0, 7.0, 0.0])
    values = _between(table, ((1, 2, 6), rows), ((0, 3), columns))
    of_rows = [1.0, 2.0, 2.0 * 9.0 ** (np.log(1.5) / np.log(3.0)), 18.0, 18.0, 1.0]
    np.testing.assert_allclose(values, of_rows * np.array([1.0, 4.0, 2.0, 2.0, 4.0, 1.0]), rtol=1e-5)
    assert float(_between(jnp.array([5.0]), ((4,), 7.0))) == pytest.approx(5.0)
    # The slope within an interval is that of its power, at a point that of the one above, at the last that of the one
    # below; beyond the points there is none.
    slope = jax.grad(lambda size: _between(table[:, 0], ((1, 2, 6), size)))
    slopes = [float(slope(size)) for size in (0.5, 1.0, 1.5, 2.0, 3.0, 6.0, 7.0)]
    assert slopes == pytest.approx([0.0, 1.0, 1.0, 2.0, 3.0, 6.0, 0.0], rel=1e-5)


def test_one_request_alone_waits_for_nobody(own: Times) -> None:
    found = at(own, 1.0)
    prompt = float(own.step_s(0.0, 1.0, 512, 0))
    assert float(found.ttft_s) == pytest.approx(prompt, rel=1e-4)
    assert float(found.tpot_s) == pytest.approx(float(own.step_s(1.0, 576.0)), rel=1e-4)
    assert float(found.ttft_p95_s) == pytest.approx(prompt, rel=1e-4)


def test_littles_law_and_order(own: Times) -> None:
    loads = np.arange(1.0, 33.0)
    each = [at(own, load) for load in loads]
    found = jax.tree.map(lambda *values: np.stack(values), *each)
    life = found.ttft_s + 127.0 * found.tpot_s
    np.testing.assert_allclose(found.rate * life, loads, rtol=1e-3)
    for name in ("ttft_s", "tpot_s", "tpot_p95_s", "rate", "batch"):
        assert np.all(np.diff(np.asarray(getattr(found, name))) > 0), name
    assert np.all(np.asarray(found.tpot_p95_s >= found.tpot_s))
    assert np.all(np.asarray(found.ttft_p95_s >= found.ttft_p50_s))


def test_requests_beyond_the_batch_wait(own: Times) -> None:
    held, full = at(own, 64.0), at(own, 32.0)
    assert float(held.rate) == pytest.approx(float(full.rate), rel=1e-5)
    assert float(held.ttft_s - full.ttft_s) == pytest.approx(32.0 / float(full.rate), rel=1e-4)


def test_waves_wait_longer(own: Times) -> None:
    waved = dataclasses.replace(own, engine=FREE.replace(wave=1.0))
    assert float(at(waved, 16.0).ttft_s) > 1.2 * float(at(own, 16.0).ttft_s)
    assert float(at(waved, 1.0).ttft_s) == pytest.approx(float(at(own, 1.0).ttft_s))


def test_prefix_cache_and_guesses_help(own: Times) -> None:
    def of(**changes: Any) -> Steady:
        return at(own, 8.0, **changes)

    plain = of()
    assert float(of(prefix_share=0.8).ttft_s) < float(plain.ttft_s)
    assert float(of(draft_tokens=3, draft_acceptance=0.9).tpot_s) < float(plain.tpot_s)
    assert float(of(draft_tokens=3, draft_acceptance=0.0).tpot_s) > float(plain.tpot_s)
    assert Options(draft_tokens=2, draft_acceptance=0.5).tokens_per_step == 1.75


def test_the_best_number_of_guesses(own: Times) -> None:
    """The argmax of tokens a second over the steps themselves: fewer that cost more, none without luck."""
    options, batches, contexts = Options(draft_acceptance=0.7), [1, 8, 32], [256.0, 640.0]
    best = best_drafts(own, options, batches, contexts)
    for (row, batch), (column, context) in itertools.product(enumerate(batches), enumerate(contexts)):
        ways = [dataclasses.replace(options, draft_tokens=count) for count in range(6)]
        speeds = [
            way.tokens_per_step / (way.drafting * float(own.step_s(batch, context, guesses=way.draft_tokens)))
            for way in ways
        ]
        assert best[row, column] == int(np.argmax(speeds))
    assert np.all(best_drafts(own, Options(draft_acceptance=0.7, draft_share=0.5), batches, contexts) < best)
    assert not best_drafts(own, Options(draft_acceptance=0.0), batches, contexts).any()


def test_serving_finds_the_best_number_of_guesses() -> None:
    given: dict[str, Any] = {"machines": ["H100"], "tensor_parallel": [1], "users": 200, "tpot_s": 0.02}
    costs = {
        count: asked(options={"draft_tokens": count, "draft_acceptance": 0.8}, **given).choices[0]
        for count in ("best", 0, 3)
    }
    best, *fixed = ((choice.gpus, choice.tpot_s["p95"]) for choice in costs.values())
    assert all(best <= each for each in fixed)
    assert "tokens ahead; fastest by running requests: " in costs["best"].notes[-1]
    assert not any("tokens ahead" in note for note in costs[3].notes)


def test_hot_experts() -> None:
    """Zipf's law by hand; tokens are as many; one that all tokens take is taken once by each."""
    sizes: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden": 64, "inner": 64, "distribution": "random"}
    even = expert_dims(16.0, local_experts=4, **sizes)
    hot = expert_dims(16.0, local_experts=4, skew=1.0, **sizes)
    shares = 2.0 / np.arange(1, 9) / sum(1.0 / place for place in range(1, 9))
    assert shares.max() < 1.0
    assert float(hot["rows"]) == pytest.approx(16.0 * shares[::2].sum())
    assert float(hot["active"]) == pytest.approx(sum(1.0 - math.exp(-16.0 * share) for share in shares[::2]))
    assert float(hot["rows"]) > 1.2 * float(even["rows"])
    assert float(hot["active"]) < float(even["active"])
    steep = expert_dims(16.0, local_experts=8, skew=4.0, **sizes)
    assert float(steep["rows"]) == pytest.approx(32.0)
    assert float(expert_dims(16.0, local_experts=4, skew=1e-9, **sizes)["active"]) == pytest.approx(
        float(even["active"])
    )


def test_serving_hot_experts() -> None:
    """Whole experts on several ranks: answers wait for the rank with most work, where products take the time."""
    config = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    config |= {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    given: dict[str, Any] = {"input_tokens": 64, "output_tokens": 512, "users": 900, "method": "estimate"}
    given |= {"tensor_parallel": [8], "expert_parallel": [8], "max_gpus": 8}
    plain, hot = (nj.serve(PREDICTOR, "H100", config, expert_skew=skew, **given) for skew in (0.0, 1.2))
    assert hot.choices[0].tpot_s["p50"] > 1.02 * plain.choices[0].tpot_s["p50"]
    assert any("as i^-1.2" in note for note in hot.notes)
    assert "expert_skew" not in plain.workload
    with pytest.raises(nj.InputError, match="has no experts; leave it out"):
        asked(expert_skew=1.0)
    with pytest.raises(nj.InputError, match=r"expert_skew is -1, expected 0 \(all alike\) to 5"):
        nj.serve(PREDICTOR, "H100", config, expert_skew=-1, **given)


def test_slopes_reach_the_machine(written: Steps) -> None:
    cluster = nj.load_cluster("1x H100")

    @jax.jit
    @jax.value_and_grad
    def tpot(log_bandwidth: Any) -> Any:
        gpu = cluster.gpu.replace(mem_bytes_per_s=jnp.exp(log_bandwidth))
        return jnp.log(times(PREDICTOR, cluster.replace(gpu=gpu), written, FREE).step_s(8.0, 576.0))

    start = math.log(float(np.asarray(cluster.gpu.mem_bytes_per_s)))
    value, slope = tpot(start)
    assert -1.0 <= float(slope) < -0.3
    assert float(tpot(start + 0.02)[0] - value) / 0.02 == pytest.approx(float(slope), abs=0.05)


def test_memory(model: Model) -> None:
    whole = capacity(model, Parallelism(), 80e9, OPTIONS, 576)
    half = capacity(model, Parallelism(tensor=2), 80e9, OPTIONS, 576)
    assert whole.fits
    assert whole.request_bytes == 2 * 8 * 64 * 2 * 4 * 576
    assert half.weights < 0.6 * whole.weights
    assert half.request_bytes == whole.request_bytes / 2


def asked(**changes: Any) -> Serving:
    given: dict[str, Any] = {"input_tokens": 512, "output_tokens": 128, "users": 40, "method": "estimate"}
    given |= {"tensor_parallel": [1], "dtypes": {"dtype": "bf16"}, "options": {"max_batch": 32, "chunk_tokens": 1024}}
    return nj.serve(PREDICTOR, changes.pop("machines", ["H100", "A100-SXM4-80GB"]), TINY, **{**given, **changes})


def test_an_answer() -> None:
    prices = Prices({"NVIDIA H100 80GB HBM3": 2.5, "NVIDIA A100-SXM4-80GB": 1.5}, "USD")
    found = asked(prices=prices, ttft_s=1.0, tpot_s=0.05)
    best = found.best
    assert (found.by, best.rank, best.replicas) == ("cost", 1, 2)
    assert best.gpus == 2
    tokens = best.costs["tokens"] * 640
    assert tokens == pytest.approx(best.costs["input"] * 512 + best.costs["output"] * 128)
    assert best.costs["per_hour"] == 2 * prices.of(best.gpu)
    flags = "--tensor-parallel-size 1 --max-num-batched-tokens 1024 --max-num-seqs 32 --gpu-memory-utilization 0.9"
    assert best.command == f"vllm serve {found.workload['model']} {flags}"
    assert best.command in as_text(found, width=250)
    content = json.loads(found.to_json())
    assert content["schema"] == "neusight_jax.serving/1"
    assert content["workload"]["options"]["NVIDIA H100 80GB HBM3"]["max_batch"] == 32
    assert "estimate" in content["notes"][0]
    assert len(found.to_frame()) == 2
    assert "1M in/out" in as_text(found, width=250)
    assert "40 users, 512 tokens in, 128 out" in str(found)


def test_a_rate_needs_more_as_it_grows() -> None:
    few, many = (asked(users=None, request_rate=rate, machines="H100").best for rate in (5.0, 500.0))
    assert few.replicas == 1
    assert many.replicas is not None
    assert many.max_rate is not None
    assert many.replicas == math.ceil(500.0 / many.max_rate)


def test_boards_draw_no_more_than_they_may() -> None:
    plain = asked(machines="H100").best
    assert plain.power_w is not None
    assert asked(machines="H100", max_kw=1.01 * plain.power_w / 1e3).best.replicas == plain.replicas
    with pytest.raises(nj.InputError, match=r"its boards draw .* kW, 0.01 kW are allowed"):
        asked(machines="H100", max_kw=0.01)


def test_short_prompts_share_a_chunk(own: Times) -> None:
    """As many as the chunk has room for, each at its share of the step."""
    short, alone = Lengths(64, 8), Options(chunk_tokens=64, max_batch=32)
    together, apart = (RUN(own, demand(short, setup), 32.0, 32.0) for setup in (OPTIONS, alone))
    assert float(together.rate) > 1.02 * float(apart.rate)
    assert float(together.ttft_s) < float(apart.ttft_s)
    shared, each = own.step_s(0.0, 1.0, 64.0, prompts=8.0), own.step_s(0.0, 1.0, 64.0)
    assert float(each) < float(shared) < 8.0 * float(each)
    assert float(shared) == pytest.approx(float(own.batch_s(np.full(8, 64.0), np.zeros(8))), rel=1e-5)


def test_engines_add_steps_before_the_first_token(own: Times) -> None:
    late = dataclasses.replace(own, engine=FREE.replace(first_steps=3.0))
    found, plain = at(late, 8.0), at(own, 8.0)
    step = float(own.step_s(float(found.batch) - float(found.batch) / 8.0, 576.0))
    assert float(found.ttft_s - plain.ttft_s) == pytest.approx(3.0 * step, rel=0.1)
    assert float(at(late, 1.0).ttft_s) == pytest.approx(float(at(own, 1.0).ttft_s))  # nobody else's step runs


def test_half_of_the_requests_meet_no_wave(own: Times) -> None:
    """A tenth that come all at once are the slowest tenth: half way into them is the 95th percentile."""
    waved, plain = at(dataclasses.replace(own, engine=FREE.replace(wave=0.1)), 16.0), at(own, 16.0)
    prompt = float(own.step_s(0.0, 1.0, 512.0))
    assert float(waved.ttft_p50_s) < 1.1 * float(plain.ttft_p50_s)
    assert float(waved.ttft_p95_s) > 0.8 * 16 / 2 * prompt
    assert float(plain.ttft_s) < float(waved.ttft_s) < float(waved.ttft_p95_s)


def test_experts_stay_whole() -> None:
    experts = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    own = load_model(experts, "bf16")
    grid = axes(256, 256, 4)
    split, whole = (steps(own, Parallelism(tensor=2, expert=e), 8, ("bf16",), grid) for e in (1, 2))
    inner = [float(np.asarray(each.kernels.families["grouped_gemm"].dims["inner"])[0]) for each in (split, whole)]
    assert inner == [1408.0, 2816.0]
    assert "collective" in split.kernels.families


def test_an_engine_that_looks_up_rarely_lets_prompts_wait(own: Times) -> None:
    plain, rare = at(own, 8.0), at(own, 8.0, poll_steps=30)
    step = float(own.step_s(float(rare.batch) - float(rare.batch) / 8.0, 576.0))
    assert float(rare.ttft_p50_s - plain.ttft_p50_s) == pytest.approx(14.5 * step, rel=0.1)
    assert float(rare.ttft_p95_s - plain.ttft_p95_s) == pytest.approx(28.0 * step, rel=0.15)
    assert float(rare.tpot_s) < float(plain.tpot_s)  # who waits decodes beside nobody
    alone, alone_rare = at(own, 1.0), at(own, 1.0, poll_steps=30)
    assert float(alone_rare.ttft_s) == pytest.approx(float(alone.ttft_s), rel=1e-4)


def test_engines_by_name() -> None:
    found = {name: asked(engine=name) for name in ("vllm", "sglang")}
    assert found["sglang"].best.ttft_s["p50"] > found["vllm"].best.ttft_s["p50"]  # its requests take longer to come in
    assert found["vllm"].workload["engine"]["request_s"] == pytest.approx(0.0156)
    with pytest.raises(nj.InputError, match="unknown engine 'tgi'"):
        asked(engine="tgi")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"poll_steps": 0}}, "poll_steps is 0, expected a whole number from 1"),
        ({"ttft_s": 1e-6}, "no layout carries this load; nearest is .* first token after .* times"),
        ({"tpot_s": 1e-6}, "one request alone misses: token after"),
        ({"users": 4000, "max_gpus": 2, "tpot_s": 0.05}, "2 GPUs carry .* of the load; it takes"),
        ({"users": -1}, "users is -1, expected a positive number"),
        ({"users": None, "request_rate": -2.0}, "request_rate is -2.0, expected a positive number"),
        ({"users": None}, "give either users"),
        ({"percentile": 90}, "percentile is 90.0, expected 50 or 95"),
        ({"method": "guess"}, "method is 'guess', expected auto, estimate or engine"),
        ({"machines": "H200K"}, "H200K"),
        ({"options": {"chunk_tokens": 0}}, "chunk_tokens is 0, expected a whole number from 1"),
        ({"options": {"prefix_share": 1.5}}, "prefix_share is 1.5, expected 0 to 0.999"),
        ({"prices": Prices({"T4": 1.0})}, "no price for any of"),
        ({"input_tokens": None}, "input_tokens and output_tokens are missing"),
        ({"output_tokens": 0}, "output_tokens is 0"),
        ({"tensor_parallel": [3]}, "do not split over 3"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(nj.InputError, match=message):
        asked(**changes)


def test_defaults_follow_the_memory() -> None:
    assert usual_options(80 * 2**30, "H100", max_batch=None).max_batch == 1024
    assert usual_options(80 * 2**30, "NVIDIA A100-SXM4-80GB").max_batch == 256
    assert usual_options(24 * 2**30, "L4").chunk_tokens == 2048


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from neusight_jax.cli.serve import _seconds

    assert (_seconds("--ttft", "800ms"), _seconds("--ttft", "1s"), _seconds("--ttft", "0.05")) == (0.8, 1.0, 0.05)
    with pytest.raises(nj.InputError, match="--ttft is 'soon', expected a time such as 1s"):
        _seconds("--ttft", "soon")


@dataclasses.dataclass(frozen=True)
class Analytic:
    """Times of a model whose steps read weights and caches and multiply tokens, one after the other."""

    machine: Any
    engine: Engine
    attention_ranks: float = 1.0

    def step_s(
        self, decode: Any, context: Any, chunk: Any = 0.0, start: Any = 0.0, guesses: Any = 0.0, prompts: Any = 1.0
    ) -> Any:
        gpu, tokens = self.machine.gpu, decode * (1.0 + guesses) + prompts * chunk
        moved = 2e9 + 1e5 * (decode * context + 0.5 * prompts * chunk * (start + chunk))
        return 2e-4 + moved / gpu.mem_bytes_per_s + 2e9 * tokens / gpu.bf16_flop_per_s


def test_elasticities_are_those_of_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole steady state, on steps of known slope; those of a step are tested above."""
    monkeypatch.setattr(slopes, "times", lambda predictor, machine, steps, engine: Analytic(machine, engine))
    cluster, engine = nj.load_cluster("1x A100-SXM4-80GB"), FREE.replace(request_s=1e-3, wave=0.1)
    asked, load, step = demand(LENGTHS, Options(chunk_tokens=300, max_batch=16)), 6.0, 0.01
    found = slopes.elasticities(PREDICTOR, cluster, cast(Any, None), engine, asked, load, 16.0)

    @jax.jit
    def logs(own: Any) -> jax.Array:
        state = steady(cast(Times, Analytic(own, engine)), asked, load, 16.0)
        return jnp.log(jnp.stack([state.ttft_s, state.tpot_s]))

    own = on_device(cluster)
    for name in ("mem_bytes_per_s", "bf16_flop_per_s"):
        figure = getattr(own.gpu, name)
        low, high = (
            logs(own.replace(gpu=own.gpu.replace(**{name: figure * math.exp(each)}))) for each in (-step, step)
        )
        got = np.array([getattr(each.gpu, name) for each in found])
        np.testing.assert_allclose(got, np.asarray(high - low) / (2.0 * step), rtol=0.01, atol=1e-4)
        assert np.all((got > -1.0) & (got < -0.01)), name
    for each in found:  # what plays no part, and what the GPU has not, has no slope
        assert float(each.gpu.clock_hz) == float(each.gpu.fp8_flop_per_s) == 0.0
