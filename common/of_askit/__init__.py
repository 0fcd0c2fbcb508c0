"""What serves askit.py alone: small models, questions with their sentences, and what is told of a search."""
