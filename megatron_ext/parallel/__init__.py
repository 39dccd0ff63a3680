"""Process groups, exchanges over them, and parameters that know how they are split."""
