"""The programs of dmuond in bin/, with their libraries in lib/.

Each function makes this process the program of its name.
"""

import functools
import os
import signal
import sys


def _become(name: str) -> None:
    # Python ignores these, and what it becomes would, with all that this starts.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", name)
    os.execv(program, [program, *sys.argv[1:]])


dmuond = functools.partial(_become, "dmuond")
dmuond_lane = functools.partial(_become, "dmuond-lane")
dmuonctl = functools.partial(_become, "dmuonctl")
muon_tune = functools.partial(_become, "muon_tune")
