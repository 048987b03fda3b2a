"""convgrad inside PyTorch: its gradients for the models that you have. Needs PyTorch, which is imported here only."""
