"""What finished runs say: comparison at matched training loss, and the report of it."""
