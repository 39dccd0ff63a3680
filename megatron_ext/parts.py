"""The parts of a step that time and memory are told of. Which module is of which, `model_parts` says.

Reading this takes no time: reports and plans are made where Megatron is not imported.
"""

MIXER, FEED_FORWARD, NORMS = "mixer", "feed-forward", "norms and residual"
EMBEDDING, LOSS = "embedding", "output layer and loss"
MODEL = (MIXER, FEED_FORWARD, NORMS, EMBEDDING, LOSS)

COMMUNICATION, OPTIMIZER = "communication", "optimizer"
FORWARD, BACKWARD = "forward", "backward"
