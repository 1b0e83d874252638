"""Virtual machines in which a real systemd is told what to do: see README.md."""
