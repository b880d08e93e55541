"""Runs one program of a model's where it can do no harm.

Linux namespaces take the network, other processes and the right to write files away: the program
sees no interface, is process 1 of its own world, and everything but an empty directory in memory is
read-only; ``/proc``, ``/run``, ``/dev/shm`` and ``/dev/pts`` are empty. A filter of system calls
keeps it from Unix sockets, which no namespace hides where they have a path. When process 1 ends, so
does all that it started. Limits bound CPU time, memory, file size and the number of processes. What
it can still do is what the user who runs the trainer can: read files, and write to named pipes and
devices.

``launch`` is the process in the jail, ``confinement`` how it gets there, ``seccomp`` the filter and
``calls`` how tests call a program in another process. They run in an isolated interpreter with the
standard library alone, and import nothing else. :mod:`trainer.rewards.program` starts and ends
them.
"""
