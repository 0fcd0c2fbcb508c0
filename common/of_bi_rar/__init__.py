"""What serves bi_rar.py alone: its steps as numbers, as records of the page, as a table."""
