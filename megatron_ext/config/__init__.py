"""Run configuration: schema, reading and writing, rules. Imports neither torch, Megatron nor a mixer."""
