"""What serves mygo_mujica.py alone: data and flags, written lines, what is told of planner and workers."""
