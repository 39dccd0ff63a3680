"""The configuration of a run: schema, reading and writing, rules. Imports neither torch nor Megatron nor a mixer."""
