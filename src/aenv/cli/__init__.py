"""The ``aenv`` command: the table of commands, and how a failure ends the process.

A command's module loads when the command runs; ``aenv --help`` reads only this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from aenv import __version__
from aenv.errors import nearest

COMMANDS = {
    "init": ("aenv.cli.project:init", "Make a new project."),
    "add": ("aenv.cli.add:add", "Make a project of an MCP server, an HTTP service or an A2A agent."),
    "run": ("aenv.cli.project:run", "Run the project here as a sandbox on this machine."),
    "test": ("aenv.cli.project:test", "Run the project's tests against a live sandbox."),
    "validate": ("aenv.cli.validate:validate", "Check the project, and say how to mend what is wrong."),
    "replay": ("aenv.cli.replay:replay", "Run recorded episodes again, and show the first difference."),
    "trajectory": ("aenv.cli.trajectory:trajectory", "Look at recorded episodes, and export them."),
    "build": ("aenv.cli.build:build", "Build an image of the project, with Docker or Podman."),
    "push": ("aenv.cli.publish:push", "Push the project to the hub."),
    "pull": ("aenv.cli.publish:pull", "Pull an environment from the hub."),
    "release": ("aenv.cli.publish:release", "Release a version on the hub, after which it never changes."),
    "list": ("aenv.cli.browse:list_", "List the environments on the hub."),
    "get": ("aenv.cli.browse:get", "Show an environment on the hub."),
    "versions": ("aenv.cli.browse:versions", "List the versions of an environment on the hub."),
    "access": ("aenv.cli.publish:access", "Show or change who may see an environment and push to it."),
    "yank": ("aenv.cli.publish:yank", "Withdraw a version: only who asks for exactly it still gets it."),
    "delete": ("aenv.cli.publish:delete", "Delete a version from the hub."),
    "rollout": ("aenv.cli.rollout:rollout", "Run episodes of an agent, and keep what they were scored."),
    "eval": ("aenv.cli.eval:eval_", "Evaluate an agent on the tasks of an environment."),
    "compare": ("aenv.cli.eval:compare", "Compare two evaluations, task by task."),
    "tasks": ("aenv.cli.tasks:tasks", "List and show the tasks of an environment."),
    "train-check": ("aenv.cli.train_check:train_check", "Check that a trainer can play in an instance."),
    "instance": ("aenv.cli.instance:instance", "Make, watch and end instances on a platform."),
    "service": ("aenv.cli.service:service", "Make, watch, change and end services on a platform."),
    "serve": ("aenv.cli.serve:serve", "Serve a platform: hub, API service and gateway."),
    "deploy": ("aenv.cli.deploy:deploy", "Put the platform on a Kubernetes cluster, or bring it up to date there."),
    "hub": ("aenv.cli.hub:hub", "Move a whole hub: export and import."),
    "top": ("aenv.cli.top:top", "Watch what instances do at the moment."),
    "usage": ("aenv.cli.usage:usage", "Show or export what was used, by owner and experiment."),
    "token": ("aenv.cli.token:token", "Make, list and revoke tokens for a platform."),
    "secret": ("aenv.cli.secret:secret", "Set, list and delete secrets on a platform."),
    "quota": ("aenv.cli.quota:quota", "Show and set limits: of the platform, of owners, of experiments."),
    "config": ("aenv.cli.config:config", "Show and change this user's settings."),
    "doctor": ("aenv.cli.doctor:doctor", "Check this machine, and say how to mend what is wrong."),
    "gc": ("aenv.cli.gc:gc", "Remove what ended programs left behind on this machine."),
    "version": ("aenv.cli.doctor:version", "Show the versions of aenv, Python and the platform."),
}


class UnknownCommand(click.UsageError):
    """A command that is not in the table, with the nearest that is."""

    def __init__(self, name: str, known: Sequence[str], ctx: click.Context) -> None:
        super().__init__(f"there is no command {name!r}", ctx)
        near = nearest(name, known)
        self.hint = f"did you mean '{ctx.command_path} {near}'?" if near else None


class Commands(click.Group):
    """A group that answers a miss with the nearest command, and loads ``lazy`` ones when asked for."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._lazy, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        from importlib import import_module

        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            raise UnknownCommand(args[0], self.list_commands(ctx), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self._lazy:
            super().format_commands(ctx, formatter)
            return
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self._lazy.items()])


@click.group(
    cls=Commands,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(__version__, prog_name="aenv", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an unexpected failure. Also: AENV_DEBUG=1.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Write environments for agents in Python, run them, and serve them over MCP.

    \b
    Example:
      aenv init my-env && cd my-env && aenv run

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 wrong configuration.
    """
    ctx.ensure_object(dict)["debug"] = debug


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. A command returns its own, or None for 0."""
    state: dict[str, bool] = {}
    try:
        code = cli.main(arguments, prog_name="aenv", obj=state, standalone_mode=False)
    except Exception as exc:
        from aenv.cli.output import failure

        return failure(exc, debug=state.get("debug", False))
    return code if isinstance(code, int) else 0
