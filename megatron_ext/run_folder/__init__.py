"""Files by which the processes of a run, and those that look at it, know of each other."""
