"""Takes 4 MiB of a control group's memory for each byte on stdin.

usage: memory_hog.py CGROUP
"""

import os
import sys
from pathlib import Path

Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
taken = []
while sys.stdin.buffer.read(1):
    taken.append(b"x" * (4 << 20))
    sys.stdout.write(".")
    sys.stdout.flush()
