"""Run another program tied to this one: `python -P -m trainer.control.tether PARENT_PID SIGNAL PROGRAM ARGUMENT…`.

`trainer.processes.tethered` makes such command lines. The program gets a session of its own, so that a Ctrl-C meant
for Shoal does not reach it, and SIGNAL (its name) when its parent ends, however that happens. Both survive the exec,
so the program needs to know nothing.
"""

from __future__ import annotations

import os
import signal
import sys

from trainer.processes import die_with_parent

if __name__ == "__main__":
    os.setsid()
    die_with_parent(int(sys.argv[1]), signal.Signals[sys.argv[2]])
    os.execvp(sys.argv[3], sys.argv[3:])
