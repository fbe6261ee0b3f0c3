"""Be a console script: ``in_fork.py SOCKET NAME WORD ...`` runs it in a fork of the process that listens there.

The fork has the streams, folder and environment of this process, which hands its signals on and ends as the fork does.
NAME may be "python3", with a file, or a program after -c. If the environment has PIDS, a directory, the
fork's process id is written to the file NAME.RANK there.
"""

import json
import os
import signal
import socket
import sys

path, *words = sys.argv[1:]
connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
socket.send_fds(connection, [b"."], [0, 1, 2])
answers = connection.makefile("rw")
print(json.dumps({"words": words, "cwd": os.getcwd(), "environment": {**os.environ}}), file=answers, flush=True)
pid = int(answers.readline())
if "PIDS" in os.environ:
    with open(f"{os.environ['PIDS']}/{words[0]}.{os.environ.get('RANK', '')}", "w") as stream:
        stream.write(str(pid))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.alarm(1800)  # a hung test ends
status = int(answers.readline())
if status < 0:
    if -status != signal.SIGKILL:  # which nothing can change
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
