"""dflashctl: train DFlash drafters in Proxmox LXC containers, from the laptop."""

__version__ = "0.1.0"
