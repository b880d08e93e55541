"""The process in the jail, and those around it that put it there.

Roles, of which none ever reports on itself:

- ``script``: the program with its standard input and output.
- ``serve``: the program is executed, then answers calls of its functions over a socket.
- ``test``: tests are executed, see :mod:`trainer.jail.calls`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from trainer.jail.calls import Channel, Program, run_tests
from trainer.jail.confinement import (
    die_with_parent,
    drop_privileges,
    enter_namespaces,
    hide_files,
    map_users,
    set_limits,
)

READY = b"1"
"""Written to the status pipe when confinement holds, before anything of the program runs."""


def main(given: int) -> int:
    """Do what the file of options, JSON as ``trainer.rewards.program`` writes it, asks for."""
    with open(given, encoding="utf-8") as file:
        options = json.load(file)
    return launch(options)


def launch(options: dict[str, Any]) -> int:
    """Start the program in new namespaces and wait for it; returns its exit status.

    The process that creates namespaces is not yet in the new one of processes, its child is; and
    its user ids must be mapped by a process outside.
    """
    die_with_parent()
    if not options["confine"]:
        return run(options)
    entered, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        enter_namespaces()
        die_with_parent()
        os.write(entered[1], b"x")
        options["nobody"] = os.read(mapped[0], 1) == b"n"
        hide_files(options["directory"].encode())
        inner = os.fork()
        if inner == 0:
            return run(options)
        return _wait(inner, options)
    os.close(entered[1])
    if os.read(entered[0], 1):
        os.write(mapped[1], b"n" if map_users(child) else b"s")
    return _wait(child, options)


def _wait(child: int, options: dict[str, Any]) -> int:
    # An end of the program must be seen as the end of its channels, so nobody else may hold them.
    for name in ("status", "channel", "peer"):
        if options.get(name) is not None:
            os.close(options[name])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF


def run(options: dict[str, Any]) -> int:
    """Finish confinement, say so, and do what the role asks for."""
    if options["confine"]:
        drop_privileges(become_nobody=options["nobody"])
        die_with_parent()
    os.environ.clear()
    os.chdir(options["directory"])
    set_limits(options)
    os.write(options["status"], READY)
    os.close(options["status"])
    # What the program complains of is nobody's, and a full pipe would stop it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    if options["role"] == "script":
        exec(compile(options["source"], "<program>", "exec"), {"__name__": "__main__"})
        return 0
    channel = Channel(socket.socket(fileno=options["channel"]))
    if options["role"] == "serve":
        Program(channel).serve(options["source"])
    else:
        peer = Channel(socket.socket(fileno=options["peer"]))
        channel.send(run_tests(options["tests"], peer))
    return 0
