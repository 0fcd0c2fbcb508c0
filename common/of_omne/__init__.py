"""What serves omne_r1.py alone: questions over graphs, graphs of the world, a judge, records of the page."""
