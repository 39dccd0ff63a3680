"""Faulty steps, slow ranks and graceful stops."""
