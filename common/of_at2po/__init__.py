"""What serves at2po.py alone: its baselines, and its trees as numbers and records of the page."""
