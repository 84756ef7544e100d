"""The exception tree. Knows exit codes; must not know who raises.

Day0Error
+-- UsageError        4  the user's words are wrong: option, path, config, checklist, an adapter that cannot be imported
|   +-- ConfigError
|   +-- ChecklistError
|   +-- SpecError
|   +-- MappingError
+-- CheckpointError   1  the checkpoint is not what it says: index, header, offsets, digests
+-- TraceError        1  a trace or golden is missing, corrupt, stale or of another setup
+-- PortError         1  the side under test raised, crashed, hung or returned nonsense
+-- NothingToVerify   5  no stage and no criterion in scope
"""

from __future__ import annotations

import re

EXIT_ACCEPTED, EXIT_REFUSED, EXIT_INTERRUPTED, EXIT_INTERNAL, EXIT_USAGE, EXIT_NOTHING = 0, 1, 2, 3, 4, 5


class Day0Error(Exception):
    """A failure with an exit code. The message says what was expected, what was found, where, and what to do next."""

    exit_code = EXIT_INTERNAL


class UsageError(Day0Error):
    """The user's words are wrong; nothing was started."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """The configuration file or a `--set` is wrong."""


class ChecklistError(UsageError):
    """A checklist file is wrong."""


class SpecError(UsageError):
    """A SPEC cannot be parsed, or names something that cannot be imported."""


class MappingError(UsageError):
    """A mapping is not in its language, matches nothing, or does not fit the tensors."""


class CheckpointError(Day0Error):
    """The checkpoint is not what its index and headers say."""

    exit_code = EXIT_REFUSED


class TraceError(Day0Error):
    """A trace is missing, corrupt, stale or belongs to another setup."""

    exit_code = EXIT_REFUSED


class PortError(Day0Error):
    """The side under test failed."""

    exit_code = EXIT_REFUSED


class NothingToVerify(Day0Error):
    """No stage is in scope."""

    exit_code = EXIT_NOTHING


def user_frame(stack: str) -> str:
    """Return the innermost line of a stack that is neither torch's, nor a library's, nor day0's: `port.py line 95`.

    Understands a traceback (innermost last) and a dump of a hung thread (innermost first).
    """
    frames = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', stack)
    own = [f for f in frames if not re.search(r"site-packages|dist-packages|lib/python|/harness/|^<", f[0])]
    if not own:
        return ""
    file, line, function = own[0] if "most recent call first" in stack else own[-1]
    return f"{file.rpartition('/')[2]} line {line} in {function}"


def nearest(word: str, known: list[str]) -> str:
    """Return ` (did you mean 'x'?)` for the nearest valid name, or the list of valid names."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else f" (valid: {', '.join(sorted(known))})"
