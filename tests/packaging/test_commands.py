"""The names that scripts rely on: commands, their options, and exit codes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import typer

from deployments.cli import app
from tests.cli.command import CommandLine
from trainer import errors
from trainer.errors import ShoalError

# To renew: copy what the failing test prints. See its message first.
COMMANDS = {
    "capacity": ["--hosts", "RUN"],
    "doctor": ["--json", "--storage"],
    "evaluate": ["--batches", "--data", "--json", "--step", "RUN"],
    "hosts": ["--json", "RUN"],
    "plan": ["--hosts", "--json", "--set", "CONFIG"],
    "pool": ["--hosts", "--json", "[POOL]"],
    "report": ["RUN"],
    "rollback": ["--dry-run", "--json", "--reason", "--to-step", "--yes", "RUN"],
    "serve": ["--check", "SERVE_CONFIG"],
    "status": ["--json", "RUN"],
    "train": ["--set", "CONFIG"],
}


def present_commands() -> dict[str, list[str]]:
    group = typer.main.get_command(app)
    return {
        name: sorted(
            max(parameter.opts, key=len) if parameter.param_type_name == "option" else str(parameter.metavar)
            for parameter in command.params
        )
        for name, command in sorted(group.commands.items())  # type: ignore[attr-defined]
    }


def test_commands_and_options_are_the_ones_that_scripts_rely_on() -> None:
    assert present_commands() == COMMANDS, (
        "The command line has changed. A new name: add it to COMMANDS and to the documentation; it stays for good. "
        f"A name that went or changed its meaning breaks scripts: keep it, or say so in CHANGELOG.md.\n"
        f"COMMANDS = {present_commands()}"
    )


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_every_command_explains_itself(command: list[str], tmp_path: Path) -> None:
    finished = CommandLine(folder=tmp_path, prefect_home=tmp_path / "prefect")(*command, "--help")
    assert (finished.exit_code, finished.stderr) == (0, "")
    assert finished.stdout.startswith(f"Usage: shoal {' '.join(command)}".rstrip())
    assert finished.heavy == frozenset()
    for option in COMMANDS.get("".join(command), COMMANDS):
        assert option in finished.stdout


def exit_codes() -> dict[str, int]:
    """What the classes say. An error that is not meant to reach the command line still carries its parent's code."""
    found = {}
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, ShoalError) and "exit_code" in vars(value):
            found[name] = value.exit_code
    return found


def test_the_tree_of_errors_is_drawn_with_the_exit_codes_that_they_carry() -> None:
    drawn = re.findall(r"── (\w+)[^\n]*?exit (\d)", str(errors.__doc__))
    carried = {name: code for name, code in exit_codes().items() if name not in {"ShoalError", "SegmentFailedError"}}
    assert {name: int(code) for name, code in drawn} == carried


def test_the_help_of_train_lists_every_exit_code(tmp_path: Path) -> None:
    helped = CommandLine(folder=tmp_path, prefect_home=tmp_path / "prefect")("train", "--help").stdout
    listed = {int(code) for code in re.findall(r"\b(\d)\s+[a-z]", helped.split("Exit codes:")[1].split(".")[0])}
    assert listed == {0} | set(exit_codes().values()) - {ShoalError.exit_code}
