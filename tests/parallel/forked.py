"""Programs that run in a fork of the pool's first process, which has imported what they need; a small process stands for each.

`python forked.py SOCKET -m MODULE ...` or `-c CODE` ends as the program does, and the program ends with it. This file imports nothing else
of the project: starting it takes a hundredth of the time that importing torch takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys


def stand_in(path: str, program: list[str]) -> None:
    """Have the server at `path` run a program with this process's environment and standard streams; end with the program's status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        text = json.dumps({"program": program, "environment": dict(os.environ)}).encode()
        socket.send_fds(server, [len(text).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(text)
        with server.makefile() as answer:
            status = int(answer.readline() or -signal.SIGKILL)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve_programs(listener: socket.socket, others: set[int]) -> None:
    """Fork a process for each program that is asked for, until one of the processes `others` ends."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                if ended in others:
                    return
        if select.select([listener], [], [], 0.2)[0]:
            client = listener.accept()[0]
            if os.fork() == 0:
                _keep(client)
                os._exit(0)
            client.close()


def _keep(client: socket.socket) -> None:
    """Run a client's program in another fork and send the client its status; kill the program if the client ends."""
    size, streams, *_ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as content:
        given = json.loads(content.read(int.from_bytes(size, "big")))
    program = os.fork()
    if program == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(given["environment"])
        _run(*given["program"])
    for stream in streams:
        os.close(stream)
    while True:
        ended, status = os.waitpid(program, os.WNOHANG)
        if ended:
            with contextlib.suppress(OSError):  # the client ended, too
                client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            return
        if select.select([client], [], [], 0.02)[0]:
            os.kill(program, signal.SIGKILL)


def _run(option: str, program: str, *arguments: str) -> None:
    """Run a program as `python -m` or `python -c` does, and end this process."""
    import runpy
    import traceback

    sys.argv, status = [option, *arguments], 1
    try:
        if option == "-c":
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(program, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (a program's error ends it as Python would)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    stand_in(sys.argv[1], sys.argv[2:])
