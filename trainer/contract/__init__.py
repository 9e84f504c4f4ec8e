"""What the laptop and the container agree on: paths, manifest, events, exit record, configuration.

Standard library only, importable with ``python -I -S``. This is the one package that dflashctl
imports from the trainer; everything in it is bytes, argv, files and exit status.
"""
