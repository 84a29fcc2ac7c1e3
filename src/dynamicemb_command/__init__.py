"""The ``dynamicemb`` command.

It is outside of the package, whose import takes seconds (it imports torch): whoever interrupts the
command meanwhile gets a line, not a traceback.
"""

import sys

INTERRUPTED = 130


def main() -> int:
    """Run the command line of this process; returns the exit status."""
    try:
        from dynamicemb.cli.app import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("dynamicemb: interrupted\n")
        return INTERRUPTED
