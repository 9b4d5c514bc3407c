"""The explorer: what its server answers, and a browser that moves a slider."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="the page needs the extra `explore`")
pytest.importorskip("plotly", reason="the page needs the extra `explore`")

from browser import PROGRAM, browser

import neusight_jax as nj
from neusight_jax.baselines.roofline import RooflinePredictor
from neusight_jax.cli import run
from neusight_jax.explorer import answers
from neusight_jax.explorer.server import Explorer

NAME = "NVIDIA H100 80GB HBM3"
LOAD = {"model": "bert-tiny", "mode": "inference", "batch_size": 2, "sequence_length": 16, "dtype": ""}
JSON = {"Content-Type": "application/json"}
MOVE = """(async (name, value) => {
  const before = Number(document.documentElement.dataset.shown);
  const input = document.querySelector(`input[name=${name}]`);
  input.value = value;
  input.dispatchEvent(new Event("input", { bubbles: true }));
  while (Number(document.documentElement.dataset.shown) === before) await new Promise((done) => setTimeout(done, 1));
  return document.querySelector(".card .value").textContent;
})"""

CHOOSE = """((chosen) => {
  const form = document.getElementById("workload");
  for (const [name, value] of Object.entries(chosen)) form.elements[name].value = value;
  form.elements.gpus.dispatchEvent(new Event("change", { bubbles: true }));
})"""
SHOWN = "[...document.querySelectorAll('.card .value')].map((each) => each.textContent)"


@pytest.fixture(scope="module")
def server() -> Iterator[Explorer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_predictor", lambda checkpoint: RooflinePredictor())
        explorer = Explorer(0, {"model": "bert-tiny", "gpu": NAME})
        threading.Thread(target=explorer.serve_forever, daemon=True).start()
        yield explorer
        explorer.shutdown()
        explorer.server_close()


def ask(server: Explorer, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        text = body if isinstance(body, str) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, None if body is None else text, headers or JSON)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def machines(*figures: dict[str, float]) -> dict[str, Any]:
    return {"workload": LOAD, "machines": [{"base": "H100", "figures": each} for each in figures]}


def test_the_page_loads_its_own_files_only(server: Explorer) -> None:
    code, text = ask(server, "/")
    assert code == 200
    assert 'src="plotly.js"' in text
    assert text.count("<script src=") == 1
    assert "http" not in text.replace("http-equiv", "")
    assert ask(server, "/plotly.js")[0] == 200
    assert ask(server, "/other")[0] == 404


def test_a_variant_is_forecast_as_everywhere(server: Explorer) -> None:
    code, text = ask(server, "/forecast", machines({}, {"mem_bytes_per_s": 1e12, "num_sms": 66}))
    found = json.loads(text)
    assert code == 200
    graph, gpu = nj.graph_from_config("bert-tiny", 2, 16), nj.load_gpu("H100")
    moved = gpu.replace(mem_bytes_per_s=1e12, num_sms=66)
    moved = moved.replace(
        **{name: getattr(gpu, name) / 2 for name in found["machines"][1]["figures"] if "flop_per_s" in name}
    )
    wanted = [nj.predict(RooflinePredictor(), each, graph).total_s for each in (gpu, moved)]
    assert [each["total_s"] for each in found["machines"]] == pytest.approx(wanted)
    assert [each["title"] for each in found["plots"]] == [
        "Where the time goes",
        "What more of a figure buys",
        "Roofline",
    ]
    shares = found["plots"][0]["data"]
    assert sum(each["x"][0] for each in shares) == pytest.approx(1e3 * wanted[0])


def test_sliders_are_the_figures_it_has(server: Explorer) -> None:
    found = {each["name"]: each for each in json.loads(ask(server, "/sliders?gpu=H100")[1])}
    assert found["mem_bytes_per_s"]["value"] == 3.35e12
    assert not {"vendor", "memory_kind", "fp4_flop_per_s", "l2_partitions"} & set(found)
    code, text = ask(server, "/sliders?gpu=H1000")
    assert code == 400
    assert "H1000" in json.loads(text)["error"]


def test_a_variant_is_saved_as_a_file(server: Explorer, tmp_path: Path) -> None:
    code, text = ask(server, "/gpu.yaml", machines({"clock_hz": 1.5e9}))
    assert code == 200
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    saved, (_, made) = nj.load_gpu(tmp_path / "mine.yaml"), answers.Variant("H100", {"clock_hz": 1.5e9}).named()
    assert saved == made
    assert "clock_hz 1.5 GHz" in text


def test_its_report_is_that_of_commands(server: Explorer) -> None:
    code, text = ask(server, "/report.html", machines({"clock_hz": 1.5e9}))
    assert code == 200
    assert "<dt>Command</dt><dd><code>neusight-jax explore</code>" in text
    assert f"{NAME} with clock_hz 1.5 GHz" in text


def job(*figures: dict[str, float], **asked: Any) -> dict[str, Any]:
    sizes = {"mode": "training", "batch_size": 16, "sequence_length": 1024, "gpus": 16, "tensor": 2, "pipeline": 2}
    load = {**LOAD, "model": "llama-3.2-1b", **sizes, **asked}
    return {"workload": load, "machines": [{"base": "H100", "figures": each} for each in figures]}


def test_a_job_on_a_cluster_is_forecast_as_everywhere(server: Explorer, tmp_path: Path) -> None:
    slow = {"nic_bytes_per_s": 5e9, "link_bytes_per_s": 1e11, "mem_bytes_per_s": 2e12}
    code, text = ask(server, "/forecast", job({}, slow))
    found = json.loads(text)
    assert code == 200, found
    cluster = nj.load_cluster("16x H100")
    layout = nj.Parallelism(tensor=2, pipeline=2, data=4)
    own = nj.job_from_config("llama-3.2-1b", layout, global_batch_size=16, sequence_length=1024)
    links = cluster.topology.replace(nic_bytes_per_s=5e9, link_bytes_per_s=1e11)
    moved = cluster.replace(gpu=cluster.gpu.replace(mem_bytes_per_s=2e12), topology=links)
    wanted = [nj.predict(RooflinePredictor(), each, own) for each in (cluster, moved)]
    assert [each["total_s"] for each in found["machines"]] == pytest.approx([each.total_s for each in wanted])
    assert found["machines"][1]["exposed_communication_s"] == pytest.approx(wanted[1].exposed_communication_s)
    assert found["machines"][1]["cards"][1][0] == "Exposed communication"
    assert [each["title"] for each in found["plots"]] == ["Where the step goes", "Memory of the fullest rank"]
    code, text = ask(server, "/gpu.yaml", job(slow))
    assert code == 200
    (tmp_path / "cluster.yaml").write_text(text, encoding="utf-8")
    saved = nj.load_cluster(tmp_path / "cluster.yaml")
    assert saved == moved


def test_sliders_of_a_cluster_are_those_of_its_links_too(server: Explorer) -> None:
    found = {each["name"]: each for each in json.loads(ask(server, "/sliders?gpu=H100&gpus=16")[1])}
    assert found["nic_bytes_per_s"]["value"] == 5e10
    assert found["nic_latency_s"]["label"] == "nic_latency_s (us)"
    assert {"link_bytes_per_s", "mem_bytes_per_s"} <= set(found)
    assert not {"pair_share", "switch_reduction"} & set(found)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (job({}, mode="inference"), "jobs on many GPUs are training steps"),
        (job({}, tensor=3), "16 GPUs are no multiple of tensor"),
        (job({}, gpus="many"), "gpus is 'many', expected a whole number from 1"),
        (job({}, zero=7), "zero is 7"),
        (job({"nic_bytes_per_s": 1.0}), "nic_bytes_per_s is 1.0, expected bytes/s"),
        (machines({"clock": 1.0}), "a GPU has no field 'clock'"),
        (machines({"clock_hz": 1.0}), "clock_hz is 1, expected 1e8 to 1e10"),
        (machines(), "0 machines, expected 1 or 2"),
        ({"workload": {**LOAD, "model": "gpt9"}, "machines": [{"base": "H100"}]}, "gpt9"),
        ({"workload": LOAD}, "not a request of the page"),
        ({**machines({}), "workload": {**LOAD, "dtype": "fp4"}}, "fp4"),
        ("[", "not a request of the page"),
    ],
)
def test_what_is_refused(server: Explorer, body: Any, said: str) -> None:
    code, text = ask(server, "/forecast", body)
    assert code == 400
    assert said in json.loads(text)["error"]


def test_other_sites_are_refused(server: Explorer) -> None:
    assert ask(server, "/", headers={"Host": "example.com"})[0] == 403
    assert ask(server, "/forecast", machines({}), {**JSON, "Origin": "http://example.com:80"})[0] == 403
    assert ask(server, "/forecast", machines({}), {"Content-Type": "text/plain"})[0] == 400


def test_the_command_refuses(capsys: pytest.CaptureFixture[str], server: Explorer) -> None:
    assert run(["explore", "--gpu", "H1000", "--no-open"]) == 2
    assert "H1000" in capsys.readouterr().err
    assert run(["explore", "--no-open", "--port", str(server.server_address[1])]) == 2
    assert "give another, or 0 for any" in capsys.readouterr().err


@pytest.mark.skipif(not PROGRAM, reason="no Chromium here; the server's tests run everywhere")
def test_a_slider_moves_the_number(server: Explorer, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as page:
        page.open(server.url, "document.querySelectorAll('#plots .main-svg').length >= 3", width=1300)
        before = page.run("document.querySelector('.card .value').textContent")
        slower = page.run(f"{MOVE}('mem_bytes_per_s', -2)")
        assert slower != before
        assert page.run("document.querySelectorAll('.slider.moved').length") == 1
        page.run("document.getElementById('two').click()")
        page.wait("document.querySelectorAll('.machine .card .value').length > 5")
        shown = page.run(
            "[...document.querySelectorAll('.machine')].map(m => m.querySelector('.card .value').textContent)"
        )
        assert shown == [slower, before]
        page.run("document.getElementById('two').click()")
        page.run(f"{CHOOSE}({{model: 'llama-3.2-1b', dtype: 'bf16', gpus: 8}})")
        page.wait("document.querySelector('input[name=nic_bytes_per_s]')")
        page.wait("document.querySelectorAll('#plots figure').length === 2")
        before = page.run(SHOWN)
        page.run(f"{MOVE}('link_bytes_per_s', -2)")
        after = page.run(SHOWN)
        assert after[0] != before[0]
        assert after[1] != before[1]
        assert [url for url in page.requests if not url.startswith((server.url, "data:", "blob:"))] == []
        assert page.errors == []
