"""Model of a rank: layer specs, blocks, output layer, and its forward and backward passes."""
