"""The commented hosts.yaml that `dflashctl init` writes."""

STARTER = """\
# hosts.yaml: the Proxmox VE hosts, their containers, and which GPU does what.
# dflashctl looks for it here and in the directories above; --config FILE or DFLASHCTL_CONFIG
# name another. Check it with: dflashctl doctor
version: 1

hosts:
  kpro6:
    address: root@10.1.2.6      # user@host, or a Host of your ssh_config
    # port: 22
    # jump: admin@bastion       # as for ssh -J; its key and known_hosts come from ssh_config
    # backend: fabric           # fabric | openssh (the ssh program, kept open) | local (no SSH)
    # connect_timeout_s: 10
    # become: auto              # auto: sudo -n unless the login is root | none | sudo
    # identity_file: ~/.ssh/id_ed25519
    # ssh_config: ./ssh_config  # instead of ~/.ssh/config
    # known_hosts: ./known_hosts
    # groups: [lab]
    containers:
      200:                      # the vmid, see `pct list`; `self` is the host itself, without pct
        workspace: /workspace   # releases/ and runs/ go below it
        python: /opt/dflash/bin/python
        # Target GPUs run the frozen model, drafter GPUs train; a GPU may stand in both lists.
        # An index of nvidia-smi, a UUID (GPU-5f0c...), or cpu for a thread on the processor.
        gpus:
          target: [0, 1, 2, 3, 4]
          drafter: [5, 6, 7]
        # log_dir: /var/log/dflash
        # env: {HF_HOME: /models/hf}
        # groups: [train]       # --limit train selects it
        # pip_args: ["--find-links", "/srv/wheels"]
        # expect: {count: 8, model: RTX 3090}   # other GPUs are refused; a host may have it too
"""
