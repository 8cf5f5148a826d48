"""What each command does: functions that take what was given, and the table that names them."""

from semkv_bench.commands.given import Command, Given, Option
from semkv_bench.commands.table import COMMANDS, options_of

__all__ = ["COMMANDS", "Command", "Given", "Option", "options_of"]
