"""hosts.yaml as checked objects: hosts, their containers, and the selection of places."""

from dflashctl.inventory.hosts_file import (
    FILE_NAME,
    find_inventory,
    load_inventory,
    parse_inventory,
)
from dflashctl.inventory.model import Container, Expect, Host, Inventory, Place, by_host
from dflashctl.inventory.starter import STARTER

__all__ = [
    "FILE_NAME",
    "STARTER",
    "Container",
    "Expect",
    "Host",
    "Inventory",
    "Place",
    "by_host",
    "find_inventory",
    "load_inventory",
    "parse_inventory",
]
