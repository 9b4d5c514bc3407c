"""The explorer: what its server answers, and a browser that moves a slider."""

from __future__ import annotations

import http.client
import json
import shlex
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jinja2", reason="the page needs the extra `explore`")
pytest.importorskip("plotly", reason="the page needs the extra `explore`")

from browser import PROGRAM, browser

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.explorer import answers, questions
from neusight_jax.explorer.server import MOST_WAITING, Explorer
from neusight_jax.model.intervals import ratio_interval
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.reports.page import report_of
from neusight_jax.units import duration

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
KEY = "((key) => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true })))"
SHOWN = "[...document.querySelectorAll('.card .value')].map((each) => each.textContent)"


@pytest.fixture(scope="module")
def server() -> Iterator[Explorer]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (answers, questions):
            patch.setattr(module, "predictor_of", lambda checkpoint: RooflinePredictor())
        explorer = Explorer(0, {"model": "bert-tiny", "gpu": NAME})
        threading.Thread(target=explorer.serve_forever, daemon=True).start()
        yield explorer
        explorer.shutdown()
        explorer.server_close()


def ask(
    server: Explorer, path: str, body: Any = None, headers: dict[str, str] | None = None, token: str | None = None
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        text = body if isinstance(body, str) else json.dumps(body)
        whole = f"{path}{'&' if '?' in path else '?'}token={server.token}" if token is None else path
        connection.request("GET" if body is None else "POST", whole, None if body is None else text, headers or JSON)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def machines(*figures: dict[str, float]) -> dict[str, Any]:
    return {"workload": LOAD, "machines": [{"base": "H100", "figures": each} for each in figures]}


def test_the_page_loads_its_own_files_only(server: Explorer) -> None:
    code, text = ask(server, "/")
    assert code == 200
    assert f'src="plotly.js?token={server.token}"' in text
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
        "Power over the step",
    ]
    watts = found["plots"][3]["data"]
    assert [each["name"] for each in watts[1::2]] == ["A: H100, limit", "B: H100, limit"]
    for machine, steps in zip(found["machines"], watts[::2], strict=True):
        assert machine["energy_j"] == pytest.approx(machine["power_w"] * machine["total_s"])
        assert "Energy" in [card[0] for card in machine["cards"]]
        joules = 1e-3 * float(np.sum(np.diff(steps["x"]) * steps["y"][:-1]))
        assert joules == pytest.approx(machine["energy_j"], rel=1e-3)
    shares = found["plots"][0]["data"]
    assert sum(each["x"][0] for each in shares) == pytest.approx(1e3 * wanted[0])


def test_a_second_machine_is_compared_with_the_first(server: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences and ratios of what the two forecasts say, with the interval of the ratio as `compare` has it."""
    monkeypatch.setattr(answers, "predictor_of", nj.load_predictor)
    found = json.loads(ask(server, "/forecast", machines({}, {"mem_bytes_per_s": 1e12, "clock_hz": 1e9}))[1])
    first, second = found["machines"]
    step, energy = found["differences"][:2]
    assert step[4].startswith(f"{second['total_s'] / first['total_s']:.3f} (80% interval ")
    gpu, (_, moved) = nj.load_gpu("H100"), answers.Variant("H100", {"mem_bytes_per_s": 1e12, "clock_hz": 1e9}).named()
    seconds = second["total_s"], first["total_s"]
    low, high = ratio_interval(seconds, (tuple(second["interval_s"]), tuple(first["interval_s"])), (moved, gpu)) or ()
    assert step[4].endswith(f"{low:.3f} to {high:.3f})")
    assert low < seconds[0] / seconds[1] < high
    assert energy[4] == f"{second['energy_j'] / first['energy_j']:.3f}"
    assert json.loads(ask(server, "/forecast", machines({}))[1])["differences"] == []


def test_what_would_help_is_what_it_does(server: Explorer) -> None:
    """A tenth more of the figure that would help most takes about as much time off as the page says."""
    load = {**LOAD, "model": "gpt2", "batch_size": 8, "sequence_length": 1024}
    asked = {"workload": load, "machines": [{"base": "H100"}]}
    (found,) = json.loads(ask(server, "/forecast", asked)[1])["machines"]
    said = next(line for line in found["helps"] if line.startswith("10 % more memory bandwidth: "))
    asked["machines"] = [{"base": "H100", "figures": {"mem_bytes_per_s": 1.1 * 3.35e12}}]
    (after,) = json.loads(ask(server, "/forecast", asked)[1])["machines"]
    share = float(said.removeprefix("10 % more memory bandwidth: ").partition("%")[0])
    assert share == pytest.approx(100.0 * (1.0 - after["total_s"] / found["total_s"]), abs=0.5)
    assert share > 1.0


@pytest.mark.parametrize("gpus", [1, 16])
def test_copies_forecast_the_same(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command and the notebook cell that the page shows give the number that it shows."""
    monkeypatch.setattr(answers, "predictor_of", nj.load_predictor)
    asked = job({"nic_bytes_per_s": 5e9, "clock_hz": 1.5e9})
    if gpus == 1:
        asked = {**machines({"mem_bytes_per_s": 2e12}), "workload": {**LOAD, "model": "gpt2", "batch_size": 8}}
    found = answers.answer(answers.Catalog("bert-tiny", "H100"), asked)
    space: dict[str, Any] = {}
    exec(found["cell"], space)
    shown = found["machines"][0]["total_s"]
    assert space["forecast"].total_s == pytest.approx(shown, rel=1e-5)
    monkeypatch.chdir(tmp_path)
    lines = found["command"].splitlines()
    Path("machine.yaml").write_text("\n".join(lines[1 : lines.index("END")]), encoding="utf-8")
    assert run([*shlex.split(lines[-1])[1:], "--report", "page.html"]) == 0
    assert duration(shown) in Path("page.html").read_text(encoding="utf-8")


def test_a_question_is_answered_by_its_report(server: Explorer) -> None:
    """Caps of a board: the report of `power_curve`, its notes apart."""
    code, text = ask(server, "/question", {**machines({"power_limit_w": 300.0}), "question": {"kind": "power"}})
    found = json.loads(text)
    assert code == 200, found
    graph = nj.graph_from_config("bert-tiny", 2, 16)
    curve = nj.power_curve(RooflinePredictor(), nj.load_gpu("H100"), graph, gpu_name=NAME)
    assert found["sentence"] == report_of(curve).sentence
    assert [plot["title"] for plot in found["plots"]] == ["Energy against speed", "Speed"]
    assert "<table" in found["tables"]
    assert found["assumes"] == list(curve.notes)
    for question, said in (
        ({"kind": "gossip"}, "question 'gossip', expected one of serving, power, design, codesign"),
        ({"kind": "serving", "users": 1.5}, "users is 1.5, expected a whole number from 1"),
    ):
        code, text = ask(server, "/question", {**machines({}), "question": question})
        assert (code, said in json.loads(text)["error"]) == (400, True)


def test_real_gpus_are_marked_on_sliders(server: Explorer) -> None:
    found = {each["name"]: each for each in json.loads(ask(server, "/sliders?gpu=H100")[1])}
    ticks = dict(found["mem_bytes_per_s"]["ticks"])
    assert ticks["H200"] == nj.load_gpu("H200").mem_bytes_per_s
    assert found["mem_bytes_per_s"]["label"] == "memory bandwidth, TB/s"
    assert found["power_limit_w"]["high"] == found["tdp_w"]["value"]
    assert all(each["low"] <= value <= each["high"] for each in found.values() for _, value in each["ticks"])


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
    assert "clock 1.5 GHz" in text


def test_its_report_is_that_of_commands(server: Explorer) -> None:
    code, text = ask(server, "/report.html", machines({"clock_hz": 1.5e9}))
    assert code == 200
    assert "<dt>Command</dt><dd><code>neusight-jax explore</code>" in text
    assert f"{NAME} with clock 1.5 GHz" in text


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
    assert "Exposed communication" in [card[0] for card in found["machines"][1]["cards"]]
    titles = [each["title"] for each in found["plots"]]
    assert titles[:2] == ["Where the step goes", "Memory of the fullest rank"]
    assert titles[2:] == ["Where the time goes", "What more of a figure buys", "Roofline", "Power over the step"]
    code, text = ask(server, "/gpu.yaml", job(slow))
    assert code == 200
    (tmp_path / "cluster.yaml").write_text(text, encoding="utf-8")
    saved = nj.load_cluster(tmp_path / "cluster.yaml")
    assert saved == moved


def test_a_forward_pass_is_split_over_all_gpus(server: Explorer) -> None:
    """With the sums between them: slower links cost time, and elasticities say so."""
    sizes = {"mode": "prefill", "batch_size": 8, "sequence_length": 1024, "gpus": 8, "tensor": 8}
    asked = {
        "workload": {**LOAD, "model": "llama-3.2-1b", **sizes},
        "machines": job({}, {"link_bytes_per_s": 1e11})["machines"],
    }
    code, text = ask(server, "/forecast", asked)
    content = json.loads(text)
    assert code == 200, content
    graph = nj.graph_from_config("llama-3.2-1b", 8, 1024, "prefill", tensor_parallel=8)
    usual, slow = content["machines"]
    assert usual["total_s"] == pytest.approx(nj.predict(RooflinePredictor(), nj.load_cluster("8x H100"), graph).total_s)
    assert slow["total_s"] > 1.1 * usual["total_s"]
    assert slow["figures"]["link_bytes_per_s"] == 1e11


def test_sliders_of_a_cluster_are_those_of_its_links_too(server: Explorer) -> None:
    found = {each["name"]: each for each in json.loads(ask(server, "/sliders?gpu=H100&gpus=16")[1])}
    assert found["nic_bytes_per_s"]["value"] == 5e10
    assert found["nic_latency_s"]["label"] == "network latency, us"
    assert {"link_bytes_per_s", "mem_bytes_per_s"} <= set(found)
    assert not {"pair_share", "switch_reduction"} & set(found)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (machines({"clock_hz": 10**400}), "expected a finite number"),
        ({"workload": {**LOAD, "mode": ["inference"]}, "machines": [{"base": "H100"}]}, "mode is ['inference']"),
        (
            {"workload": {**LOAD, "batch_size": 1.5}, "machines": [{"base": "H100"}]},
            "batch_size is 1.5, expected a whole",
        ),
        ({"workload": LOAD, "machines": [{"base": "/etc/h100.yaml"}]}, "unknown GPU '/etc/h100.yaml'"),
        (
            {"workload": {**LOAD, "model": "/etc/config.json"}, "machines": [{"base": "H100"}]},
            "unknown model '/etc/con",
        ),
        ("[" * 60_000, "nested too deeply"),
        ('{"workload": {}, "workload": {}}', "'workload' is given twice"),
        (job({}, mode="inference"), "a forward pass is split over all 16 GPUs; expected tensor 16"),
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
        ("[", "not a request of the page: not JSON"),
    ],
)
def test_what_is_refused(server: Explorer, body: Any, said: str) -> None:
    code, text = ask(server, "/forecast", body)
    assert code == 400
    assert said in json.loads(text)["error"]


def test_other_sites_are_refused(server: Explorer) -> None:
    own = f"127.0.0.1:{server.server_address[1]}"
    assert ask(server, "/", headers={"Host": "example.com"})[0] == 403
    for origin in ("http://example.com:80", "http://example.com", "null", "http://127.0.0.1:1", f"https://{own}", ""):
        assert ask(server, "/forecast", machines({}), {**JSON, "Origin": origin})[0] == 403, origin
    assert ask(server, "/forecast", machines({}), {**JSON, "Origin": f"http://{own}"})[0] == 200
    assert ask(server, "/forecast", machines({}), {"Content-Type": "text/plain"})[0] == 400


def test_without_the_token_nothing_is_answered(server: Explorer) -> None:
    """Whoever else uses this machine has the port, but not the token."""
    for path in ("/", "/plotly.js", "/sliders?gpu=H100", "/?token=", "/?token=wrong", "/other", "/?token=%C3%A9"):
        code, text = ask(server, path, token="")
        assert (code, len(text.splitlines())) == (403, 1)
        assert "open the one that `neusight-jax explore` printed" in text
    assert ask(server, "/forecast", machines({}), token="")[0] == 403


def half_sent(server: Explorer) -> socket.socket:
    client = socket.create_connection(server.server_address[:2], timeout=20)
    client.sendall(
        b"POST /forecast?token=" + server.token.encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9"
    )
    return client


def test_half_sent_requests_hold_few_threads_and_not_for_long(
    server: Explorer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = threading.active_count()
    clients = [half_sent(server) for _ in range(100)]
    assert ask(server, "/sliders?gpu=H100")[0] == 200
    assert threading.active_count() - before <= MOST_WAITING + 8
    for client in clients:
        client.close()
    monkeypatch.setattr("neusight_jax.explorer.server._Handler.timeout", 0.2)
    with half_sent(server) as client:
        assert client.recv(100) == b""  # the server has ended it
    assert capfd.readouterr().err == ""


def test_two_tabs_do_not_wait_for_each_other(server: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model compiles in one, the other goes on."""
    begun, go_on, usual = threading.Event(), threading.Event(), answers.explored

    def slow(load: Any, *rest: Any, **options: Any) -> Any:
        if load.model == "gpt2":
            begun.set()
            assert go_on.wait(60)
        return usual(load, *rest, **options)

    monkeypatch.setattr(answers, "explored", slow)
    ask(server, "/forecast", machines({}))
    other = {"workload": {**LOAD, "model": "gpt2"}, "machines": [{"base": "H100"}]}
    codes: list[int] = []
    tab = threading.Thread(target=lambda: codes.append(ask(server, "/forecast", other)[0]))
    tab.start()
    assert begun.wait(60)
    assert ask(server, "/forecast", machines({}))[0] == 200
    assert codes == []
    go_on.set()
    tab.join(60)
    assert codes == [200]


def test_many_gpus_with_the_models_own_length(server: Explorer) -> None:
    """The page says no length: it is the model's, 1,024 for GPT-2, and 2,048 where it has more."""
    for model, tokens in (("gpt2", 1024), ("llama-3.2-1b", 2048)):
        code, text = ask(server, "/forecast", job({}, model=model, sequence_length=None, batch_size=16))
        assert code == 200, text
        assert json.loads(text)["sequence_length"] == tokens


def test_the_command_refuses(capsys: pytest.CaptureFixture[str], server: Explorer) -> None:
    assert run(["explore", "--gpu", "H1000", "--no-open"]) == 2
    assert "H1000" in capsys.readouterr().err
    assert run(["explore", "--no-open", "--port", str(server.server_address[1])]) == 2
    assert "give another, or 0 for any" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["bert-tiny"], ["--model", "bert-tiny"], []])
def test_the_model_it_opens_with(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its place, as in every other command; by the option it once had; or its own."""
    opened: list[dict[str, str]] = []

    class Opened(Explorer):
        def __init__(self, port: int, start: dict[str, str], *, ahead: bool) -> None:
            opened.append(start)
            super().__init__(0, start)

        def serve_forever(self, poll_interval: float = 0.5) -> None:
            self.server_close()

    monkeypatch.setattr("neusight_jax.explorer.server.Explorer", Opened)
    assert run(["explore", *words, "--gpu", "T4", "--no-open"]) == 0
    assert opened == [{"model": "bert-tiny" if words else "gpt2-large", "gpu": "Tesla T4"}]
    assert run(["explore", "no-such-model", "--no-open"]) == 2


@pytest.mark.skipif(not PROGRAM, reason="no Chromium here; the server's tests run everywhere")
def test_a_slider_moves_the_number(server: Explorer, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as page:
        page.open(server.url, "document.querySelectorAll('#plots .main-svg').length >= 3", width=1300)
        # Kernels of bert-tiny are as short as their launches.
        tiny = page.run("document.querySelector('.card .value').textContent")
        page.run(f"{CHOOSE}({{model: 'bert-large', batch_size: 8}})")
        page.wait(f"document.querySelector('.card .value').textContent !== '{tiny}'")
        before = page.run("document.querySelector('.card .value').textContent")
        slower = page.run(f"{MOVE}('mem_bytes_per_s', -2)")
        assert slower != before
        assert page.run("document.querySelectorAll('.slider.moved').length") == 1
        page.run("document.getElementById('hold').click()")
        page.wait("document.querySelectorAll('#differences td').length")
        page.run(f"{MOVE}('mem_bytes_per_s', 0)")
        row = "[...document.querySelectorAll('#differences tbody tr:first-child td')].map(cell => cell.textContent)"
        assert page.run(row)[:2] == [slower, before]
        page.run("document.getElementById('hold').click()")
        page.wait("document.getElementById('differences').hidden")
        page.run(f"{MOVE}('clock_hz', -0.5)")
        slower = page.run("document.querySelector('.card .value').textContent")
        kept = page.run("location.href")
        page.open("about:blank", "true")
        page.open(kept, "document.querySelectorAll('#plots .main-svg').length >= 3", width=1300)
        assert page.run("document.querySelector('.card .value').textContent") == slower
        assert page.run("document.getElementById('sentence').getAttribute('role')") == "status"
        ink = "document.querySelector('#plots .main-svg text').style.fill"
        light = page.run(ink)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        page.wait(f"{ink} !== '{light}'")
        page.run("document.querySelector('[data-tab=one]').focus()")
        page.run(f"{KEY}('ArrowRight')")
        page.wait("document.querySelector('[data-tab=cluster]').getAttribute('aria-selected') === 'true'")
        page.wait("document.activeElement.dataset.tab === 'cluster'")
        page.run(f"{CHOOSE}({{model: 'llama-3.2-1b', dtype: 'bf16', gpus: 8}})")
        page.wait("document.querySelector('input[name=nic_bytes_per_s]')")
        page.wait("document.querySelectorAll('#plots figure').length === 6")
        before = page.run(SHOWN)
        page.run(f"{MOVE}('link_bytes_per_s', -2)")
        after = page.run(SHOWN)
        assert after[0] != before[0]
        assert after[1] != before[1]
        assert [
            url for url in page.requests if not url.startswith((server.url.partition("?")[0], "data:", "blob:"))
        ] == []
        assert page.errors == []


def test_what_is_compiled_ahead_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first page on, the page's own workload first; the rest waits until nobody asks."""
    loads: list[Any] = []
    monkeypatch.setattr(answers, "warm", lambda catalog, load: loads.append(load))
    explorer = Explorer(0, {"model": "bert-tiny", "gpu": NAME}, ahead=True)
    assert explorer._ahead is not None
    assert not explorer._ahead.is_alive()
    explorer.page()
    explorer.server_close()
    assert not explorer._ahead.is_alive()
    assert [load.model for load in loads] == ["bert-tiny"]
    assert len(answers.common("bert-tiny")) == 2 + len(answers.COMMON)


def test_tabs_offer_models_that_they_are_for() -> None:
    offered = answers.choices("gpt2-large")
    assert "llama-3.1-8b" in offered["decoders"]
    assert "gpt2-large" not in offered["decoders"]
    assert set(offered["shapes"]) < set(offered["decoders"]) < set(offered["models"])
