"""What a pass is made of: Triton kernels, their references and their work."""
