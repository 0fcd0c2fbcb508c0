"""What serves mygo_mujica.py alone: planners and workers as numbers, on the page, as written lines."""
