"""Programs sent to a container or node: one file each, standard library only, JSON in argv[1].

They run as ``python3 -I -S -c TEXT JSON``, so they import nothing of this project.
"""
