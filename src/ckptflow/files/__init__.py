"""Files and directories of any kind: names, times, sizes, JSON, and locks."""
