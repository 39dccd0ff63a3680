"""Where the stages run: this machine, Slurm, Ray; and how far they are."""
