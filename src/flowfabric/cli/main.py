"""The command `flowfabric`: its parts, and how it reports errors."""

import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Final

import click
import msgspec
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.cli.budgets import budgets
from flowfabric.cli.database import bench, doctor, migrate_command
from flowfabric.cli.executions import ls, show, why
from flowfabric.cli.flows import flow
from flowfabric.cli.following import events, tail
from flowfabric.cli.limits import limits
from flowfabric.cli.operators import accept, cancel, priority, replay, revoke
from flowfabric.cli.options import BrokenProgram, json_option
from flowfabric.cli.running import dev, worker
from flowfabric.cli.schedules import schedules
from flowfabric.cli.server import reconcile, serve, tokens
from flowfabric.cli.signals import signal, waitpoints
from flowfabric.cli.submit import submit
from flowfabric.cli.workers import lanes, workers
from flowfabric.core.checks import visible
from flowfabric.errors import MIGRATE_APP, FlowFabricError, migrating
from flowfabric.terminal import block, prepare
from flowfabric.version import __version__

DEBUG_VARIABLE: Final = "FLOWFABRIC_DEBUG"
SHELLS: Final = {
    "bash": ("~/.bashrc", 'eval "$(_FLOWFABRIC_COMPLETE=bash_source flowfabric)"'),
    "zsh": ("~/.zshrc", 'eval "$(_FLOWFABRIC_COMPLETE=zsh_source flowfabric)"'),
    "fish": (
        "~/.config/fish/completions/flowfabric.fish",
        "_FLOWFABRIC_COMPLETE=fish_source flowfabric | source",
    ),
}


class Sections(click.Group):
    """A group whose help lists commands by what they are for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (str(each.name), each.get_short_help_str(formatter.width))
                        for each in commands
                    ]
                )


@click.group(
    cls=Sections,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="The database is named by --url or the variable FLOWFABRIC_URL, or by a program: --app"
    " module:app or FLOWFABRIC_APP."
    " Exit status: 0 done, 1 failed, 2 usage, 3 not found, 4 refused, 5 database unavailable,"
    " 6 access denied.",
)
@click.version_option(__version__, prog_name="flowfabric")
def cli() -> None:
    """Durable execution: inspect and control runs, start workers, maintain the database."""


@click.command("completion", short_help="Switch on completion in your shell.")
@click.argument("shell", type=click.Choice(list(SHELLS)))
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Print the line that switches on completion; add it to your shell's start-up file."""
    place, line = SHELLS[shell]
    if as_json:
        screen.emit({"file": place, "line": line})
        return
    click.echo(f"# add to {place}", err=True)
    click.echo(line)


SECTIONS: Final[Mapping[str, tuple[click.Command, ...]]] = {
    "Run": (worker, dev, serve, reconcile),
    "Inspect": (ls, show, why, tail, events, waitpoints),
    "Control": (
        *(submit, signal, cancel, replay, accept, priority, revoke),
        *(flow, lanes, workers, schedules, budgets, limits),
    ),
    "Maintain": (migrate_command, doctor, tokens, bench, completion),
}
for section in SECTIONS.values():
    for command in section:
        cli.add_command(command)


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status; nothing is raised."""
    as_json = "--json" in arguments
    options.IMPORTED.clear()
    prepare()
    # Commands report errors themselves; only workers and servers log, once configured.
    logging.getLogger("flowfabric").addHandler(logging.NullHandler())
    try:
        answer = cli.main(list(arguments), prog_name="flowfabric", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        return options.INTERRUPTED
    except click.ClickException as error:
        if as_json:
            _report("usage", error.format_message(), as_json=True)
        else:
            error.show()
        return options.USAGE
    except FlowFabricError as error:
        message = str(error)
        if options.IMPORTED:
            message = message.replace(MIGRATE_APP, migrating(options.IMPORTED[-1]))
        _report(error.code, message, as_json=as_json)
        return options.status_of(error)
    except KeyboardInterrupt:
        return options.INTERRUPTED
    except (SystemExit, BrokenPipeError):
        # The reader of our output has seen enough, as `head` does. In this mode, a broken pipe
        # is all that Click turns into an exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return options.OK
    except BrokenProgram as error:
        if not as_json:
            screen.err().print(block(error.where), soft_wrap=True)
        _report("import_failed", str(error), as_json=as_json)
        return options.FAILED
    except Exception as error:
        return _unexpected(error, as_json=as_json)
    return answer if isinstance(answer, int) else options.OK


def _unexpected(error: Exception, *, as_json: bool) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        screen.err().print(block(traceback.format_exc()), soft_wrap=True)
    hint = f"set {DEBUG_VARIABLE}=1 to see where"
    _report("internal", f"{type(error).__name__}: {error} ({hint})", as_json=as_json)
    return options.FAILED


def _report(code: str, message: str, *, as_json: bool) -> None:
    if as_json:
        error = {"code": code, "message": visible(message)}
        sys.stderr.write(msgspec.json.encode({"error": error}).decode() + "\n")
    else:
        line = Text.assemble(("Error: ", "bold red"), message)
        screen.err().print(line, soft_wrap=True)
