"""Files through which the processes of a run, and its observers, detect each other."""
