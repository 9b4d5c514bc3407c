"""Commands, exit codes and the one line an error gets.

Exit codes: 0 done; 2 bad input, with one line on stderr; 130 interrupted (`interrupts`), 143 terminated; 141 the reader
of a pipe went away.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from neusight_jax import __version__
from neusight_jax.cli import interrupts
from neusight_jax.cli.check import check
from neusight_jax.cli.compare import compare
from neusight_jax.cli.console import COMMAND
from neusight_jax.cli.design import codesign, design
from neusight_jax.cli.doctor import doctor
from neusight_jax.cli.evaluate import evaluate, leaderboard
from neusight_jax.cli.explore import explore
from neusight_jax.cli.finetune import finetune
from neusight_jax.cli.help import Command, Commands, questions
from neusight_jax.cli.importing import import_aiconfigurator, import_aiter, import_neusight
from neusight_jax.cli.listings import checkpoints, gpus, models
from neusight_jax.cli.parallelize import parallelize
from neusight_jax.cli.powercap import powercap
from neusight_jax.cli.predict import predict
from neusight_jax.cli.profile import profile, profile_model
from neusight_jax.cli.scale_trace import scale_trace
from neusight_jax.cli.schema import schema
from neusight_jax.cli.sensitivity import sensitivity
from neusight_jax.cli.serve import serve
from neusight_jax.cli.sweep import sweep
from neusight_jax.cli.train import calibrate, train
from neusight_jax.errors import BAD_INPUT, InputError, one_line
from neusight_jax.files import forget_written

INTERRUPTED, BROKEN_PIPE = 130, 141
# typer exports only a subclass of the exception it raises for unusable arguments.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


class _Ended(Exception):
    """The end of a command, by its cause, out of sight of typer's own handling."""


class _Commands(Commands):
    """The commands; interruptions and broken pipes pass typer by."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise _Ended from error


_PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "invoke_without_command": True}

app = typer.Typer(cls=_Commands, help="Forecast how long a deep-learning model takes on a GPU.", **_PLAIN)
_COMMANDS: tuple[Any, ...] = (predict, gpus, models, checkpoints, train, evaluate, calibrate, profile, profile_model)
for _command in (
    *_COMMANDS,
    parallelize,
    finetune,
    sensitivity,
    sweep,
    design,
    codesign,
    compare,
    serve,
    powercap,
    leaderboard,
    scale_trace,
    explore,
    check,
    schema,
    doctor,
):
    app.command(_command.__name__.replace("_", "-"), cls=Command)(_command)
imports = typer.Typer(help="Turn other projects' measurements into the measurement schema.", cls=Commands, **_PLAIN)
app.add_typer(imports, name="import")
imports.command("neusight", cls=Command)(import_neusight)
imports.command("aiconfigurator", cls=Command)(import_aiconfigurator)
imports.command("aiter", cls=Command)(import_aiter)


@imports.callback()
def _importers(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


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
    if ctx.invoked_subcommand is None:
        typer.echo(questions())
        return
    any_platform = ctx.invoked_subcommand in ("train", "sweep", "profile", "profile-model", "doctor")
    _prepare_jax(any_platform=any_platform, announce=bool(ctx.obj))


def _prepare_jax(*, any_platform: bool, announce: bool) -> None:
    """Choose JAX's platform, keep its compiled programs between runs, and say on stderr when compiling takes long.

    Forecasts are small, so they run on the CPU, whatever else there is; what the user has set is left alone. Importing
    the package sets nothing.

    Args:
      any_platform: leave the platform to JAX, which takes a GPU if it finds one. announce: whether to say it.
    """
    if "jax" not in sys.modules and not any_platform:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from neusight_jax.model.programs import announce_compiling, use_compile_cache

    use_compile_cache()
    if announce:
        announce_compiling(lambda: typer.echo("compiling for this model, once", err=True))


@functools.cache
def _program() -> Any:
    return typer.main.get_command(app)


def _spread(arguments: Sequence[str]) -> list[str]:
    """`--option A B` as `--option A --option B`, for the options of a command that take several values."""
    command = _program().commands.get(arguments[0] if arguments else "")
    lists = [
        name for param in getattr(command, "params", ()) if getattr(param, "multiple", False) for name in param.opts
    ]
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
    typer.echo(one_line(message), err=True)
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
    COMMAND.set(shlex.join(["neusight-jax", *arguments]))
    try:
        code = _program().main(_spread(arguments), prog_name="neusight-jax", standalone_mode=False, obj=announce)
        sys.stdout.flush()
    except InputError as error:
        return _fail(f"error: {error}")
    except _UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "neusight-jax"
        return _fail(f"error: {error.format_message().rstrip('.')}; see `{path} --help`")
    except (typer.Abort, _Ended, KeyboardInterrupt, BrokenPipeError) as error:
        if not isinstance(error.__cause__ or error, BrokenPipeError):
            return _fail(interrupts.line(), INTERRUPTED)  # the program itself is ended by `interrupts`
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        _drop_output()
        return _fail(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    return code if isinstance(code, int) else 0
