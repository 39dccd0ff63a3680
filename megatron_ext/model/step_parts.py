"""Parts of a training step for which time and memory are reported; `module_parts` assigns modules to them.

This module does not import Megatron, because reports and plans are made without it.
"""

MIXER, FEED_FORWARD, NORMS = "mixer", "feed-forward", "norms and residual"
EMBEDDING, LOSS = "embedding", "output layer and loss"
MODEL = (MIXER, FEED_FORWARD, NORMS, EMBEDDING, LOSS)

COMMUNICATION, OPTIMIZER = "communication", "optimizer"
FORWARD, BACKWARD = "forward", "backward"
