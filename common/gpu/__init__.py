"""What a GPU or several of them want: vLLM, FlexAttention over packed trees, what fits."""
