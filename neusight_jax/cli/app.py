"""Commands, exit codes and the one line an error gets.

Exit codes: 0 done; 2 bad input, with one line on stderr; 130 interrupted (`interrupts`), 143 terminated; 141 the reader
of a pipe went away.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from neusight_jax import __version__
from neusight_jax.cli import interrupts
from neusight_jax.cli.calibrate import calibrate
from neusight_jax.cli.compare import compare
from neusight_jax.cli.design import design
from neusight_jax.cli.evaluate import evaluate
from neusight_jax.cli.importing import import_aiconfigurator, import_neusight
from neusight_jax.cli.leaderboard import leaderboard
from neusight_jax.cli.listings import checkpoints, gpus, models
from neusight_jax.cli.predict import predict
from neusight_jax.cli.profile import profile
from neusight_jax.cli.profile_model import profile_model
from neusight_jax.cli.scale_trace import scale_trace
from neusight_jax.cli.sensitivity import sensitivity
from neusight_jax.cli.startup import prepare_jax
from neusight_jax.cli.sweep import sweep
from neusight_jax.cli.train import train
from neusight_jax.errors import BAD_INPUT, InputError
from neusight_jax.files import forget_written

INTERRUPTED, BROKEN_PIPE = 130, 141
LISTS = ("--measurements", "--hold-out", "--device", "--baseline")
"""Options that take several values, as `--option A B` or `--option A --option B`."""
LISTS_OF: dict[str, tuple[str, ...]] = {
    "compare": ("--gpu",),
    "scale-trace": ("--to", "--select"),
    "sweep": ("--gpu", "--grid", "--range", "--batch-size", "--sequence-length"),
    "profile": ("--dtype",),
    "profile-model": ("--mode", "--execution"),
    "design": ("--free", "--budget", "--set"),
}
"""The same for one command only."""

# typer exports only a subclass of the exception it raises for unusable arguments.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


class _Interrupted(Exception):
    """A `KeyboardInterrupt` inside a command, out of sight of typer's own handling."""


class _BrokenPipe(Exception):
    """A `BrokenPipeError` inside a command, out of sight of typer's own handling."""


class _Commands(TyperGroup):
    """The commands; interruptions and broken pipes pass typer by."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None
        except BrokenPipeError:
            raise _BrokenPipe from None


_PLAIN: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}

app = typer.Typer(cls=_Commands, help="Forecast how long a deep-learning model takes on a GPU.", **_PLAIN)
app.command()(predict)
app.command()(gpus)
app.command()(models)
app.command()(checkpoints)
app.command()(train)
app.command()(evaluate)
app.command()(calibrate)
app.command()(profile)
app.command("profile-model")(profile_model)
app.command()(sensitivity)
app.command()(sweep)
app.command()(design)
app.command()(compare)
app.command()(leaderboard)
app.command("scale-trace")(scale_trace)
imports = typer.Typer(help="Turn other projects' measurements into the measurement schema.", **_PLAIN)
app.add_typer(imports, name="import")
imports.command("neusight")(import_neusight)
imports.command("aiconfigurator")(import_aiconfigurator)


@imports.callback()
def _importers() -> None:
    """Keeps `neusight` a name of its own: typer merges an only command into its group."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"neusight-jax {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    prepare_jax(
        any_platform=ctx.invoked_subcommand in ("train", "sweep", "profile", "profile-model"), announce=bool(ctx.obj)
    )


def _spread(arguments: Sequence[str]) -> list[str]:
    """`--option A B` as `--option A --option B`, for the options in `LISTS` and `LISTS_OF`."""
    lists = (*LISTS, *LISTS_OF.get(arguments[0] if arguments else "", ()))
    out: list[str] = []
    option = ""
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            option = argument if argument in lists else ""
        elif option and out[-1] != option:
            out.append(option)
        out.append(argument)
    return out


def _fail(message: str, code: int = BAD_INPUT) -> int:
    typer.echo(" ".join(message.split()), err=True)
    return code


def _drop_output() -> None:
    """Let the interpreter flush into nothing when it ends."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the interpreter ends


def run(arguments: Sequence[str], *, announce: bool = False) -> int:
    """Run a command line and return its exit code; errors are one line on stderr.

    `announce`: say on stderr when compiling takes long.
    """
    forget_written()
    try:
        code = app(_spread(arguments), prog_name="neusight-jax", standalone_mode=False, obj=announce)
        sys.stdout.flush()
    except InputError as error:
        return _fail(f"error: {error}")
    except _UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "neusight-jax"
        return _fail(f"error: {error.format_message().rstrip('.')}; see `{path} --help`")
    except (typer.Abort, _Interrupted, KeyboardInterrupt):
        return _fail(interrupts.line(), INTERRUPTED)  # the program itself is ended by `interrupts`
    except (_BrokenPipe, BrokenPipeError):
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        _drop_output()
        return _fail(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    return code if isinstance(code, int) else 0
