"""What serves mygo_mujica.py alone: planners and workers as numbers, as records of the page, as table."""
