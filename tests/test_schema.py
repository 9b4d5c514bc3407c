"""JSON Schemas of files, and that they and the loaders agree on which files are good."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import Fails

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.cli.schema import KINDS, file_schema
from neusight_jax.hardware.cluster import TOPOLOGY_FIELDS
from neusight_jax.hardware.gpu import FIELDS
from neusight_jax.tables import Yaml

ROOT = Path(__file__).resolve().parents[1]
LOADERS: dict[str, Callable[[Path], Any]] = {
    "gpu": nj.load_gpu,
    "cluster": nj.load_cluster,
    "prices": nj.read_prices,
    "card": lambda path: nj.load_card(path.parent),
}
SHIPPED = [
    ("gpu", ROOT / "docs/examples/gpu.yaml"),
    ("cluster", ROOT / "docs/examples/cluster.yaml"),
    ("prices", ROOT / "docs/prices.yaml"),
    *(("card", path) for path in sorted((ROOT / "checkpoints").glob("*/card.json"))),
]


def accepted(kind: str, content: Any, schema: dict[str, Any] | None = None) -> bool | None:
    """Whether the schema accepts it; None where the package `jsonschema` is not installed."""
    if importlib.util.find_spec("jsonschema") is None:
        return None
    import jsonschema

    return bool(jsonschema.Draft202012Validator(schema or file_schema(kind)).is_valid(content))


def loaded(kind: str, content: Any, folder: Path) -> bool:
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(content))
    try:
        LOADERS[kind](path)
    except nj.InputError:
        return False
    return True


def test_kinds_are_listed(capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    assert run(["schema"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == list(KINDS)
    assert run(["schema", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["schema"], [row["name"] for row in listed["schemas"]]) == ("neusight_jax.schemas/1", list(KINDS))
    assert "unknown kind of file 'price'; nearest: prices" in fails("schema", "price")


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_is_printed(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([kind], [kind, "--json"]):
        assert run(["schema", *arguments]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(file_schema(kind)))
    schema = file_schema(kind)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"]
    assert schema["description"]
    if importlib.util.find_spec("jsonschema") is not None:
        import jsonschema

        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(("kind", "path"), SHIPPED, ids=lambda each: getattr(each, "parent", Path(str(each))).name)
def test_shipped_files_are_good(kind: str, path: Path) -> None:
    LOADERS[kind](path)
    assert accepted(kind, yaml.load(path.read_text(encoding="utf-8"), Loader=Yaml)) in (True, None)


@pytest.mark.parametrize(
    ("page", "kind", "key"),
    [
        ("quickstart.md", "gpu", "base:"),
        ("extending.md", "gpu", "base:"),
        ("clusters.md", "cluster", "count:"),
        ("renting.md", "prices", "H100:"),
    ],
)
def test_files_on_pages_are_good(page: str, kind: str, key: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    blocks = [block for block in blocks if re.search(f"^{key}", block, re.MULTILINE)]
    assert blocks
    for block in blocks:
        content = yaml.load(block, Loader=Yaml)
        assert loaded(kind, content, tmp_path)
        assert accepted(kind, content) in (True, None)


def test_the_examples_on_the_pages_are_the_files() -> None:
    for name, page in (("gpu", "extending.md"), ("cluster", "clusters.md")):
        _, _, text = (ROOT / f"docs/examples/{name}.yaml").read_text(encoding="utf-8").partition("\n")
        assert f"```yaml\n{text}```" in (ROOT / "docs" / page).read_text(encoding="utf-8")


WHOLE = {name: getattr(nj.load_gpu("H100"), name) for name in FIELDS}
BAD: list[tuple[str, Any]] = [
    ("gpu", {}),
    ("gpu", {key: value for key, value in WHOLE.items() if key != "tdp_w"}),
    ("gpu", {"base": "H100", "clock": 1.8e9}),
    ("gpu", {"base": "H100", "clock_hz": 1980}),
    ("gpu", {"base": "H100", "clock_hz": "1.98 TB/s"}),
    ("gpu", {"base": "H100", "clock_hz": "fast"}),
    ("gpu", {"base": "H100", "clock_hz": None}),
    ("gpu", {"base": "H100", "num_sms": "132 GHz"}),
    ("gpu", {"base": "H100", "vendor": "Nvida"}),
    ("gpu", {"base": ["H100"]}),
    ("gpu", {"base": "H100", "name": "x" * 201}),
    ("cluster", {"gpu": "H100"}),
    ("cluster", {"count": 8}),
    ("cluster", {"gpu": "H100", "count": 0}),
    ("cluster", {"gpu": "H100", "count": "8"}),
    ("cluster", {"gpu": {"clock_hz": 1.8e9}, "count": 8}),
    ("cluster", {"gpu": "H100", "count": 8, "nodes": 1}),
    ("cluster", {"gpu": "H100", "count": 8, "topology": {"nics": 4}}),
    ("cluster", {"gpu": "H100", "count": 8, "topology": {"nic_bytes_per_s": "400 Gbit/s"}}),
    ("cluster", {"gpu": "H100", "count": 8, "topology": {"gpus_per_domain": 2.5}}),
    ("prices", {"H100": "cheap"}),
    ("prices", {"H100": 0}),
    ("prices", {"H100": True}),
    ("prices", {"H100": 2.5, "currency": "x" * 21}),
]


@pytest.mark.parametrize(("kind", "content"), BAD)
def test_a_bad_file_fails_schema_and_loader(kind: str, content: Any, tmp_path: Path) -> None:
    assert not loaded(kind, content, tmp_path)
    assert not accepted(kind, content)


def test_examples_of_every_figure_are_good(tmp_path: Path) -> None:
    gpu, cluster = file_schema("gpu"), file_schema("cluster")
    topology = cluster["$defs"]["TopologyFile"]["properties"]
    assert set(FIELDS) <= set(gpu["properties"])
    assert set(TOPOLOGY_FIELDS) <= set(topology)
    for name in (*FIELDS, *TOPOLOGY_FIELDS):
        entry = gpu["properties"][name] if name in FIELDS else topology[name]
        assert entry["description"]
        assert entry["examples"]
        for example in entry["examples"]:
            own = {"base": "H100", name: example}
            kind, content = "gpu", own
            if name not in FIELDS:
                kind, content = "cluster", {"gpu": "H100", "count": 8, "topology": {name: example}}
            assert loaded(kind, content, tmp_path), (name, example)
            assert accepted(kind, content, gpu if kind == "gpu" else cluster) in (True, None), (name, example)
    for kind in ("gpu", "cluster", "prices"):
        assert loaded(kind, KINDS[kind][2], tmp_path)
        assert accepted(kind, KINDS[kind][2]) in (True, None)


def test_a_whole_gpu_file_is_good(tmp_path: Path) -> None:
    """As `profile` writes one: all figures, and positions for names."""
    content = {"name": "Mine", **WHOLE}
    assert loaded("gpu", content, tmp_path)
    assert accepted("gpu", content) in (True, None)
