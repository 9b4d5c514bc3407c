"""`neusight-jax explore`: the page where figures of a GPU are moved and the forecast follows."""

from __future__ import annotations

from typing import Annotated

import typer

from neusight_jax.cli.console import remark
from neusight_jax.cli.help import model_names
from neusight_jax.cli.options import argument, option

_OPEN = "Show it in the default browser, or only say where it is."


def explore(
    model: Annotated[str, argument("The model it opens with.", "MODEL", model_names)] = "gpt2-large",
    gpu: Annotated[str, option("The GPU it opens with: a name, or a JSON or YAML file.")] = "H100",
    port: Annotated[int, option("Of this machine; 0 = any free one.")] = 8642,
    show: Annotated[bool, option(_OPEN, "--open/--no-open")] = True,
    former_model: Annotated[str | None, typer.Option("--model", hidden=True)] = None,  # goes with the next version
) -> None:
    """Open a page on this machine: move a GPU's figures, see the forecast follow. Ctrl-C ends it."""
    import webbrowser

    from neusight_jax.files import scratch_folder
    from neusight_jax.graph.configs.config import read_config
    from neusight_jax.hardware.catalog import canonical_name
    from neusight_jax.hardware.files import load_named_gpu
    from neusight_jax.reports.page import require_pages

    require_pages("explore")
    from neusight_jax.explorer.server import Explorer

    load_named_gpu(gpu)  # wrong names are said before the page opens
    model = former_model or model
    read_config(model)
    server = Explorer(port, {"model": model, "gpu": canonical_name(gpu) or gpu}, ahead=True)
    remark(f"exploring at {server.url} (Ctrl-C ends it)")
    with scratch_folder() as folder:
        if show:  # the token stays out of the browser's command line, which every user of the machine may read
            way = folder / "explore.html"
            way.write_text(f'<meta http-equiv="refresh" content="0; url={server.url}">', encoding="utf-8")
            webbrowser.open(way.as_uri())
        server.serve_forever()
