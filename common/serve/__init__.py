"""Servers of searches and graphs: python -m common.serve search …, graph …; and the client of chat models."""
