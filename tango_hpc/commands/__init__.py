"""The `tango` command: what users call, and how each command answers."""
