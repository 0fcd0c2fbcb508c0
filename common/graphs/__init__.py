"""What Omne-R1 asks of graphs: their tools, and questions made from them."""
