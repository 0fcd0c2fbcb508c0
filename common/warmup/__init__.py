"""Learning a paper's format before reinforcement learning: demonstrations of real questions, conversations on
file, GGUF files."""
