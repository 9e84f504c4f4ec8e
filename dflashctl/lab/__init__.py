"""A look-alike Proxmox site on one Linux machine, for tests, the demo and anyone who wants to try.

Each "host" is a set of namespaces over a read-only view of this machine, with a real OpenSSH
server, real LXC containers and stand-ins for ``pct`` and ``nvidia-smi``. Faults can be switched on.
Run: ``dflashctl lab up``. What it is and is not: docs/lab.md.

Modules, from the bottom: ``kernel`` (mount and friends), ``spec`` (what a site consists of),
``interpreter`` (what a Python needs to be visible), ``requirements``; ``state`` (what a state
directory says) and ``claim`` (who may touch it); ``container`` and ``host`` (what runs inside),
``forwarder`` and ``supervisor`` (what keeps a site alive), ``faults``, ``site`` (the public
interface). ``pct`` and ``nvidia_smi`` are programs that are copied into hosts and containers.
"""
