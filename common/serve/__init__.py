"""Servers of searches and of graphs: python -m common.serve.search …, python -m common.serve.graph …"""
