"""Finding the flags of a training command in a shell script, without executing anything."""

from megaaccum.interop.shell.lexer import ShellError
from megaaccum.interop.shell.script import read_words

__all__ = ["ShellError", "read_words"]
