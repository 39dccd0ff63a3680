"""Planning of runs: memory and step time of a layout, and sweeps with matched compute or parameters."""
