"""Programs that run once, kept programs, and the line that says that compiling takes long."""

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neusight_jax as nj
from neusight_jax.designs.answers import problem
from neusight_jax.designs.search import Search
from neusight_jax.model import batching, heads, latency, programs, streams
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.model.programs import announce_compiling, one_shot, use_compile_cache
from neusight_jax.workloads import workload

UNSET = ("NEUSIGHT_JAX_CACHE", "TF_CPP_MIN_LOG_LEVEL", "JAX_COMPILATION_CACHE_DIR")


def _double(x: jax.Array) -> dict[str, jax.Array]:
    return {"twice": 2.0 * x}


def test_a_one_shot_program_is_the_function_alone_and_inside_another() -> None:
    double = one_shot(_double)
    assert float(double(jnp.float32(3.0))["twice"]) == 6.0
    assert float(jax.jit(lambda x: double(x)["twice"] + 1.0)(3.0)) == 7.0
    assert float(jax.grad(lambda x: double(x)["twice"])(3.0)) == 2.0
    assert double(jnp.arange(3.0))["twice"].tolist() == [0.0, 2.0, 4.0]


def test_options_that_xla_does_not_know_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"xla_backend_optimization_level": 0}
    monkeypatch.setattr(programs, "PLAIN", ({"xla_no_such_option": 1}, known))
    assert programs._plain_options.__wrapped__() == known
    monkeypatch.setattr(programs, "PLAIN", ({"xla_no_such_option": 1},))
    assert programs._plain_options.__wrapped__() is None


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Programs are kept in a folder of this test."""
    monkeypatch.setattr(programs, "_programs", tmp_path)
    programs._kept_program.cache_clear()
    return tmp_path


def test_a_kept_program_gives_the_same_and_is_not_traced_again(kept: Path) -> None:
    traced = []

    def power(x: dict[str, jax.Array], exponent: float) -> tuple[jax.Array, list[jax.Array]]:
        traced.append(exponent)
        return x["base"] ** exponent, [x["base"]]

    values = ({"base": np.arange(4.0)}, 2.0)
    first = one_shot(power)(*values)
    assert len(traced) == 1
    assert len(list(kept.iterdir())) == 1
    programs._kept_program.cache_clear()  # as in the next process
    second = one_shot(power)(*values)
    assert len(traced) == 1
    assert second[0].tolist() == first[0].tolist() == [0.0, 1.0, 4.0, 9.0]
    assert second[1][0].dtype == jnp.float32
    one_shot(power, closes_over="something else")(*values)
    one_shot(power)({"base": np.arange(5.0)}, 2.0)
    assert len(traced) == 3
    assert len(list(kept.iterdir())) == 3


def test_a_spoilt_program_is_made_again(kept: Path) -> None:
    one_shot(_double)(jnp.float32(3.0))
    (path,) = kept.iterdir()
    whole = path.read_bytes()
    for spoilt in (b"", whole[: len(whole) // 2], b"\xff" * len(whole)):
        path.write_bytes(spoilt)
        programs._kept_program.cache_clear()
        assert float(one_shot(_double)(jnp.float32(3.0))["twice"]) == 6.0
    assert len(path.read_bytes()) > len(whole) // 2


def test_a_program_that_others_could_have_written_is_made_again(kept: Path) -> None:
    one_shot(_double)(jnp.float32(3.0))
    (path,) = kept.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    name = path.name
    one_shot(lambda x: {"twice": 5.0 * x}, closes_over="other")(jnp.float32(3.0))
    (other,) = (each for each in kept.iterdir() if each.name != name)
    path.write_bytes(other.read_bytes())
    programs._kept_program.cache_clear()
    assert float(one_shot(_double)(jnp.float32(3.0))["twice"]) == 15.0  # ours: it is taken at its word
    for place in (path, kept):
        path.write_bytes(other.read_bytes())
        place.chmod(0o777)
        programs._kept_program.cache_clear()
        assert float(one_shot(_double)(jnp.float32(3.0))["twice"]) == 6.0
        place.chmod(0o700)


def test_a_cache_that_others_may_write_to_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a shared machine somebody may make the folder first, with programs of their own in it."""
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "neusight_jax").mkdir()
    (tmp_path / "neusight_jax").chmod(0o777)
    assert use_compile_cache(tmp_path / "neusight_jax") is None
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert use_compile_cache() is None
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    lines = capsys.readouterr().err.splitlines()
    assert lines == 2 * [
        f"{tmp_path}/neusight_jax: others may write there, so no compiled programs are read from it; chmod go-w"
    ]


def test_kept_programs_go_by_the_package_and_not_by_records_of_others(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @jax.tree_util.register_dataclass
    @programs_dataclass
    class Foreign:
        x: jax.Array

    assert float(one_shot(lambda record: record.x + 1.0)(Foreign(jnp.float32(1.0)))) == 2.0
    assert not list(kept.iterdir())
    one_shot(_double)(jnp.float32(3.0))
    monkeypatch.setattr(programs, "_source", lambda: "another state of the files")
    programs._kept_program.cache_clear()
    one_shot(_double)(jnp.float32(3.0))
    assert len(list(kept.iterdir())) == 2


def programs_dataclass(cls: type) -> type:
    """A frozen dataclass that is not the package's."""
    from dataclasses import dataclass

    return dataclass(frozen=True)(cls)


def test_what_a_search_closes_over_tells_its_programs_apart(kept: Path) -> None:
    gpu, predictor = nj.load_gpu("T4"), nj.load_predictor("fp32")
    load = workload(nj.graph_from_config("bert-tiny", 1, 32))
    from neusight_jax.designs.cost import costs_for
    from neusight_jax.designs.problem import Problem

    def filled(**budgets: float) -> np.ndarray:
        free = (nj.Range("mem_bytes_per_s", 1e11, 1e13), nj.Range("num_sms", 20, 200))
        search = Search(Problem(predictor, gpu, free, (load,), costs_for(gpu), "latency", budgets))
        logs = np.log([[2e11, 40.0]])
        return np.exp(search.repaired(logs, np.ones((1, 2))))

    by_power, by_area = filled(power_w=100.0), filled(area_mm2=500.0)
    assert not np.allclose(by_power, by_area)
    programs._kept_program.cache_clear()
    np.testing.assert_allclose(filled(power_w=100.0), by_power, rtol=1e-6)


def test_another_question_of_a_search_forecasts_by_the_same_program(kept: Path) -> None:
    gpu, load = nj.load_gpu("H100"), workload(nj.graph_from_config("bert-tiny", 1, 32))
    logs = np.log([[2e12]])

    def asked(low: float, objective: str | dict[str, float], **budgets: float) -> tuple[float, dict[str, float]]:
        free = (nj.Range("mem_bytes_per_s", low, 1e13),)
        of = problem(RooflinePredictor(), gpu, free, [load], objective=objective, budgets=budgets)
        value, spent = Search(of).values(logs)
        return float(value[0]), {name: float(each[0]) for name, each in spent.items()}

    latency, _ = asked(1e12, "latency")
    assert len(list(kept.iterdir())) == 1
    programs._kept_program.cache_clear()  # as in the next process
    product, spent = asked(1.5e12, {"latency_s": 1.0, load.name: 2.0, "area_mm2": 1.0}, area_mm2=900.0)
    assert len(list(kept.iterdir())) == 1
    assert product == pytest.approx(3.0 * latency + spent["area_mm2"], rel=1e-6)
    # Figures of the machine are many: a budget on one makes a program of its own.
    _, spent = asked(1e12, "latency", mem_bytes_per_s=3e12)
    assert len(list(kept.iterdir())) == 2
    assert spent["mem_bytes_per_s"] == pytest.approx(logs[0, 0], rel=1e-6)


def test_keeping_programs_is_off_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_programs", Path("before"))
    monkeypatch.setenv("NEUSIGHT_JAX_CACHE", "0")
    use_compile_cache()
    assert programs._programs is None


def test_a_constant_or_a_function_that_a_session_changes_tells_programs_apart(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept program is of the package as it is in memory, not as its files have it."""
    model = "neusight_jax.model.latency"
    before = programs._in_memory(model)
    assert before == programs._in_memory(model)
    assert before is not None
    assert "neusight_jax.kernels.gemm." in before
    monkeypatch.setattr(streams, "WIDE_FLOP_PER_CYCLE", 2.0 * streams.WIDE_FLOP_PER_CYCLE)
    changed = programs._in_memory(model)
    assert changed not in (None, before)
    monkeypatch.undo()
    monkeypatch.setattr(heads, "heads_of", lambda family: {})
    assert programs._in_memory(model) not in (None, before)
    monkeypatch.undo()
    monkeypatch.setattr(heads, "heads_of", eval("lambda family: {}"))  # as in a notebook: in no file
    assert programs._in_memory(model) is None


def test_values_slopes_and_batches_of_latency_are_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process traces no forecast again, and gets the same."""
    kernels = nj.graph_from_config("bert-tiny", 1, 32, mode="training").kernels
    gpu, predictor = nj.load_gpu("T4"), nj.load_predictor("fp32")
    many = nj.stack_gpus([gpu, gpu.replace(mem_bytes_per_s=5e11)])

    def answers() -> list[np.ndarray]:
        slopes = jax.grad(nj.latency, argnums=1)(predictor, gpu, kernels)
        batch = jax.vmap(nj.latency, in_axes=(None, 0, None))(predictor, many, kernels)
        return [np.asarray(leaf) for leaf in (nj.latency(predictor, gpu, kernels), slopes.mem_bytes_per_s, batch)]

    first = answers()
    np.testing.assert_allclose(first[0], first[2][0], rtol=1e-6)
    number = len(list(kept.iterdir()))
    memories = {module.__name__: programs._in_memory(module.__name__) for module in (latency, batching)}
    programs._kept_program.cache_clear()  # as in the next process
    monkeypatch.setattr(latency, "kernel_forecasts", None)  # a trace would fail
    monkeypatch.setattr(programs, "_in_memory", memories.get)
    for one, other in zip(first, answers(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(list(kept.iterdir())) == number


def test_python_keeps_programs_quietly_between_processes(tmp_path: Path) -> None:
    code = """
import jax, neusight_jax as nj
assert jax.config.jax_compilation_cache_dir is None
predictor = nj.load_predictor("fp32")
print(jax.config.jax_compilation_cache_dir)
print(nj.predict(predictor, nj.load_gpu("T4"), nj.graph_from_config("bert-tiny", 1, 32)).total_s)
"""
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stderr == runs[1].stderr == ""
    assert Path(runs[0].stdout.splitlines()[0]).is_relative_to(tmp_path / "neusight_jax")
    off = subprocess.run(
        command, env={**environment, "NEUSIGHT_JAX_CACHE": "0"}, capture_output=True, text=True, check=True
    )
    assert off.stdout.splitlines()[0] == "None"


def test_a_program_that_jax_had_kept_is_kept_whole(tmp_path: Path) -> None:
    """What JAX reads from its own cache lacks parts when it is written again: the third process would fail."""
    code = """
import contextlib, sys, neusight_jax as nj
from neusight_jax.model import programs
predictor = nj.load_predictor("fp32")
if sys.argv[1] == "jax":
    programs._compiled_here, programs._keep = contextlib.nullcontext, lambda path, content: None
print(float(nj.latency(predictor, nj.load_gpu("T4"), nj.graph_from_config("bert-tiny", 1, 32).kernels)))
"""
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = [
        subprocess.run([sys.executable, "-c", code, step], env=environment, capture_output=True, text=True, check=True)
        for step in ("jax", "keeps", "reads")
    ]
    assert len({run.stdout for run in printed}) == 1


def test_a_cache_that_is_set_stays_and_one_that_cannot_be_is_no_error(tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    assert use_compile_cache() == Path(before)
    (tmp_path / "file").touch()
    assert use_compile_cache(tmp_path / "file" / "below") is None
    assert jax.config.jax_compilation_cache_dir == before


def test_long_compiling_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[float] = []
    begin = time.monotonic()
    monkeypatch.setattr(programs, "ANNOUNCED_S", 0.2)
    listeners: dict[str, object] = {}
    for name in ("register_scalar_listener", "register_event_listener", "register_event_duration_secs_listener"):
        monkeypatch.setattr(jax.monitoring, name, lambda listener, name=name: listeners.update({name: listener}))
    announce_compiling(lambda: said.append(time.monotonic() - begin))
    starts, ends = (listeners[f"register_{kind}_listener"] for kind in ("scalar", "event_duration_secs"))
    event = "/jax/core/compile/backend_compile_duration"
    starts(event, 0.0)  # type: ignore[operator]
    ends(event, 0.15)  # type: ignore[operator]
    time.sleep(0.25)
    assert not said  # that one was over in time
    starts(event, 0.0)  # type: ignore[operator]
    time.sleep(0.25)
    assert len(said) == 1
    ends(event, 0.3)  # type: ignore[operator]
    starts(event, 0.0)  # type: ignore[operator]
    time.sleep(0.25)
    assert len(said) == 1


def test_jax_says_when_it_begins_to_compile() -> None:
    seen: list[str] = []
    jax.monitoring.register_scalar_listener(lambda event, value, **_: seen.append(event))
    jax.jit(lambda x: x * 3.0 + 0.125)(jnp.ones(7))
    assert any(event.endswith("backend_compile_duration") for event in seen)


def test_many_machines_are_stacked_on_the_host() -> None:
    gpu = nj.load_gpu("H100")
    machines = [gpu.replace(mem_bytes_per_s=1e12 + number) for number in range(10_000)]
    begin = time.process_time()
    stacked = nj.stack_gpus(machines)
    assert time.process_time() - begin < 2.0  # 80 s when every value was dispatched on its own
    assert stacked.mem_bytes_per_s.shape == (10_000,)
    assert stacked.num_sms.dtype == jnp.float32
    of_traced = jax.jit(lambda rate: nj.stack_gpus([gpu, gpu.replace(mem_bytes_per_s=rate)]).mem_bytes_per_s)
    np.testing.assert_allclose(of_traced(2e12), [gpu.mem_bytes_per_s, 2e12], rtol=1e-6)
    both = nj.stack_gpus([stacked, stacked])
    assert both.clock_hz.shape == (2, 10_000)
