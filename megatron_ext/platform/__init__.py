"""Device and communication back-end: CUDA with NCCL, or the CPU with gloo."""
