"""Parts of a training step for which time and memory are reported; `model_parts` assigns modules to them.

This module is fast to import, because reports and plans are made without Megatron.
"""

MIXER, FEED_FORWARD, NORMS = "mixer", "feed-forward", "norms and residual"
EMBEDDING, LOSS = "embedding", "output layer and loss"
MODEL = (MIXER, FEED_FORWARD, NORMS, EMBEDDING, LOSS)

COMMUNICATION, OPTIMIZER = "communication", "optimizer"
FORWARD, BACKWARD = "forward", "backward"
