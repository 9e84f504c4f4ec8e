"""Ways to a place: SSH by Fabric or OpenSSH, the machine itself, and into containers by pct."""
