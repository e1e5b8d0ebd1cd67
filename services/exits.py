"""Exit statuses of the command and the errors that carry them. Imports nothing heavy: every start reads it."""

from __future__ import annotations

import click

FINE = 0
CHECK_FAILED = 1
USAGE = 2
UNFIT = 3
DEADLINE = 124


class CheckFailed(click.ClickException):
    """Something that was checked is wrong: data differ, an answer is false."""

    exit_code = CHECK_FAILED


class EnvironmentUnfit(click.ClickException):
    """This machine cannot do what was asked: a library, a device or a right is missing."""

    exit_code = UNFIT


class DeadlinePassed(click.ClickException):
    """The command did not end in time."""

    exit_code = DEADLINE
