"""The page of a run: writer.py writes it, record.py has the form of its records."""
